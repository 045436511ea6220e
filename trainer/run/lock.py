"""A folder that one command at a time writes to."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from trainer.errors import TrainerError, shortage

PATIENCE = 60.0  # seconds that a command waits for an earlier attempt to end
NAME = ".lock"  # in the folder; its text says who holds it
POLL = 0.2  # seconds


def hold(folder: Path, patience: float, tell: Callable[[str], None]) -> IO[str] | None:
    """Make ``folder`` and hold it until the file that is returned is closed, or this process has ended.

    Waits ``patience`` seconds for one that holds it, since an earlier attempt may be about to end. Raises TrainerError
    where it does not end. None, told, where the file system has no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if shortage(error):
            raise
        raise TrainerError(f"{folder} cannot be made ({error.strerror}): name another folder") from None
    file = (folder / NAME).open("a+", encoding="utf-8")
    until, told = time.monotonic() + patience, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            if time.monotonic() > until:
                file.close()
                raise TrainerError(
                    f"{folder} is being written by {holder}: let that end, or name another folder"
                ) from None
            if not told:
                tell(f"{folder} is being written by {holder}: waiting {patience:.0f} s for its end")
            told = True
            time.sleep(POLL)
        except OSError as error:
            file.close()
            tell(f"warning: {folder} cannot be locked ({error.strerror}): nothing keeps a second run out of it")
            return None
    file.truncate(0)
    file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
    file.flush()
    return file
