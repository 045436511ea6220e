"""Runs a module in a folder, for ``ranks.fork_one``. If it is a script of deploy/, its commands are forked from it.

    python tests/helpers/forked_commands.py FOLDER MODULE ARGUMENTS…

So nothing of it takes the seconds that imports take. The script's command ``python -m OTHER …`` runs as OTHER, and
``deepspeed … --module OTHER …`` as OTHER on one rank, each in a process of its own. The script has its own process
group, and one core, so that ``data_prep`` starts no workers.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from types import SimpleNamespace
from typing import IO, NoReturn

from deploy import commands
from tests.helpers.ranks import environment, free_port


class Command:
    """A forked command, with the part of ``Popen`` that ``deploy.commands`` needs."""

    def __init__(
        self, words: list[str], stdout: int | None = None, stderr: int | None = None, start_new_session: bool = False
    ) -> None:
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        ends = os.pipe() if stdout == subprocess.PIPE else None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            if ends is not None:
                os.dup2(ends[1], 1)
            if stderr == subprocess.STDOUT:
                os.dup2(1, 2)
            become(words)
        if ends is not None:
            os.close(ends[1])
            self.stdout = os.fdopen(ends[0], "rb")

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def communicate(self) -> tuple[bytes | None, None]:
        output = self.stdout.read() if self.stdout is not None else None
        self.wait()
        return output, None

    poll = wait  # deploy.commands asks only after the end


def become(words: list[str]) -> NoReturn:
    """Become the command's module, and end with its exit code."""
    launched = words[0] == "deepspeed"
    if launched:
        os.environ |= environment(0, 1, free_port())
    at = words.index("--module" if launched else "-m") + 1
    sys.argv = words[at:]
    code: object = 0
    try:
        runpy.run_module(words[at], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    os.setpgrp()
    os.chdir(sys.argv[1])
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]  # those of a forked rank; the script is none
    forking = SimpleNamespace(Popen=Command, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    vars(commands)["subprocess"] = forking
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
