"""Draw a run's metrics.jsonl as ``report.png`` and print a summary: ``python -m trainer.report RUN_FOLDER``.

With ``--html FILE``, it writes the page that ``python -m trainer.runs --serve`` shows, as one file. This is the
command; the panels are drawn in :mod:`trainer.monitor.panels`, and the summary comes from
:mod:`trainer.monitor.summary`. Published results of the same model (:mod:`trainer.monitor.references`) are shown for
comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from matplotlib import rc_context

from data_prep.atomic import replacing
from data_prep.errors import DataError
from data_prep.options import CommandParser, check_place
from trainer.checkpoint.fetched import journal
from trainer.console import complain, print_result
from trainer.errors import TrainerError, exit_code
from trainer.monitor.history import History, read_history
from trainer.monitor.panels import (
    STYLE,
)
from trainer.monitor.references import fitting
from trainer.monitor.summary import draw, published, summary
from trainer.options import path_or_address
from trainer.runs.status import read_status
from trainer.store.objects import Objects

PICTURE = "report.png"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    parser = CommandParser(
        prog="python -m trainer.report", description="Draw a run's metrics as report.png and print a summary."
    )
    parser.add_argument("folder", type=path_or_address, metavar="RUN", help="the run's folder, or its address")
    parser.add_argument(
        "--references", action=argparse.BooleanOptionalAction, default=True, help="compare with published results (on)"
    )
    text = "write a page for a browser, which needs no other file, instead of the picture"
    parser.add_argument("--html", type=Path, metavar="FILE", help=text)
    options = parser.parse_args(arguments)
    path = options.html or Path(str(options.folder)) / PICTURE
    try:
        if options.html is not None:
            check_place("--html", path, ".html")
        folder = options.folder if isinstance(options.folder, Path) else journal(Objects(options.folder))
        path = options.html or folder / PICTURE
        history = read_history(folder)
        references = fitting(folder) if options.references else []
        if options.html is not None:
            _write_page(path, folder, history)
        else:
            with rc_context(STYLE), replacing(path) as file:
                draw(history, str(options.folder), references).savefig(file, dpi=100, format="png")
            if isinstance(options.folder, str):
                Objects(options.folder).put(path, PICTURE)
        rows = [*summary(history).items(), *(("published", published(each, history)) for each in references)]
        print_result("\n".join([str(path), *(f"  {name:12} {text}" for name, text in rows)]))
    except (DataError, TrainerError) as error:
        complain("trainer.report", error)
        return exit_code(error)
    except OSError as error:
        complain("trainer.report", TrainerError(f"{path} cannot be written: {error.strerror}"))
        return exit_code(error)
    return 0


def _write_page(path: Path, folder: Path, history: History) -> None:
    from trainer.runs.comparison import labeled  # imports PyTorch, which takes seconds
    from trainer.runs.document import write_page
    from trainer.runs.page_data import file_tree

    now = time.time()
    write_page(path, file_tree(labeled([(folder, history, read_status(folder, now))]), now))


if __name__ == "__main__":
    sys.exit(main())
