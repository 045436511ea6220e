"""Runs ``deploy.launch`` in a process of ``ranks.fork_one``; its ranks are forked too, which saves their imports.

What happens from the fork to the end of a rank is the launcher's own: only ``execve`` is replaced.
"""

from __future__ import annotations

import os
import runpy
import signal
import stat
import sys
import traceback
from typing import NoReturn

from deploy import launch


def become(command: str, words: list[str], environ: dict[str, str]) -> NoReturn:
    """Become ``python -m MODULE ARGUMENTS…``, as ``execve`` would."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and not os.get_inheritable(int(name)):
                os.close(int(name))  # the launcher's port and connections, which must not outlive it
        except OSError:
            pass  # it listed the folder
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does when it starts
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = words[2:]
    code: object = 1
    try:
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    vars(os)["execve"] = become
    launch.main()
