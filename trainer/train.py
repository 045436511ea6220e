"""The run: load, restore, then step until the phases are done."""

from __future__ import annotations

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
from trainer.loss_scale import LossScale
from trainer.metrics import Metrics
from trainer.schedule import learning_rate
from trainer.state import TrainState
from trainer.world import World


class Run:
    """The parts of one run on one rank, and what they do at a step's border, each when it is its turn."""

    def __init__(self, config: Config, phases: list[PhaseData], world: World) -> None:
        self.config, self.phases, self.world = config, phases, world
        self.folder = Path(config.run.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainerError(f"run.folder {self.folder} cannot be made ({error.strerror}): name another") from None
        target = sum(phase.steps for phase in config.phases)
        self.metrics = Metrics(config.metrics, self.folder, config.model, target, world)
        self.engine = Engine(config.engine, config.model, config.optimizer, world, config.run.seed)

    def restore(self) -> TrainState:
        """The newest checkpoint's state, with weights and moments loaded; or a fresh one, and says which."""
        found, passed = checkpoint.newest(self.folder)
        if self.world.is_main:
            for reason in passed:
                print(f"lambert: passed over: {reason}", flush=True)
        if found is None:
            if self.config.run.resume == "required" or passed:
                raise TrainerError(f"no whole checkpoint in {self.folder}: check run.folder, or remove what is there")
            return TrainState()
        if self.config.run.resume == "never":
            raise TrainerError(
                f"{found.folder} exists and run.resume is never: give run.folder another name, or set resume to auto"
            )
        record = found.record
        _require_same_run(record["identity"], self._identity(), found.folder)
        checkpoint.restore(found, self.engine.optimizer)
        self.engine.refresh_weights()
        self.engine.loss_scale = LossScale(**record["loss_scale"])
        state = TrainState(**record["state"])
        if self.world.is_main:
            print(f"lambert: resumed from {found.folder} at step {state.step}", flush=True)
        return replace(state, restarts=state.restarts + 1)

    def save(self, state: TrainState, due: bool = False) -> None:
        """Save a checkpoint every so many steps, or when it is ``due`` anyway."""
        if not (due or state.step % self.config.checkpoint.every_steps == 0):
            return
        self.metrics.flush()
        started = time.perf_counter()
        record = {
            "state": asdict(state),
            "loss_scale": asdict(self.engine.loss_scale),
            "optimizer": {"name": self.config.optimizer.name, "steps": self.engine.optimizer.steps},
            "identity": self._identity(),
            "config": to_tree(self.config),
        }
        folder = checkpoint.save(self.folder, state.step, self.engine.optimizer, record, self.world)
        if self.world.is_main:
            checkpoint.prune(self.folder, self.config.checkpoint.keep)
        self.metrics.checkpoint(state, folder, time.perf_counter() - started)

    def evaluate(self, state: TrainState, data: PhaseData, due: bool = False) -> None:
        """Evaluate on the phase's held-out shards every so many steps, or when it is ``due`` anyway."""
        every = self.config.evaluation.every_steps
        if data.heldout is None or not (due or (every is not None and state.step % every == 0)):
            return
        self.metrics.flush()
        batches = data.heldout.sweep(self.config.evaluation.micro_batch)
        self.metrics.heldout(state, evaluate(self.engine.model, batches, self.world.device))

    def _identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it."""
        return {
            "seed": self.config.run.seed,
            "shuffle_window": self.config.run.shuffle_window,
            "optimizer": self.config.optimizer.name,
            "shards": {data.phase.name: manifest_hash(data.loader.folder) for data in self.phases},
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
                run.evaluate(state, data, due=done)
                run.save(state, due=done)
                if done:
                    break
        state = state.entering(config.phases)
    return state


def _require_same_run(saved: dict[str, Any], ours: dict[str, Any], folder: Path) -> None:
    """Phases may be added, and their steps and rates changed; what was trained on so far may not."""
    keys = ("seed", "shuffle_window", "optimizer")
    different = [f"{key} was {saved[key]}, now {ours[key]}" for key in keys if saved[key] != ours[key]]
    both = saved["shards"].keys() & ours["shards"].keys()
    changed = [phase for phase in sorted(both) if saved["shards"][phase] != ours["shards"][phase]]
    different += [f"the training shards of phase {phase} were others" for phase in changed]
    if different:
        raise TrainerError(
            f"checkpoint {folder} is of another run ({'; '.join(different)}): restore that, or give run.folder "
            "another name"
        )


def _describe(run: Run, state: TrainState) -> None:
    """Say once what really runs, and leave the resolved configuration and the tokenizer beside the checkpoints."""
    config, chosen = run.config, backend.resolve()
    tree = to_tree(config)
    if run.world.is_main:
        tokenizer = run.phases[0].loader.folder / TOKENIZER_FOLDER
        shutil.copytree(tokenizer, run.folder / TOKENIZER_FOLDER, dirs_exist_ok=True)
        (run.folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    run.metrics.describe(
        state,
        {
            "run": config.run.name,
            "config": fingerprint(tree),
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
