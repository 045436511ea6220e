"""One fine-tuning run, from a pre-trained encoder to its best evaluation; it resumes from its checkpoints."""

from __future__ import annotations

import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from data_prep.json_text import shown
from data_prep.tokenizer import Tokenizer
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.changed_settings import Changes, differing, spelled
from trainer.checkpoint.leftovers import drafts, move_aside, remove, temporary
from trainer.checkpoint.reading import Checkpoint, CheckpointConfig
from trainer.checkpoint.resume import choose, load, record, require_saved
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.shared_folder import SharedFolder
from trainer.console import say, silent, warn
from trainer.convert import weights as plain_weights
from trainer.data.order import Order
from trainer.engine.engine import Engine, EngineConfig, StepResult
from trainer.engine.optimizer import OptimizerConfig
from trainer.engine.partition import fill_masters
from trainer.engine.schedule import Phase, learning_rate
from trainer.errors import DivergedError, NotFiniteError, TrainerError
from trainer.finetune.data import EvaluationFile, UnitTable, cut_of, take
from trainer.finetune.evaluation import answer, judge
from trainer.finetune.options import Options, Setting
from trainer.finetune.progress import Progress
from trainer.finetune.result import RESULT, RunResult, write_json
from trainer.finetune.task import Task, TaskModel
from trainer.model.bert import ModelConfig
from trainer.ranks.stop import Stop
from trainer.ranks.world import World, limit_waits, together

WEIGHTS = "weights.safetensors"  # of the best evaluation, once the run has ended
BEST = "best"  # until then: the checkpoint of the best evaluation


@dataclass(frozen=True)
class FineTuningJob:
    """The inputs and options that all runs of one command share."""

    options: Options  # resolved: the precision in use, and where the predictions go
    task: Task
    model: ModelConfig
    start: dict[str, Tensor]  # the encoder's weights, unsharded
    tokenizer: Tokenizer
    training: UnitTable
    dev: EvaluationFile
    also: tuple[EvaluationFile, ...]  # further files to score at the end
    identity: dict[str, Any]  # everything that decides what is learned, apart from setting and seed


@dataclass(frozen=True)
class State:
    """A run at a step boundary: everything that decides its future, apart from weights and moments."""

    attempts: int = 0  # steps tried; keys the dropout
    step: int = 0  # taken; the schedule counts these
    position: int = 0  # units read, which is the number of the next one
    best: float = -math.inf  # the task's measure at the best evaluation
    best_at: int = -1  # attempts at that evaluation, as checkpoints are numbered
    worse: int = 0  # evaluations since the best one
    evaluations: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0  # spent in steps, over restarts
    first_loss: float | None = None  # of the first step


