"""The training loop: restore the newest checkpoint, then step until the phases are done."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from functools import partial

from trainer.checkpoint.changed_settings import Setup, since, spelled
from trainer.checkpoint.reading import Checkpoint
from trainer.checkpoint.resume import choose, load, record, require_saved
from trainer.checkpoint.saving import Saver, attempt
from trainer.checkpoint.shared_folder import stuck_saves
from trainer.checkpoint.train_state import TrainState, state_of
from trainer.console import say, silent, warn
from trainer.data.loader import StepBatch
from trainer.data.order import Order
from trainer.engine.engine import Engine, StepResult
from trainer.engine.schedule import Phase
from trainer.engine.stopwatch import Stopwatch
from trainer.errors import NotFiniteError, PassingError, TrainerError, exit_code, explain
from trainer.exits import FAILED
from trainer.monitor.guard import GUIDE, OUTSIDE, Finding, Guard, GuardState, Setback
from trainer.monitor.metrics import Metrics, Subject
from trainer.ranks.stop import Stop
from trainer.ranks.world import World, limit_waits, status_server, together
from trainer.run.config import to_tree
from trainer.run.description import describe, devices
from trainer.run.diagnosis import diagnose
from trainer.run.evaluation import evaluate
from trainer.run.folder import forget_end, leave_configuration, leave_end
from trainer.run.fresh import build_model, start
from trainer.run.home import Home, open_home, working_folder
from trainer.run.phases import PhaseData, Plan, remaining
from trainer.run.resume_checks import (
    identity,
    keep_prior,
    require_allowed,
    require_before,
    require_found,
    require_same_run,
    require_state,
)
from trainer.run.stop_request import requested


class Run:
    """The parts of one run on one rank, and what they do at a step boundary when they are due."""

    def __init__(self, plan: Plan, world: World, home: Home, stop: Stop) -> None:
        config = plan.config
        self.plan, self.config, self.phases, self.world = plan, config, plan.phases, world
        self.folder, self.store = home.folder, home.store
        self.say = say if world.is_main else silent
        self.stop = stop
        self.guard = Guard(config.guard)
        watch = Stopwatch(world.device)
        self.identity = together(partial(identity, plan), world)  # once: a save reads no other files
        # before changing anything in the folder: it may be another run's
        self.found = choose(self.store, world, require_state, partial(require_allowed, config))
        together(self._require_same, world)
        if self.found is not None:
            self.plan = plan = keep_prior(plan, self.found, self.say)
            self.config = config = plan.config
        self.metrics = together(partial(self._open_folder, watch), world)
        try:
            module = together(partial(build_model, plan), world)
            self.engine = Engine(config.engine, module, config.optimizer, world, config.run.seed, watch)
        except BaseException as error:
            self.fail(error)
            raise
        limit_waits(config.run.timeout_seconds)
        self.saver = Saver(self.store, config.checkpoint, self.engine.optimizer, world)
        self._warn_of_leftovers()
        self.restarts = 0
        self.saved = -1  # the step of the newest checkpoint
        self.heldout: dict[str, float] = {}  # held-out metrics of this step, if it was evaluated
        self.owes = False  # whether this step still needs its evaluation: a stop saves first
        self.counted = 0.0  # seconds of training that are in the state of a phase that ends by time, or came before it
        self.reached = ""  # description of the targets that ended the run, once reached
        self.boundary: TrainState | None = None  # the state that matches the weights; None during a step

    @property
    def over(self) -> bool:
        """Whether the run ends at this step boundary. The same on all ranks."""
        return self.stop.decided or bool(self.reached) or self.guard.ending is not None

    def _open_folder(self, watch: Stopwatch) -> Metrics:
        heldout = [data.heldout for data in self.phases if data.heldout is not None]
        self.config.evaluation.stop_at.require(any(each.manifest.settings.pairs != "single" for each in heldout))
        if self.world.is_main:
            forget_end(self.folder)
        subject = Subject(
            self.config.run.name,
            self.folder,
            self.config.model,
            target_steps=None if self.plan.timed else sum(phase.steps for phase in self.config.phases),
            remaining=partial(remaining, self.phases),
            checkpoint_steps=self.config.checkpoint.every_steps,
            baselines=tuple(data.baseline for data in self.phases),
            clipping=self.config.optimizer.gradient_clipping,
            guard=self.guard,
            status_server=status_server(),
        )
        return Metrics(self.config.metrics, subject, self.world, watch)

    def _warn_of_leftovers(self) -> None:
        for path, reason in stuck_saves(self.folder).items() if self.world.is_main else ():
            warn(f"no save will be able to remove {reason}")
            self.saver.warned.add(str(path))

    def restore(self) -> TrainState:
        """Load the newest checkpoint, or start fresh; report which, and return the state."""
        if self.found is None:
            together(partial(start, self.plan, self.engine.optimizer, self.say), self.world)
            self.engine.refresh_weights()
            return TrainState()
        found = self.found
        self.guard.state = GuardState.of(found)
        self.restarts = state_of(found).restarts + 1
        state = self._load(found)
        self.reached = self.config.evaluation.stop_at.reached(self.heldout)
        self.say(f"resumed from {self.store.place(found.folder.name)} at step {state.step}")
        ours = Setup(to_tree(self.config), self.identity, self.engine.precision, self.world.size)
        if changed := since(Setup.of(found), ours, state):
            self.say(f"changed since that checkpoint: {spelled(changed)}")
            self.metrics.changed(state.step, changed)
        return state

    def _load(self, found: Checkpoint) -> TrainState:
        load(found, self.engine)
        state = replace(state_of(found), restarts=self.restarts)
        self.saved, self.heldout = state.step, found.record.get("heldout", {})
        return state

    def describe(self, state: TrainState) -> None:
        """Report once what actually runs; leave the resolved configuration and the tokenizer in the run's folder."""
        together(lambda: leave_configuration(self.folder, self.plan) if self.world.is_main else None, self.world)
        if self.plan.timed:
            names = ", ".join(self.plan.timed)
            self.say(f"note: these phases end by time, so repeating or resuming them does not give equal bits: {names}")
        facts, ranks = describe(self.config, self.engine, self.world, self.say), devices(self.world)
        together(lambda: self.metrics.describe(state, facts, ranks), self.world)

    def _require_same(self) -> None:
        if self.found is not None:
            require_same_run(self.found.record, self.identity, self.config.phases, self.found.folder)

    def order(self, state: TrainState) -> Order:
        """The order of samples in the state's phase, without what rollbacks made the run skip."""
        order = self.phases[state.phase].order
        return replace(order, gaps=order.gaps + self.guard.gaps(state.phase))

    def rate(self, state: TrainState) -> float:
        """The learning rate of the next step."""
        return self.guard.rate(state.rate(self.phases[state.phase].phase), state.step)

    def step(self, state: TrainState, batch: StepBatch, rate: float) -> StepResult:
        """Take an optimizer step. Raises Setback on all ranks if the gradients are not finite."""
        counts = self.phases[state.phase].weighted(batch.counts)
        try:
            return self.engine.step(batch.micro_batches, counts, state.attempts, rate)
        except NotFiniteError as error:
            self.metrics.flush()
            finding = self.guard.overflowed(state, batch.following, str(error))
            self.metrics.act([finding])
            raise

    def save(self, state: TrainState, due: bool = False) -> None:
        """Save a checkpoint every so many steps, or when ``due``; report how earlier saves ended."""
        ended = []
        turn = state.step > 0 and state.step % self.config.checkpoint.every_steps == 0
        if state.step != self.saved and (due or turn):
            self.saved = state.step
            self.metrics.flush()
            more = {"heldout": self.heldout, "identity": self.identity, "config": to_tree(self.config)}
            more["guard"] = asdict(self.guard.state)
            ended = self.saver.save(state.step, record(self.engine, asdict(state), **more))
            self.metrics.spend("checkpoint")
        elif state.attempts % self.config.metrics.log_every_steps == 0:
            ended = self.saver.look()
        for saved in ended:
            self.metrics.checkpoint(saved)
            self.metrics.act(self.guard.saved(saved))

    def roll_back(self, setback: Setback) -> TrainState:
        """Go back to the newest checkpoint from before the samples to skip, and let it record these.

        Equals a restart from that checkpoint. Raises TrainerError on all ranks if the guard must stop the run instead.
        """
        finding, self.boundary = setback.finding, None
        evidence = diagnose(finding, self.phases[finding.phase], self.engine, self.folder, self.world)
        for saved in self.saver.finish():
            self.metrics.checkpoint(saved)
        if finding.action == "stop":
            kind = NotFiniteError if isinstance(setback.__context__, NotFiniteError) else TrainerError
            raise kind(self._spelled(finding, evidence))
        self.say(f"guard: {evidence}")
        self.found = found = choose(self.store, self.world, partial(self._require_before, finding), require_found)
        assert found is not None  # require_found
        state = self._load(found)
        self.guard.went_back(found, finding)
        together(partial(self._remove, range(state.step + 1, finding.step + 1)), self.world)
        self._amend(found, state)
        self.metrics.went_back(state)
        self.say(
            f"guard: went back to {self.store.place(found.folder.name)} at step {state.step}, skipping {finding.gap}"
        )
        self.counted, self.owes = self.metrics.trained, False
        return state

    def _require_before(self, finding: Finding, found: Checkpoint) -> None:
        require_before(finding, found)
        require_same_run(found.record, self.identity, self.config.phases, found.folder)

    def _remove(self, steps: range) -> None:
        """Remove the checkpoints of these steps, or a restart would resume from one of them."""
        for reason in self.store.remove(steps) if self.world.is_main else ():
            warn(f"left behind: {reason}")

    def _amend(self, found: Checkpoint, state: TrainState) -> None:
        """Let the checkpoint record what the guard skips. Replaces one file, so a kill loses nothing."""
        changes = partial(self.store.amend, found, state=asdict(state), guard=asdict(self.guard.state))
        if self.world.is_main and (failure := attempt(changes)):
            place = self.store.place(found.folder.name)
            warn(f"{place} does not record what is skipped ({failure}): a restart would go back once more")

    def _spelled(self, finding: Finding, evidence: str = "") -> str:
        """The line that ends rank 0; the other ranks end without one."""
        said = "; ".join(filter(None, [finding.what, evidence, f"see {GUIDE}"]))
        return f"the guard stopped the run: {said}" if self.world.is_main else ""

    def evaluate(self, state: TrainState, data: PhaseData, due: bool = False) -> None:
        """Evaluate on the phase's held-out shards every so many steps, or when ``due``.

        A stopping run leaves the evaluation to the run that resumes: there may be no time for it before the save.
        """
        every, self.heldout = self.config.evaluation.every_steps, {}
        self.owes = data.heldout is not None and (due or (every is not None and state.step % every == 0))
        if data.heldout is None or not self.owes or self.stop.decided:
            return
        self.metrics.flush()
        batches = data.heldout.sweep(self.config.evaluation.micro_batch, self.stop)
        mask_id = data.heldout.manifest.tokenizer.specials.mask
        heldout = evaluate(self.engine.model, batches, self.world.device, self.engine.gathers, mask_id)
        if not self.stop.broke_off:
            self.metrics.heldout(state, heldout)
            self.owes, self.heldout, self.reached = False, heldout, self.config.evaluation.stop_at.reached(heldout)
            if self.reached:
                self.say(f"target reached: {self.reached}")

    def catch_up(self, state: TrainState) -> None:
        """Evaluate the step that the run resumes from, if a stop prevented its evaluation."""
        if self.found is not None and not self.heldout:
            phase = self.phases[state.phase]
            self.evaluate(state, phase, due=state.finished(phase.phase))

    def clocked(self, state: TrainState, phase: Phase) -> TrainState:
        """Count the training time of a phase that ends by time: at logged steps and before a save, by rank 0's clock.

        The phase's first steps all count, or the rate would stay at the start of its warm-up until the first logged
        step. The time of evaluations and saves is not training time.
        """
        trained, every = self.metrics.trained, self.config.metrics.log_every_steps
        if phase.minutes is not None:
            counts = state.phase_step <= every or state.attempts % every == 0
            if not counts and state.step % self.config.checkpoint.every_steps:
                return state
            [spent] = self.stop.sum(round(1000 * (trained - self.counted)) if self.world.is_main else 0)
            state = replace(state, milliseconds=state.milliseconds + spent)
        self.counted = trained
        return state

    def entering(self, state: TrainState) -> TrainState:
        """Move the state on to the next phase if one is finished, unless its evaluation is still owed."""
        return state if self.owes else state.entering(self.config.phases)

    def end(self, state: TrainState) -> None:
        """Finish the last save and write ``ended.json``, which a killed run does not leave.

        Raises TrainerError on all ranks, with the reason on rank 0, when the last checkpoint could not be saved.
        """
        self.metrics.flush()
        ending = self.guard.ending if state.phase < len(self.phases) else None
        if ending is not None:
            self.save(state, due=True)
        for saved in self.saver.finish():
            self.metrics.checkpoint(saved)
        require_saved(self.saver)
        if ending is not None:
            raise self._stopped(ending)
        how = "reached" if self.reached else "done" if state.phase == len(self.phases) else "stopped"
        together(lambda: leave_end(self.folder, how, state.step) if self.world.is_main else None, self.world)
        self.metrics.spend("checkpoint")
        self.metrics.end("done" if self.reached else how, f"reached {self.reached}" if self.reached else None)

    def _stopped(self, finding: Finding) -> TrainerError:
        if finding.sign in OUTSIDE:
            return PassingError(self._spelled(finding))
        if not finding.gap.samples:
            return TrainerError(self._spelled(finding))
        data = self.phases[finding.phase]
        return TrainerError(self._spelled(finding, diagnose(finding, data, self.engine, self.folder, self.world)))

    def rescue(self, error: BaseException) -> None:
        """Save the steps since the last checkpoint if ``error`` is a shortage between two steps.

        Only a run of one rank can: in a larger run the other ranks are already in the next step.
        """
        state = self.boundary
        if exit_code(error) != FAILED or self.world.size > 1 or state is None or state.step in (0, self.saved):
            return
        self.say(f"{explain(error)}: saving step {state.step} before ending")
        try:
            self.save(state, due=True)
        except Setback:  # the next start finds the same trouble
            return
        for saved in self.saver.finish():
            self.metrics.checkpoint(saved)

    def fail(self, error: BaseException) -> None:
        """Notify the monitors before this process ends. Other ranks may already be gone."""
        self.stop.decided = True  # from here on each rank ends on its own
        self.metrics.end("stopped" if isinstance(error, KeyboardInterrupt) else "failed", error)


