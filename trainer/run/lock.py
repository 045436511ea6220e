"""A lock on a folder, so that only one command at a time writes to it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from trainer.console import Tell, warn
from trainer.errors import TrainerError, shortage

LOCK_PATIENCE_SECONDS = 60.0  # seconds to wait for an earlier attempt to end
LOCK_FILE = ".lock"  # in the folder; its text names the process that holds it
LOCK_POLL_SECONDS = 0.2  # seconds


def hold(folder: Path, patience: float, tell: Tell) -> IO[str] | None:
    """Create ``folder`` and lock it until the returned file is closed or this process ends.

    If another process holds the lock, waits ``patience`` seconds, since an earlier attempt may be about to end. Raises
    TrainerError if it does not end. Returns None, with a warning, if the file system has no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if shortage(error):
            raise
        raise TrainerError(f"{folder} cannot be created ({error.strerror}): name another folder") from None
    file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    until, reported = time.monotonic() + patience, False
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
                    f"{folder} is being written by {holder}: wait until it ends, or name another folder"
                ) from None
            if not reported:
                tell(f"{folder} is being written by {holder}: waiting up to {patience:.0f} s for it to end")
            reported = True
            time.sleep(LOCK_POLL_SECONDS)
        except OSError as error:
            file.close()
            warn(f"{folder} cannot be locked ({error.strerror}): nothing keeps a second run out of it", tell)
            return None
    file.truncate(0)
    file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
    file.flush()
    return file


def held(folder: Path) -> bool | None:
    """Whether a process holds the folder's lock; None if that is unknown: a file system may hide other nodes' locks.

    The test itself holds a shared lock for an instant, for which a run that starts would wait LOCK_POLL_SECONDS.
    """
    if not os.path.isfile(folder / LOCK_FILE):  # a pipe would wait
        return None
    try:
        with (folder / LOCK_FILE).open(encoding="utf-8", errors="replace") as file:
            holder = file.read(1000).strip()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False if holder.endswith(f" of {socket.gethostname()}") else None