class FineTuningRun:
    """One setting and seed on one rank. Every rank makes every call."""

    def __init__(self, job: FineTuningJob, setting: Setting, seed: int, world: World, stop: Stop) -> None:
        options = job.options
        self.job, self.setting, self.seed, self.world, self.stop = job, setting, seed, world, stop
        self.folder = options.out / setting.folder(seed)
        self.say = say if world.is_main else silent
        alone = len(options.settings) * len(options.seeds) == 1
        self.name = options.task if alone else self.folder.name  # shown in log lines
        self.epoch = len(job.training)
        self.total = max(1, round(setting.epochs * self.epoch))  # units to read
        self.cut = cut_of(setting.batch, options.machine.micro_batch, world.rank, world.size)
        self.order = Order((self.epoch,), seed, 1)
        steps = max(1, -(-self.total // setting.batch))
        recipe = options.recipe
        self.phase = Phase(
            options.task,
            str(options.wish.train),
            recipe.length,
            steps,
            setting.rate,
            global_batch=setting.batch,
            warmup_steps=round(recipe.warmup * steps),
        )
        together(lambda: self.folder.mkdir(parents=True, exist_ok=True) if world.is_main else None, world)
        module = TaskModel(job.model, job.task, seed)
        machine = EngineConfig(options.machine.zero_stage, options.machine.precision)
        adam = OptimizerConfig("adam", weight_decay=recipe.weight_decay, gradient_clipping=recipe.clipping)
        self.engine = Engine(machine, module, adam, world, seed)
        limit_waits(options.machine.timeout)
        often = CheckpointConfig(every_steps=1, keep=2)  # the newest, and the one before it, which may be the best
        self.saver = Saver(SharedFolder(self.folder), often, self.engine.optimizer, world)
        self.saved = -1  # attempts at the newest checkpoint
        self.progress = Progress(self.name, self.folder, self.phase.steps, self.epoch, world)

    # ---- the whole run -----------------------------------------------------------------------------------------

    def run(self) -> RunResult | None:
        """Train to the end. None if asked to stop: the run has saved, and the same command resumes it."""
        state = self.restore()
        self.progress.start(state.attempts, state.first_loss)
        try:
            while not self._over(state):
                state = self._step(state)
                if self.stop.agreed(state.attempts):
                    self.progress.require_finite()
                    self._save(state)
                    self._finish(state)
                    return None
        except (DivergedError, NotFiniteError) as error:
            self.saver.finish()
            return self._end(state, f"diverged after step {state.step}: {error}")
        self._finish(state)
        return self._end(state)

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the parameters: they keep it all alive, out of reach of Python's collector."""
        self.engine.close()

    def _over(self, state: State) -> bool:
        patience = self.job.options.patience
        return state.position >= self.total or (patience is not None and state.worse >= patience)

    def _step(self, state: State) -> State:
        began = time.perf_counter()
        count = min(self.setting.batch, self.total - state.position)
        batches, counts = take(self.job.training, self.order, state.position, count, self.cut)
        batches = [batch.pin(self.world.device) for batch in batches]
        rate = learning_rate(self.phase, state.step + 1)
        result = self.engine.step(batches, counts, state.attempts, rate)
        self._require_finite(result)
        self.progress.step(result, counts.targets, count)
        after = replace(
            state,
            attempts=state.attempts + 1,
            step=state.step + result.applied,
            position=state.position + count,
            seconds=state.seconds + time.perf_counter() - began,
        )
        self.progress.log_step(after.attempts, rate)
        after = replace(after, first_loss=self.progress.first_loss)
        return self._at_boundary(after, ended=after.position // self.epoch > state.position // self.epoch)

    def _require_finite(self, result: StepResult) -> None:
        """Raise NotFiniteError, on all ranks, if the loss scale cannot go lower; the engine covers other cases."""
        scale = self.engine.loss_scale
        if not result.applied and scale.scale <= scale.floor:
            raise NotFiniteError(f"gradients overflow at a loss scale of {scale.scale:g}: lower the learning rate")

    def _at_boundary(self, state: State, ended: bool) -> State:
        """Evaluate and save at a step boundary, if due. ``ended``: an epoch just ended."""
        options = self.job.options
        every, often = options.eval_every, options.save_every
        evaluates = ended or state.position >= self.total or (every is not None and state.attempts % every == 0)
        saves = evaluates or (often is not None and state.attempts % often == 0)
        if saves:
            self.progress.require_finite()
        if evaluates:
            state = self._evaluate(state)
        if saves:
            self._save(state)
        return state

    def _evaluate(self, state: State) -> State:
        job = self.job
        judged = judge(answer(self.engine.model, job.dev.table, self.world), job.dev, job.task, self.world)
        value = judged.metrics[job.task.measure]
        better = value > state.best
        place = {"step": state.attempts, "epoch": state.position / self.epoch, "constant": judged.constant}
        self.progress.evaluated(place, judged, job.task.measure)
        return replace(
            state,
            best=max(value, state.best),
            best_at=state.attempts if better else state.best_at,
            worse=0 if better else state.worse + 1,
            evaluations=(*state.evaluations, place | {"figures": judged.metrics}),
        )

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def restore(self) -> State:
        """Load the newest checkpoint and return its state; without one, start afresh."""
        found = choose(SharedFolder(self.folder), self.world, _state_of, self._require_whole)
        if found is None:
            fill_masters(self.engine.partition, self.job.start)
            self.engine.refresh_weights()
            return State()
        together(partial(self._require_same, found), self.world)
        self._drop_best_after(checkpoint.step_of(found.folder))
        load(found, self.engine)
        state = _state_of(found)
        self._keep_best(state.best_at)
        self.say(f"{self.name}: resumed at step {state.step}")
        self.progress.changed(state.attempts, self._changed(found))
        self.saved = state.attempts
        return state

    def _require_whole(self, found: Checkpoint | None, passed: list[str]) -> None:
        if found is None and passed:
            raise TrainerError(f"no whole checkpoint in {self.folder}: remove the folder to start this run again")

    def _require_same(self, found: Checkpoint) -> None:
        if found.record["identity"] != self._identity():
            foreign = spelled(differing(found.record["identity"], self._identity()))
            raise TrainerError(
                f"checkpoint {found.folder} belongs to another run ({foreign}): undo that change, or name another --out"
            )

    def _changed(self, found: Checkpoint) -> Changes:
        """The settings that changed since the checkpoint."""
        before = {"precision": found.record["precision"], "ranks": len(found.parts)}
        now = {"precision": self.engine.precision, "ranks": self.world.size}
        return differing(found.record["config"], self._config()) | differing(before, now)

    def _drop_best_after(self, step: int) -> None:
        """Remove a best checkpoint later than ``step``: it has the files of one that was skipped as damaged."""
        for path in checkpoint.named(self.folder / BEST) if self.world.is_main else ():
            if checkpoint.step_of(path) > step:
                shutil.rmtree(path, ignore_errors=True)

    def _save(self, state: State) -> None:
        if self.saved != state.attempts:
            self._saved(self.saver.finish(), state.best_at)
            plain = asdict(state) | {"best": state.best if math.isfinite(state.best) else None}
            reported = record(self.engine, plain, identity=self._identity(), config=self._config())
            self.saver.save(state.attempts, reported)
            self.saved = state.attempts

    def _saved(self, ended: list[Saved], best_at: int) -> None:
        for saved in ended:
            if saved.leftover:
                warn(f"left behind: {saved.leftover}", self.say)
            if saved.failure:
                self.say(f"step {saved.step} could not be saved ({saved.failure}): fix the cause; the run continues")
            self._keep_best(best_at)

    def _keep_best(self, step: int) -> None:
        """Give the best evaluation's checkpoint a second name, so that it is not pruned."""

        def keep() -> None:
            source, kept = self.folder / f"step-{step:08d}", self.folder / BEST
            if not self.world.is_main or (kept / source.name).is_dir() or not source.is_dir():
                return
            draft = temporary(kept)
            shutil.copytree(source, draft / source.name, copy_function=_link)
            move_aside(kept)
            draft.replace(kept)
            for path in drafts(self.folder, BEST):
                if reason := remove(path):
                    warn(f"left behind: {reason}", self.say)

        together(keep, self.world)

    def _finish(self, state: State) -> None:
        """Wait for the last save. Raises TrainerError on all ranks if it failed."""
        self._saved(self.saver.finish(), state.best_at)
        require_saved(self.saver)

    def _config(self) -> dict[str, Any]:
        """Settings that may change on resume; a change is reported."""
        machine = asdict(self.job.options.machine)
        changing = {name: machine[name] for name in ("zero_stage", "kernels", "micro_batch")}
        model = asdict(self.job.model)
        del model["decoder_prior"]  # there is no MLM decoder to start
        return {"model": model, **changing, "save_every": self.job.options.save_every}

    def _identity(self) -> dict[str, Any]:
        return {**self.job.identity, **asdict(self.setting), "seed": self.seed}

    # ---- the end -----------------------------------------------------------------------------------------------

    def _end(self, state: State, reason: str = "") -> RunResult:
        """Write the result and the best weights, and remove everything else that is large."""
        best = next((e for e in state.evaluations if e["step"] == state.best_at), None)
        how = "diverged" if reason else "done"
        if best and not reason and best["constant"]:
            how, reason = "degenerate", "it gives the same answer for every input"
        result = RunResult(
            how=how,
            seed=self.seed,
            setting=asdict(self.setting),
            figures=best["figures"] if best and how != "diverged" else {},
            step=state.best_at,
            steps=state.step,
            seconds=round(state.seconds, 3),
            examples_per_second=round(state.position / max(state.seconds, 1e-9), 2),
            evaluations=state.evaluations,
            reason=reason,
        )
        if reason:
            warn(f"{self.name}: {how} run: {reason}", self.say)
        together(lambda: self._leave(result) if self.world.is_main else None, self.world)
        return result

    def _leave(self, result: RunResult) -> None:
        if result.how != "diverged" and not (self.folder / WEIGHTS).exists():
            found = checkpoint.find(self.folder / BEST)
            if found.record["state"]["attempts"] != result.step:
                raise TrainerError(
                    f"the checkpoint of step {result.step}, the best evaluation, could not be saved: fix the cause "
                    f"reported above, remove {self.folder}, and start again"
                )
            tensors, tokenizer = checkpoint.load_weights(found), self.job.tokenizer.sha256()
            plain_weights.write(tensors, self.job.model, self.folder / WEIGHTS, tokenizer)
        write_json(self.folder / RESULT, asdict(result))
        for path in (*checkpoint.named(self.folder), self.folder / BEST):
            shutil.rmtree(path, ignore_errors=True)
        (self.folder / "latest").unlink(missing_ok=True)


def _state_of(found: Checkpoint) -> State:
    """The state in a checkpoint's record. Raises TrainerError if a run cannot resume from that record."""
    try:
        state = found.record["state"]
        best = -math.inf if state["best"] is None else state["best"]
        return State(**state | {"evaluations": tuple(state["evaluations"]), "best": best})
    except (LookupError, TypeError) as error:
        raise TrainerError(f"checkpoint {found.folder} is damaged: its record is malformed ({shown(error)})") from None


def _link(source: str, target: str) -> None:
    """Hard-link a file under a second name; copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
