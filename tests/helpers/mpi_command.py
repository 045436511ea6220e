"""A small command line for test_data_prep_workers.py: works on numbers with `start_workers`, alone or over MPI."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from data_prep.errors import DataError
from data_prep.workers import Stopped, on_ranks, start_workers, stop_on_sigterm

TASKS = 20


def square(number: int) -> tuple[int, int, str]:
    """(square, process, what the tokenizer reads before it starts threads)."""
    time.sleep(0.01 * (number % 3))  # out of order
    return number**2, os.getpid(), os.environ["TOKENIZERS_PARALLELISM"]


def refuse(number: int) -> int:
    """Return the number; 5 is refused."""
    if number == 5:
        raise DataError(f"bad line {number}")
    return number


def fill(number: int) -> int:
    """Write to a full disk; the error does not name the file."""
    try:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        error.filename = f"shard-{number:05d}.tar"
        raise
    return number


def crash(number: int) -> float:
    """Raise an error that is a bug in the program, so it has no one-line message."""
    return 1 / number


def work_long(number: int) -> int:
    """Print which process works on it, and take longer than any test waits."""
    name = f"{sys.argv[2]}/{number}"
    Path(f"{name}.tmp").write_text(str(os.getpid()), encoding="utf-8")
    Path(f"{name}.tmp").rename(f"{name}.pid")
    time.sleep(60)
    return number


def main() -> int:
    """Run one command, with the exit codes of data_prep."""
    command = {"square": square, "refuse": refuse, "fill": fill, "crash": crash, "long": work_long}
    with stop_on_sigterm():
        try:
            if sys.argv[1] == "usage":
                sys.exit(2)
            if sys.argv[1] != "nothing":
                for _ in range(2):  # a command may start workers more than once
                    with start_workers(2) as workers:
                        results = list(workers.map(command[sys.argv[1]], range(TASKS)))
                print(json.dumps({"coordinator": os.getpid(), "results": results}), flush=True)
            return 0
        except DataError as error:
            return complain(str(error), 2)
        except OSError as error:
            return complain(f"{error.filename}: {error.strerror}", 2)
        except Stopped:
            return complain("stopped", 143)
        except KeyboardInterrupt:
            return complain("interrupted", 130)


def complain(problem: str, code: int) -> int:
    """Print the one line that reports a failure."""
    print(f"error: {problem}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(on_ranks(main))
