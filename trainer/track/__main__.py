"""Send a run's metrics to a tracker: MLflow, Weights & Biases or TensorBoard.

python -m trainer.track RUN --to mlflow [--follow]

A run does the same while it trains, for each tracker in ``metrics.trackers``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import get_args

from data_prep.options import CommandParser
from trainer.console import Tell, complain, print_result, say, teller, warn
from trainer.errors import PassingError, TrainerError, exit_code
from trainer.exits import DONE, FAILED, INTERRUPTED
from trainer.monitor.trackers import Name, require_packages
from trainer.run.lock import LOCK_PATIENCE_SECONDS, held, hold
from trainer.track.about import about
from trainer.track.sender import Sender, note
from trainer.track.tracker import repeated

PROGRAM = "trainer.track"
POLL_SECONDS = 2.0  # between two looks at the journal
RETRY_SECONDS = 5.0  # between two attempts to reach a tracker; doubled each time, up to the longest
LONGEST_RETRY_SECONDS = 60.0
RELEASE_SECONDS = 3.0  # for a lock, after its process has gone
MARGIN_SECONDS = 5.0  # for a library that hangs, once there is no more time for another attempt


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    options = _parser().parse_args(arguments)
    attached = options.attached is not None
    tell = say if attached else teller(PROGRAM)
    try:
        require_packages([options.to])
        over = _attach(options.attached) if attached else Event()
        with _alone(options.folder, options.to, LOCK_PATIENCE_SECONDS + options.attached if attached else 0.0, tell):
            sender = Sender(options.folder, options.to)
            if attached or options.follow:
                _follow(sender, options.to, over, options.attached if attached else math.inf, tell)
            else:
                sender.send()
                sender.close(sender.state())
        if not attached:
            print_result(f"{options.folder} ({_result(sender)}): {sender.place}")
    except KeyboardInterrupt:
        return INTERRUPTED
    except TrainerError as error:
        if not attached:
            complain(PROGRAM, error)
        elif not isinstance(error, PassingError):  # others were reported as they happened
            warn(f"{error}; training goes on without {options.to}", tell)
        return exit_code(error)
    return DONE


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=f"python -m {PROGRAM}",
        description="Send a run's metrics to a tracker. What it already has is not sent again.",
    )
    parser.add_argument("folder", type=_folder, metavar="RUN", help="the run's folder")
    parser.add_argument("--to", required=True, choices=get_args(Name), help="the tracker")
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended, and retry until then")
    parser.add_argument("--attached", type=float, help=argparse.SUPPRESS)  # see trainer.monitor.trackers
    return parser


def _folder(text: str) -> Path:
    if "://" in text:
        said = "is an address: copy its metrics.jsonl and config.yaml to a folder, and name that"
        raise argparse.ArgumentTypeError(f"{text} {said}")
    return Path(text)


@contextmanager
def _alone(folder: Path, name: Name, patience: float, tell: Tell) -> Iterator[None]:
    """Keep other processes from sending the run to the tracker; wait up to ``patience`` seconds for an earlier one.

    Raises TrainerError if one does not end, or if there is no run.
    """
    about(folder)
    place = note(folder, name).parent
    if not patience and held(place):
        raise TrainerError(f"another process is sending {folder} to {name}: wait until it has ended, or end it")
    with hold(place, patience, tell) or nullcontext():
        yield


def _result(sender: Sender) -> str:
    twice = repeated(sender.standing)
    return f"{sender.state()}, step {sender.standing.highest:,}" + (f", steps {twice} more than once" if twice else "")


def _follow(sender: Sender, name: Name, over: Event, patience: float, tell: Tell) -> None:
    """Send what the run writes until it has ended. A tracker that cannot be reached is reported once, and retried.

    ``over`` is set when the run's process has gone. Raises PassingError if the tracker cannot be reached ``patience``
    seconds after the end.
    """
    pause, ended, reported = RETRY_SECONDS, math.inf, False
    while True:
        gone = over.is_set() or held(sender.folder) is False  # asked first, so that nothing written before is missed
        try:
            sender.send()
            if gone or sender.standing.end:
                sender.close(_final_state(sender))
                return
            if reported:
                tell(f"{name} can be reached again: it has all steps up to {sender.standing.highest:,}")
            pause, reported = RETRY_SECONDS, False
            over.wait(POLL_SECONDS)
        except PassingError as error:
            if not reported:
                warn(f"{error}; training goes on, and what is missing is sent later", tell)
            reported = True
            if math.isinf(ended) and (gone or sender.standing.end):
                pause, ended = RETRY_SECONDS, time.monotonic()
            if time.monotonic() + pause > ended + patience:
                raise
            over.wait(pause) if not over.is_set() else time.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)


def _final_state(sender: Sender) -> str:
    """The state of a run whose process has gone. Its lock goes a moment later, unless the run was restarted already."""
    until = time.monotonic() + RELEASE_SECONDS
    while (state := sender.state()) == "running" and held(sender.folder) and time.monotonic() < until:
        time.sleep(RELEASE_SECONDS / 100)
    return "killed" if state == "running" and not held(sender.folder) else state


def _attach(patience: float) -> Event:
    """Return an event that is set when standard input closes: the run is over then.

    A library that hangs after that is ended after ``patience`` seconds.
    """
    over = Event()

    def watch() -> None:
        while os.read(0, 1):  # sys.stdin has a lock, which this thread would hold when the program ends: Python aborts
            pass
        over.set()
        time.sleep(patience + MARGIN_SECONDS)
        os._exit(FAILED)

    Thread(target=watch, daemon=True).start()
    return over


if __name__ == "__main__":
    sys.exit(main())
