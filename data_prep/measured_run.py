"""Runs a command to its end, and measures its time, its output, and the peak memory of all its processes together."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_prep.errors import DataError

MEMORY_CHECK_SECONDS = 0.05  # between two memory measurements
SIZE_LINES = re.compile(r"^(Pss|Pss_Anon): +(\d+)", re.MULTILINE)  # lines of smaps_rollup, in KiB


@dataclass(frozen=True)
class MeasuredRun:
    """Standard output and error, times, and the peak of each value of `memory`, 0 if it was not measured."""

    seconds: float  # wall time
    cpu: float  # seconds of CPU time, all processes together
    output: str
    anonymous: int
    total: int


def run_measured(
    command: list[str], folder: Path, environment: dict[str, str], core: int | None = None, look: bool = False
) -> MeasuredRun:
    """Runs a command in ``folder``, pinned to a core if one is given. ``look`` also measures memory, at a small cost.

    Raises DataError, with the last line it printed, if it fails.
    """
    tie = None if core is None else partial(os.sched_setaffinity, 0, {core})
    peaks = (0, 0)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        start, cpu = time.perf_counter(), _cpu_of_children()
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=file, preexec_fn=tie
        ) as process:
            while look and process.poll() is None:
                anonymous, total = memory(process.pid)
                peaks = max(peaks[0], anonymous), max(peaks[1], total)
                time.sleep(MEMORY_CHECK_SECONDS)
            process.wait()
            seconds, cpu = time.perf_counter() - start, _cpu_of_children() - cpu
        file.seek(0)
        output = file.read().strip()
    if process.returncode:
        last = output.rpartition("\n")[2]
        raise DataError(f"exit code {process.returncode} of {' '.join(command)}: {last}")
    return MeasuredRun(seconds, cpu, output, *peaks)


def _cpu_of_children() -> float:
    """CPU seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(top: int) -> tuple[int, int]:
    """Current memory of process ``top`` and its descendants in bytes: anonymous, and total with file-backed pages.

    A page that n processes share counts 1/n in each of them (Linux: "proportional set size").
    """
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    family = {top}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    anonymous = total = 0
    for pid in family:
        with suppress(OSError):
            sizes = dict(SIZE_LINES.findall(Path(f"/proc/{pid}/smaps_rollup").read_text()))
            anonymous += 1024 * int(sizes["Pss_Anon"])
            total += 1024 * int(sizes["Pss"])
    return anonymous, total
