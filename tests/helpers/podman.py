"""Stands in for podman on a host: starts an image's program with its volumes as links, without the image.

    python podman.py FOLDER run|stop|logs …

FOLDER has each named container's process id and output. Options that only shape a container are accepted and ignored.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = {"lambert": ["-m", "deploy.launch"], "lambert-prepare": ["-m", "data_prep"]}


def main() -> None:
    """Run one command."""
    folder, command, *words = sys.argv[1:]
    named = Path(folder, f"{words[-1]}-{os.uname().nodename}")
    if command == "run":
        run(Path(folder), read(words))
    elif command == "stop":
        os.kill(int(named.with_suffix(".pid").read_text()), signal.SIGTERM)
    else:
        print(*named.with_suffix(".log").read_text().splitlines()[-int(words[1]) :], sep="\n")


def read(words: list[str]) -> argparse.Namespace:
    """Parse the options, image and arguments of ``podman run``."""
    parser = argparse.ArgumentParser()
    for flag in ("--rm", "--read-only"):
        parser.add_argument(flag, action="store_true")
    for option in ("--network", "--cap-drop", "--shm-size", "--ulimit", "--device", "--name", "--entrypoint"):
        parser.add_argument(option)
    parser.add_argument("-v", action="append", default=[])
    parser.add_argument("image", choices=ENTRIES)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def run(folder: Path, options: argparse.Namespace) -> None:
    """Become the container's process 1, in a folder that looks like the image's /app."""
    app = Path(tempfile.mkdtemp())
    for code in ("data_prep", "kernels", "trainer", "deploy"):
        (app / code).symlink_to(ROOT / code)
    for volume in options.v:
        here, there = volume.split(":")[:2]
        if here.startswith("/"):  # the others have a name, and no content that matters here
            (app / there.removeprefix("/app").lstrip("/")).symlink_to(here)
    if options.name:
        named = folder / f"{options.name}-{os.uname().nodename}"
        named.with_suffix(".pid").write_text(str(os.getpid()))
        log = os.open(named.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.chdir(app)
    os.environ["PYTHONPATH"] = str(app)
    entry = [] if options.entrypoint else ENTRIES[options.image]
    os.execv(sys.executable, [sys.executable, *entry, *options.words])


if __name__ == "__main__":
    main()
