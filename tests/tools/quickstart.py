"""Runs the commands of docs/cluster/quickstart.md at small size, and prints how each section's run went.

    python -m tests.tools.quickstart [--only WORDS] [--keep FOLDER]

Two hosts in network namespaces, with real sshds and, if it is installed, a real Slurm. tests/helpers/podman.py stands
in for podman. What needs Kubernetes is rendered by tests/test_quickstart.py. Needs root. FOLDER gets each shell's
output. Exits with an error if a command fails.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from _pytest.outcomes import Skipped

from tests.helpers import nodes
from tests.helpers.launches import PYTHON, Site, site
from tests.helpers.quickstart import PATIENCE, Shell, checkout, sections
from tests.helpers.ranks import ROOT
from tests.helpers.runs import lines
from tests.helpers.slurm import ask, slurm
from tests.helpers.sshd import wait_for

STEPS, SOON = 1000, 20
ENVIRON = {"GLOO_SOCKET_IFNAME": nodes.INTERFACE, "OMP_NUM_THREADS": "1"}


def with_deepspeed(place: Site, folder: Path, stack: ExitStack) -> None:
    setup, prepare, start, watch, stop, export = sections()["deepspeed with a host file"]
    shell = opened(place, folder, stack)
    for block in (setup, prepare, start):
        shell.run(block)
    until_step(folder, SOON, shell)
    for block in (watch, stop, export):
        shell.run(block)


def with_containers(place: Site, folder: Path, stack: ExitStack) -> None:
    _, prepare, start, watch, stop, export = sections()["Containers"]
    (place.folder / "bin/podman").write_text(
        f'#!/bin/sh\nexec {PYTHON} {ROOT}/tests/helpers/podman.py {place.folder} "$@"\n'
    )
    (place.folder / "bin/podman").chmod(0o755)
    first, second, other = (opened(place, folder, stack, ENVIRON, host) for host in (0, 1, 0))
    first.run(prepare)
    check, run = re.split(r"\n(?=podman run)", start)
    for attempt in range(2):
        for shell, node in ((first, 0), (second, 1)):
            for command in (check, f"{run.rstrip()} || true") if attempt == 0 else (run,):
                shell.start(command.replace("--node-rank 0", f"--node-rank {node}"))
        if attempt == 0:
            until_step(folder, SOON, first)
            other.run(watch)
            other.run(stop)
        first.finish()
        second.finish()
    other.run(export)


def with_slurm(place: Site, folder: Path, stack: ExitStack) -> None:
    stack.enter_context(slurm(place))
    setup, prepare, start, watch, stop, export = sections()["Slurm"]
    shell = opened(place, folder, stack, ENVIRON)
    for block in (setup, prepare, start):
        shell.run(block)
    until_step(folder, SOON, shell)
    shell.run(watch)
    save, cancel = stop.splitlines()
    shell.run(save)
    wait_for(lambda: ask(place, "squeue", "--noheader", "--states=PENDING", "-o", "%t") == "PD", PATIENCE)
    shell.run(cancel)
    shell.run(start.splitlines()[-1])
    wait_for(lambda: ask(place, "squeue", "--noheader") == "", PATIENCE)
    shell.run(export)


SECTIONS: dict[str, Callable[[Site, Path, ExitStack], None]] = {
    "deepspeed with a host file": with_deepspeed,
    "Containers": with_containers,
    "Slurm": with_slurm,
}


def opened(place: Site, folder: Path, stack: ExitStack, environ: dict[str, str] | None = None, host: int = 0) -> Shell:
    shell = Shell(place, folder, environ or {}, host)
    stack.callback(shell.close)
    return shell


def until_step(folder: Path, step: int, shell: Shell) -> None:
    """Wait until the run has taken so many steps."""
    run = folder / "runs/first"
    wait_for(lambda: len(lines(run, "step")) >= step or shell.process.poll() is not None, PATIENCE)
    assert len(lines(run, "step")) >= step, shell.output()


def execute(title: str, folder: Path) -> str:
    """Run a section; returns how the run was stopped, resumed and exported."""
    with ExitStack() as stack:
        place = stack.enter_context(site(folder / "home"))
        work = checkout(folder / "work", steps=STEPS)
        SECTIONS[title](place, work, stack)
        run = work / "runs/first"
        steps = [line["step"] for line in lines(run, "step")]
        resumed = [line["step"] for line in lines(run, "start") if line.get("step")]
        ended = json.loads((run / "ended.json").read_text())
        model = next(path for path in (work / "bert", run.parent / "bert") if path.exists())
        assert sorted(set(steps)) == list(range(1, STEPS + 1)) and ended == {"how": "done", "step": STEPS}
        assert (model / "model.safetensors").is_file()
        return f"resumed at {resumed}, {len(steps)} steps, {ended}, exported"


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the quickstart.")
    parser.add_argument("--only", default="", help="sections whose titles begin with this")
    parser.add_argument("--keep", type=Path, help="a folder for what each shell printed")
    options = parser.parse_args()
    for title in SECTIONS:
        if not title.startswith(options.only):
            continue
        with tempfile.TemporaryDirectory(prefix="quickstart-", ignore_cleanup_errors=True) as folder:
            try:
                print(f"{title}: {execute(title, Path(folder))}", flush=True)
            except Skipped as reason:
                print(f"{title}: skipped: {reason}", flush=True)
            finally:
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    for log in Path(folder, "work").glob("*.log"):
                        shutil.copy(log, options.keep / f"{title.split()[0]}-{log.name}")


if __name__ == "__main__":
    main()
