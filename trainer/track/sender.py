"""Sends a run's journal to one tracker, and notes in the run's folder how far it got."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from data_prep.atomic import replacing
from data_prep.json_text import parse_json, read_text
from trainer.errors import PassingError, TrainerError
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.monitor.trackers import Name
from trainer.run.lock import held
from trainer.track.about import about
from trainer.track.journal import Standing, batches, tail
from trainer.track.tracker import Tracker, outages

NOTES = "trackers"  # in the run's folder: a folder for each tracker
LARGEST_NOTE = 1 << 20  # bytes; one has a few hundred


class Sender:
    """Sends the run in ``folder`` to a tracker. Only one may do so at a time.

    Raises TrainerError if there is no run, or if the user must change something for the tracker.
    """

    def __init__(self, folder: Path, name: Name) -> None:
        self.folder = folder
        self._about = about(folder)
        self._journal, self._note = folder / METRICS_LOG, note(folder, name)
        self.standing = self._noted()
        self._tracker, self._opened = tracker(name), False

    def send(self) -> None:
        """Send what the tracker does not have yet. Raises PassingError if it cannot be reached: call it again later."""
        try:
            if not self._opened:
                noted = self.standing if self._tracker.lasting else self._noted()
                self._keep(self._tracker.open(self._about, noted))
                self._opened = True
            for batch in batches(self._journal, self.standing):
                if batch.facts:
                    self._tracker.describe(about(self.folder), batch.facts)  # its settings may have changed
                self._tracker.send(batch)
                self.standing = replace(batch.standing, closed="")
                if self._tracker.lasting:
                    self._keep(self.standing)
        except PassingError:
            self._opened = False
            raise

    def close(self, state: str) -> None:
        """Record the run's state. Raises PassingError if the tracker cannot be reached: send and close again later."""
        try:
            self._tracker.close(state, self.standing)
            self._keep(replace(self.standing, closed=state))
        except PassingError:
            self._opened = False
            raise

    def state(self) -> str:
        """The run's state: running, or how it ended, as far as the journal and the run's lock tell."""
        return self.standing.end or ("killed" if held(self.folder) is False else "running")

    @property
    def place(self) -> str:
        """The place where the tracked run can be seen, or a command that shows it."""
        return self._tracker.place

    def _noted(self) -> Standing:
        """The tracker's standing; empty if the journal is not the one that was sent, so that all of it is sent."""
        noted = read_standing(self._note)
        return noted if noted.tail == tail(self._journal, noted.offset) else Standing()

    def _keep(self, standing: Standing) -> None:
        self.standing = standing = replace(standing, tail=tail(self._journal, standing.offset))
        try:
            with replacing(self._note) as file:
                file.write(json.dumps(asdict(standing)).encode())
        except OSError as error:
            raise PassingError(f"{self._note} cannot be written: {error.strerror}") from None


def note(folder: Path, name: Name) -> Path:
    """The file that notes what a tracker has of the run in ``folder``."""
    return folder / NOTES / name / "standing.json"


def read_standing(path: Path) -> Standing:
    """Read a note; without one, the tracker has nothing yet. Raises TrainerError if the note is damaged."""
    try:
        tree = parse_json(read_text(path, LARGEST_NOTE))
        repeats = tuple((int(first), int(last)) for first, last in tree.pop("repeats"))
        return Standing(**tree, repeats=repeats)
    except FileNotFoundError:
        return Standing()
    except OSError as error:
        raise TrainerError(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise TrainerError(f"{path} is damaged: remove it, and everything is sent again") from None


def tracker(name: Name) -> Tracker:
    """Make a tracker. Imports its library. Raises TrainerError if the user must change something first."""
    with outages(name, TrainerError):
        match name:
            case "mlflow":
                from trainer.track.mlflow import Mlflow

                return Mlflow()
            case "wandb":
                from trainer.track.wandb import Wandb

                return Wandb()
            case "tensorboard":
                from trainer.track.tensorboard import EventFiles

                return EventFiles()