def train(plan: Plan, world: World) -> TrainState:
    """Train from the newest checkpoint until the last phase is done or the target is reached.

    Returns the last state; its phase is past the last one unless the run was stopped.
    """
    stop = _listen(plan, world)  # before a wait for the run's home
    with closing(open_home(plan.config, world)) as home:
        run = Run(plan, world, home, stop)
        try:
            state = run.restore()
            run.describe(state)
            while True:
                try:
                    return _train(run, state)
                except Setback as setback:  # raised on all ranks together
                    state = run.roll_back(setback)
        except BaseException as error:
            error.add_note(f"after step {run.metrics.reached}")
            run.rescue(error)
            run.fail(error)
            raise
        finally:
            home.settle()
            run.metrics.linger()


def _listen(plan: Plan, world: World) -> Stop:
    """Begin to take signals and, on rank 0, requests to stop."""
    asked = partial(requested, working_folder(plan.config), say) if world.is_main else None
    return Stop(world, plan.config.metrics.log_every_steps, asked)


def _train(run: Run, state: TrainState) -> TrainState:
    run.boundary = state
    run.catch_up(state)
    state = run.entering(state)
    while state.phase < len(run.phases) and not run.over:
        data = run.phases[state.phase]
        size = data.batch(state.phase_step)
        steps = data.loader.steps(run.order(state), state.position, *size, run.stop)
        with closing(steps):
            for batch in steps:
                rate, run.boundary = run.rate(state), None
                result = run.step(state, batch, rate)
                state = run.boundary = state.after(batch, result.applied)
                run.metrics.step(state, batch, result, rate)
                state = run.boundary = run.clocked(state, data.phase)
                done = result.applied and state.finished(data.phase)
                run.stop.agreed(state.attempts)
                if result.applied:  # a skipped step consumes its data but changes nothing else
                    run.evaluate(state, data, due=done)
                run.save(state, due=done or run.over)
                grows = data.batch(state.phase_step) != size
                if done or grows or run.over:
                    break
            else:  # a stop was requested while waiting for the next batch
                run.save(state, due=True)
        state = run.entering(state)
    run.end(state)
    return replace(state, phase=len(run.phases)) if run.reached else state
