"""A run in pictures: ``python -m trainer.report RUN_FOLDER`` draws its metrics.jsonl, and sums it up in words.

Writes ``report.png`` into the run's folder: what it learnt, how its optimizer did, how fast it was, and where
its time went. Restarts are dotted lines, later phases shaded; what an older run did not tell is left out. Published
figures of the same model (:mod:`trainer.monitor.references`) stand beside the run's own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from matplotlib import rc_context

from data_prep.atomic import replacing
from data_prep.streams import say_error
from trainer.errors import TrainerError, exit_code
from trainer.monitor.history import read_history
from trainer.monitor.panels import (
    STYLE,
)
from trainer.monitor.references import fitting
from trainer.monitor.summary import draw, published, summary
from trainer.options import OneLineParser, print_result


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = OneLineParser(prog="python -m trainer.report", description="Draw a run's metrics.")
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--references", action=argparse.BooleanOptionalAction, default=True, help="published figures")
    options = parser.parse_args(arguments)
    folder, path = options.folder, options.folder / "report.png"
    try:
        history = read_history(folder)
        references = fitting(folder) if options.references else []
        with rc_context(STYLE), replacing(path) as file:
            draw(history, str(folder), references).savefig(file, dpi=100, format="png")
        told = [*summary(history).items(), *(("published", published(each, history)) for each in references)]
        print_result("\n".join([str(path), *(f"  {name:12} {text}" for name, text in told)]))
    except TrainerError as error:
        say_error(f"trainer.report: error: {error}")
        return exit_code(error)
    except OSError as error:
        say_error(f"trainer.report: error: {path} cannot be written: {error.strerror}")
        return exit_code(error)
    return 0


# ---- in words ------------------------------------------------------------------------------------------------


# ---- in pictures ---------------------------------------------------------------------------------------------


if __name__ == "__main__":
    sys.exit(main())
