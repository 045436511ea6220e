"""Draw a run's metrics.jsonl as ``report.png`` and print a summary: ``python -m trainer.report RUN_FOLDER``.

This is the command; the panels are drawn in :mod:`trainer.monitor.panels`, and the summary comes from
:mod:`trainer.monitor.summary`. Published results of the same model (:mod:`trainer.monitor.references`) are shown for
comparison.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from matplotlib import rc_context

from data_prep.atomic import replacing
from data_prep.options import CommandParser
from trainer.console import complain, print_result
from trainer.errors import TrainerError, exit_code
from trainer.monitor.history import read_history
from trainer.monitor.panels import (
    STYLE,
)
from trainer.monitor.references import fitting
from trainer.monitor.summary import draw, published, summary


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    parser = CommandParser(
        prog="python -m trainer.report", description="Draw a run's metrics as report.png and print a summary."
    )
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument(
        "--references", action=argparse.BooleanOptionalAction, default=True, help="compare with published results (on)"
    )
    options = parser.parse_args(arguments)
    folder, path = options.folder, options.folder / "report.png"
    try:
        history = read_history(folder)
        references = fitting(folder) if options.references else []
        with rc_context(STYLE), replacing(path) as file:
            draw(history, str(folder), references).savefig(file, dpi=100, format="png")
        rows = [*summary(history).items(), *(("published", published(each, history)) for each in references)]
        print_result("\n".join([str(path), *(f"  {name:12} {text}" for name, text in rows)]))
    except TrainerError as error:
        complain("trainer.report", error)
        return exit_code(error)
    except OSError as error:
        complain("trainer.report", TrainerError(f"{path} cannot be written: {error.strerror}"))
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
