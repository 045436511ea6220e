"""All runs below some folders: list them, show them in a browser, stop one, compare several.

python -m trainer.runs [FOLDER …] [--watch] [--json] [--price 2.5]
python -m trainer.runs [FOLDER …] --serve 127.0.0.1:8080 [--token-file FILE]
python -m trainer.runs stop NAME [--below FOLDER]
python -m trainer.runs compare NAME NAME … [--below FOLDER] [--picture FILE] [--html FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from data_prep.errors import DataError
from data_prep.options import CommandParser, check_place
from trainer.console import complain, print_result
from trainer.data.remote import is_remote
from trainer.errors import TrainerError, exit_code
from trainer.exits import INTERRUPTED
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.options import path_or_address
from trainer.runs.addresses import Copies, copy_of, statuses_at
from trainer.runs.status import RunStatus, find_runs, in_order, read_status
from trainer.runs.stopping import ask_to_stop
from trainer.runs.table import clipped, table

RUNS = Path("runs")  # where runs are looked for, unless the command says otherwise
HOME, REST_OF_LINE, REST_OF_SCREEN, CLEAR = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"  # a terminal's own commands
WHERE = "where to look: folders or addresses (runs)"
PROGRAM = "python -m trainer.runs"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    words = sys.argv[1:] if arguments is None else arguments
    commands: dict[str, Callable[[list[str]], None]] = {"stop": _stop, "compare": _compare}
    try:
        if words and words[0] in commands:
            commands[words[0]](words[1:])
        else:
            _list(words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (DataError, TrainerError) as error:
        complain("trainer.runs", error)
        return exit_code(error)
    return 0


# ---- the list ------------------------------------------------------------------------------------------------


def _list(words: list[str]) -> None:
    parser = CommandParser(
        prog=PROGRAM,
        description="List all runs below some folders.",
        epilog=f"See also {PROGRAM} stop --help and {PROGRAM} compare --help. For a folder named stop, write ./stop.",
    )
    parser.add_argument("folders", nargs="*", type=path_or_address, default=[RUNS], metavar="FOLDER", help=WHERE)
    parser.add_argument("--price", type=_positive, metavar="X", help="price of one GPU for one hour")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table; see docs/runs.md")
    form.add_argument("--watch", action="store_true", help="redraw the table until Ctrl-C")
    form.add_argument("--serve", type=_place, metavar="ADDRESS:PORT", help="show the runs in a browser until Ctrl-C")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="with --serve: who has this token can stop runs"
    )
    text = "pause between redraws of --watch (%(default)g)"
    parser.add_argument("--every", type=_positive, default=2.0, metavar="SECONDS", help=text)
    options = parser.parse_args(words)
    if options.token_file is not None and options.serve is None:
        parser.error("argument --token-file: needs --serve")
    if options.serve is not None:
        _serve(options.serve, options.folders, options.price, options.token_file)
    if options.watch:
        _watch(options.folders, options.price, options.every)
    now = time.time()
    runs = _statuses(options.folders, now, options.price)
    if options.json:
        tree = {"time": now, "runs": [asdict(run) for run in runs]}
        print_result(json.dumps(tree, indent=1, allow_nan=False))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print_result("\n".join(_page(runs, options.folders, now, width)))


def _serve(
    place: tuple[str, int], places: Sequence[Path | str], price: float | None, token_file: Path | None
) -> NoReturn:
    from trainer.runs.server import Runs, read_token, serve  # imports PyTorch and Matplotlib, which takes seconds

    folders = [each for each in places if isinstance(each, Path)]
    find_runs(folders)  # reports a folder that does not exist
    token = None if token_file is None else read_token(token_file)
    copies = Copies([each for each in places if isinstance(each, str)], print_result)
    with closing(copies):
        copies.start()
        serve(place, Runs(folders, copies, price, token), print_result)


def _statuses(places: Sequence[Path | str], now: float, price: float | None) -> list[RunStatus]:
    local = find_runs([place for place in places if isinstance(place, Path)])
    remote = (run for place in places if isinstance(place, str) for run in statuses_at(place, now, price))
    return in_order([*(read_status(folder, now, price) for folder in local), *remote])


def _page(runs: Sequence[RunStatus], folders: Sequence[Path | str], now: float, width: int | None) -> list[str]:
    return table(runs, now, width) if runs else [f"no runs below {', '.join(map(str, folders))}"]


def _watch(folders: Sequence[Path | str], price: float | None, seconds: float) -> NoReturn:
    """Draw the table over itself until Ctrl-C: each picture in one write, line by line over the one before."""
    if not sys.stdout.isatty():
        raise TrainerError("--watch needs a terminal: leave it out, or use --json")
    start = CLEAR
    while True:
        now, size = time.time(), shutil.get_terminal_size()
        lines = _page(_statuses(folders, now, price), folders, now, size.columns)
        room = max(1, size.lines - 2)  # the time and the cursor need a line each
        if len(lines) > room:
            lines[room - 1 :] = [
                f"{len(lines) - room + 1} more lines do not fit: enlarge the terminal, or name fewer folders"
            ]
        lines.append(time.strftime("%H:%M:%S, Ctrl-C ends", time.localtime(now)))
        text = "\n".join(f"{clipped(line, size.columns)}{REST_OF_LINE}" for line in lines)
        print_result(f"{start}{HOME}{text}{REST_OF_SCREEN}")
        start = ""
        time.sleep(seconds)


# ---- stop and compare ----------------------------------------------------------------------------------------


def _stop(words: list[str]) -> None:
    parser = CommandParser(
        prog=f"{PROGRAM} stop",
        description="Ask a run to save and end, with exit code 75, at its next logged step.",
        epilog="Slurm and Kubernetes restart a job that ended with code 75: cancel it if it should not continue.",
    )
    parser.add_argument("run", metavar="NAME", help="the run's name, or its folder")
    _add_below(parser)
    options = parser.parse_args(words)
    [folder] = _chosen([options.run], options.below)
    print_result(ask_to_stop(folder, time.time()))


def _compare(words: list[str]) -> None:
    parser = CommandParser(
        prog=f"{PROGRAM} compare", description="Print what differs in the configurations and the results of some runs."
    )
    parser.add_argument("runs", nargs="+", metavar="NAME", help="two or more runs, each by its name or its folder")
    _add_below(parser)
    parser.add_argument("--picture", type=Path, metavar="PNG", help="also draw the losses of all runs here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with all curves, for a browser")
    options = parser.parse_args(words)
    if options.picture is not None:
        check_place("--picture", options.picture, ".png")
    if options.html is not None:
        check_place("--html", options.html, ".html")
    folders = [copy_of(place) for place in _chosen(options.runs, options.below)]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise TrainerError("compare needs two or more different runs")
    from trainer.runs.comparison import compare, compared, draw  # imports PyTorch and Matplotlib, which takes seconds
    from trainer.runs.document import write_page
    from trainer.runs.page_data import file_tree

    now = time.time()
    runs = compared(folders, now)
    lines = compare(runs)
    if options.picture is not None:
        draw(runs, options.picture)
        lines += ["", str(options.picture)]
    if options.html is not None:
        write_page(options.html, file_tree(runs, now))
        lines += ["", str(options.html)]
    print_result("\n".join(lines))


def _add_below(parser: CommandParser) -> None:
    text = "where to look for a name: a folder or an address; repeatable (runs)"
    parser.add_argument("--below", action="append", type=path_or_address, metavar="FOLDER", default=[], help=text)


def _chosen(names: Sequence[str], below: Sequence[Path | str]) -> list[Path | str]:
    """The folders of runs, each given by its folder or address, or by its name or the last part of its folder's."""
    found: list[RunStatus] | None = None
    chosen = list[Path | str]()
    for name in names:
        if not name:
            raise TrainerError("the name of a run is empty: give its name or its folder")
        if is_remote(name) or os.path.isfile(Path(name) / METRICS_LOG):
            chosen.append(path_or_address(name))
            continue
        if found is None:
            found = _statuses(below or [RUNS], time.time(), None)
        paths = [run.folder for run in found if name in (run.name, Path(run.folder).name)]
        if not paths:
            where = ", ".join(str(folder) for folder in below or [RUNS])
            raise TrainerError(f"no run {name} below {where}: give its folder, or --below")
        if len(paths) > 1:
            raise TrainerError(f"{name} names {len(paths)} runs: give the folder of one: {', '.join(sorted(paths))}")
        chosen.append(path_or_address(paths[0]))
    return chosen


def _place(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[([\da-fA-F:.]+)\]|([\w.-]{1,253})):(\d{1,5})", text, re.ASCII)
    if not found or int(found[3]) > 65535:
        raise argparse.ArgumentTypeError(f"{text} must be an address and a port, such as 127.0.0.1:8080 or [::1]:8080")
    return found[1] or found[2], int(found[3])


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
