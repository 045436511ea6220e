"""The run: load, restore, then step until the phases are done."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from data_prep.manifest import TOKENIZER_FOLDER, manifest_hash
from kernels import backend
from trainer import checkpoint
from trainer.config import Config, fingerprint, to_tree
from trainer.data import PhaseData
from trainer.engine import Engine
from trainer.errors import TrainerError
from trainer.evaluate import evaluate
from trainer.metrics import Metrics
from trainer.schedule import learning_rate
from trainer.state import TrainState
from trainer.stop import Stop
from trainer.world import World, broadcast_text, together

ENDED = "ended.json"  # in the run's folder: {"how": "done" or "stopped", "step": …}


class Run:
    """The parts of one run on one rank, and what they do at a step's border, each when it is its turn."""

    def __init__(self, config: Config, phases: list[PhaseData], world: World) -> None:
        self.config, self.phases, self.world = config, phases, world
        self.folder = Path(config.run.folder)
        self.stop = Stop(world, config.metrics.log_every_steps)
        self.metrics = together(self._open_folder, world)
        self.engine = Engine(config.engine, config.model, config.optimizer, world, config.run.seed)

    def _open_folder(self) -> Metrics:
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
        target = sum(phase.steps for phase in self.config.phases)
        return Metrics(self.config.metrics, self.folder, self.config.model, target, self.world)

    def restore(self) -> TrainState:
        """The newest checkpoint's state, with weights and moments loaded; or a fresh one, and says which.

        Rank 0 chooses, so that all ranks go on from the same one, and all of them do or none.
        """
        name = broadcast_text(together(self._newest, self.world), self.world)
        if not name:
            return TrainState()
        found = together(lambda: self._load(self.folder / name), self.world)
        self.engine.refresh_weights()
        state = TrainState(**found.record["state"])
        if self.world.is_main:
            print(f"lambert: resumed from {found.folder} at step {state.step}", flush=True)
        return replace(state, restarts=state.restarts + 1)

    def _newest(self) -> str:
        """The name of the checkpoint to go on from, empty for a fresh start; on rank 0."""
        if not self.world.is_main:
            return ""
        found, passed = checkpoint.newest(self.folder)
        for reason in passed:
            print(f"lambert: passed over: {reason}", flush=True)
        wanted = self.config.run.resume
        if found is None:
            if wanted == "required" or passed:
                raise TrainerError(f"no whole checkpoint in {self.folder}: check run.folder, or remove what is there")
            return ""
        if wanted == "never":
            raise TrainerError(
                f"{found.folder} exists and run.resume is never: give run.folder another name, or set resume to auto"
            )
        return found.folder.name

    def _load(self, folder: Path) -> checkpoint.Checkpoint:
        found = checkpoint.read(folder)
        record = found.record
        _require_same_run(record, self._identity(), folder)
        checkpoint.restore(found, self.engine.optimizer, self.world)
        if record["precision"] == self.engine.precision:  # the scale of another precision says nothing here
            scale, good_steps = record["loss_scale"]["scale"], record["loss_scale"]["good_steps"]
            self.engine.loss_scale = replace(self.engine.loss_scale, scale=scale, good_steps=good_steps)
        return found

    def save(self, state: TrainState, due: bool = False) -> None:
        """Save a checkpoint every so many steps, or when it is ``due`` anyway."""
        if not (due or state.step % self.config.checkpoint.every_steps == 0):
            return
        self.metrics.flush()
        started = time.perf_counter()
        record = {
            "state": asdict(state),
            "loss_scale": asdict(self.engine.loss_scale),
            "precision": self.engine.precision,
            "optimizer": {"steps": self.engine.optimizer.steps},
            "identity": self._identity(),
            "config": to_tree(self.config),
        }
        keep = self.config.checkpoint.keep
        folder = checkpoint.save(self.folder, state.step, self.engine.optimizer, record, keep, self.world)
        self.metrics.checkpoint(state, folder, time.perf_counter() - started)

    def evaluate(self, state: TrainState, data: PhaseData, due: bool = False) -> None:
        """Evaluate on the phase's held-out shards every so many steps, or when it is ``due`` anyway."""
        every = self.config.evaluation.every_steps
        if data.heldout is None or not (due or (every is not None and state.step % every == 0)):
            return
        self.metrics.flush()
        batches = data.heldout.sweep(self.config.evaluation.micro_batch)
        self.metrics.heldout(state, evaluate(self.engine.model, batches, self.world.device))

    def end(self, state: TrainState) -> None:
        """Leave word of how the run ended; a run that was killed leaves none."""
        self.metrics.flush()
        if self.world.is_main:
            how = "done" if state.phase == len(self.phases) else "stopped"
            (self.folder / ENDED).write_text(json.dumps({"how": how, "step": state.step}) + "\n", encoding="utf-8")

    def _identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it."""
        model = asdict(self.config.model)
        shape = {key: value for key, value in model.items() if not key.endswith("dropout")}
        return {
            "seed": self.config.run.seed,
            "shuffle_window": self.config.run.shuffle_window,
            "optimizer": self.config.optimizer.name,
            "model": shape,
            "phases": [[data.phase.name, manifest_hash(data.loader.folder)] for data in self.phases],
        }


def train(config: Config, phases: list[PhaseData], world: World) -> TrainState:
    """Train until the last phase is done, from the newest checkpoint on. Returns the last state."""
    run = Run(config, phases, world)
    state = run.restore().entering(config.phases)
    _describe(run, state)
    while state.phase < len(phases):
        data = phases[state.phase]
        steps = data.loader.steps(data.order, state.position, data.global_batch, data.micro_batches)
        with closing(steps):
            for batch in steps:
                rate = learning_rate(data.phase, state.phase_step + 1)
                result = run.engine.step(batch.micro_batches, batch.counts, state.attempts, rate)
                state = state.after(batch, result.applied)
                done = state.phase_step == data.phase.steps
                run.metrics.step(state, batch, result, rate)
                if not result.applied:
                    continue  # the data moved on; nothing else did
                stopping = run.stop.agreed(state)
                run.evaluate(state, data, due=done)
                run.save(state, due=done or stopping)
                if done or stopping:
                    break
        state = state.entering(config.phases)
        if stopping:
            break
    run.end(state)
    return state


def _require_same_run(record: dict[str, Any], ours: dict[str, Any], folder: Path) -> None:
    """What was trained on so far must be the same. Later phases, steps, rates and dropout may change."""
    saved = record["identity"]
    different = [
        f"{key} was {saved[key]}, now {ours[key]}"
        for key in ("seed", "shuffle_window", "optimizer")
        if saved[key] != ours[key]
    ]
    shape = saved["model"]
    different += [f"model.{k} was {shape[k]}, now {v}" for k, v in ours["model"].items() if shape[k] != v]
    begun = record["state"]["phase"] + 1
    if saved["phases"][:begun] != ours["phases"][:begun]:
        names = ", ".join(name for name, _ in saved["phases"][:begun])
        different.append(f"phases {names}, in this order, with the training shards of then, must come first")
    if different:
        raise TrainerError(
            f"checkpoint {folder} is of another run ({'; '.join(different)}): restore that, or give run.folder "
            "another name"
        )


def _leave_configuration(folder: Path, config: Config, data: PhaseData) -> None:
    (folder / ENDED).unlink(missing_ok=True)
    text = yaml.safe_dump(to_tree(config), sort_keys=False)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    shutil.copytree(data.loader.folder / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER, dirs_exist_ok=True)


def _describe(run: Run, state: TrainState) -> None:
    """Say once what really runs, and leave the resolved configuration and the tokenizer beside the checkpoints."""
    config, chosen = run.config, backend.resolve()
    together(lambda: _leave_configuration(run.folder, config, run.phases[0]) if run.world.is_main else None, run.world)
    run.metrics.describe(
        state,
        {
            "run": config.run.name,
            "config": fingerprint(to_tree(config)),
            "ranks": str(run.world.size),
            "device": run.world.device.type,
            "zero_stage": str(config.engine.zero_stage),
            "optimizer": config.optimizer.name,
            "kernels": chosen.name,
            "apex": chosen.apex,
            "parameters": str(run.engine.parameters),
            **run.engine.versions,
        },
    )
    run.metrics.start_clock()
