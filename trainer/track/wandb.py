"""Sends a run to Weights & Biases, whose library takes the server, the key and the mode from its own settings.

W&B numbers the rows of a run, and never takes a row for an earlier number. Here the number counts the steps taken,
repeated ones each time, and charts use the step itself.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.exits import DONE, FAILED, STOPPED
from trainer.track.about import About
from trainer.track.journal import Batch, Standing
from trainer.track.points import FAMILIES
from trainer.track.tracker import outages, repeated

PROJECT = "lambert"  # unless WANDB_PROJECT names another
CODES = {"running": DONE, "done": DONE, "stopped": STOPPED, "failed": FAILED, "killed": FAILED}
COMPLETE = "complete"  # a file in an offline folder that was closed
INIT_SECONDS = 30.0  # at most, for a server's first answer; the sender tries again later anyway
LATE = "checkpoint"  # the family of metrics that are recorded when later steps have been taken


class Wandb:
    """A run of Weights & Biases. Offline, it is written to ``wandb`` in the run's folder once there is something new.

    Raises TrainerError if the library is switched off.
    """

    def __init__(self) -> None:
        import wandb

        self._library: Any = wandb
        self._settings = wandb.setup(wandb.Settings(silent=True)).settings
        if self._settings.mode == "disabled":
            raise TrainerError("wandb is switched off: set WANDB_MODE to online or offline, or run wandb enabled")
        self._offline = self._settings.mode in ("offline", "dryrun")
        self.lasting = not self._offline  # online, the server says what it has
        self._run: Any = None
        self._about: About | None = None
        self._had = 0  # rows below this number have arrived before
        self._row = 0  # the newest row
        self._url = ""

    def open(self, about: About, standing: Standing) -> Standing:
        """Continue the run, or create it."""
        if self._run is not None:
            self._run = None
            with outages("wandb"):
                self._library.teardown()
        self._about = about
        if self._offline:
            standing = standing if _complete(about) else Standing()
            self._row = standing.taken
            return standing
        for folder in (about.folder / "wandb").glob(f"run-*-{about.id}"):  # what did not arrive is sent again
            shutil.rmtree(folder, ignore_errors=True)
        self._had = had = self._begin().starting_step
        if not standing.offset or had <= standing.taken:  # send all, but skip the rows that have arrived
            self._row = 0
            return Standing(
                highest=had - 1 if had and standing.repeats else 0
            )  # then a row's step is unknown: send all
        self._row = standing.taken  # more has arrived than was noted: skip that
        return replace(standing, highest=standing.highest + had - 1 - standing.taken)

    def describe(self, about: About, facts: dict[str, str]) -> None:
        """Set the settings and what runs as the run's configuration."""
        run = self._begin()
        with outages("wandb"):
            run.config.update({**about.settings, "ran_with": facts}, allow_val_change=True)

    def send(self, batch: Batch) -> None:
        """Send a batch: one row for each step."""
        run = self._begin()
        with outages("wandb"):
            if batch.back is not None:
                run.summary["repeated_steps"] = repeated(batch.standing)
            before = batch.standing.taken - batch.standing.highest
            for point in batch.points:
                self._row = max(self._row, before + point.step)
                if self._row >= self._had:
                    late = all(name.startswith(f"{LATE}/") for name in point.values)
                    run.log({f"{LATE}/step" if late else "step": point.step, **point.values}, step=self._row)

    def close(self, state: str, standing: Standing) -> None:
        """Record the state and the reason for it in the run's summary, and finish the upload."""
        if self._run is None and standing.closed == state:
            return
        run = self._begin()
        with outages("wandb"):
            run.summary.update({"state": state, "reason": standing.reason})
            run.finish(exit_code=CODES[state])
            if self._offline:
                (Path(run.settings.sync_dir) / COMPLETE).touch()
            self._run = None

    @property
    def place(self) -> str:
        """The address of the run's page, or the command that uploads it."""
        assert self._about is not None
        if self._offline:
            return f"wandb sync {self._about.folder}/wandb/offline-run-*-{self._about.id}"
        return self._url

    def _begin(self) -> Any:
        if self._run is None:
            assert self._about is not None
            settings = self._library.Settings(console="off", silent=True, save_code=False, x_disable_stats=True)
            settings.init_timeout = min(self._settings.init_timeout, INIT_SECONDS)
            errors = self._library.errors
            with outages("wandb"):
                try:
                    self._run = self._library.init(
                        project=self._settings.project or PROJECT,
                        id=self._about.id,
                        name=self._about.name,
                        resume=None if self._offline else "allow",
                        dir=str(self._about.folder),
                        settings=settings,
                    )
                except (errors.UsageError, errors.AuthenticationError) as error:
                    raise TrainerError(f"wandb: {error}") from None
                for family in FAMILIES:
                    own = f"{family}/step" if family == LATE else "step"
                    self._run.define_metric(f"{family}/*", step_metric=own)
                self._run.summary.update({"state": "running", "reason": ""})
                self._url = "" if self._offline else str(self._run.url)
        return self._run


def _complete(about: About) -> bool:
    """Whether the run has a complete offline folder. Others are removed: when killed, the library loses the last rows.

    What was in them is written again.
    """
    found = list((about.folder / "wandb").glob(f"offline-run-*-{about.id}"))
    for folder in found:
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return any(folder.exists() for folder in found)
