"""Errors that data preparation reports to its user."""

from __future__ import annotations

import errno

# Failures of the machine, by error number. None is the input's fault, and all may be temporary.
SHORTAGES = {
    errno.EMFILE: "out of file descriptors: raise ulimit -n",
    errno.ENFILE: "the machine is out of file descriptors: raise fs.file-max",
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "the disk quota is used up: make room",
    errno.EFBIG: "a file may not grow that large: raise ulimit -f",
    errno.ENOMEM: "out of memory: free some, or raise ulimit -v",
    errno.ENOBUFS: "out of memory for the network: free some",
    errno.EIO: "a disk or its file system fails: see the kernel's log (dmesg)",
    errno.EREMOTEIO: "a disk or its file system fails: see the kernel's log (dmesg)",
    **dict.fromkeys(
        (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENOLINK),
        "a network file system does not answer: check its server",
    ),
}


class DataError(ValueError):
    """Bad input or a damaged data set. The message is one line: what is wrong, where, what to change."""


class PassingError(DataError):
    """Nothing is wrong with the input, and another attempt may succeed."""


class KilledError(PassingError):
    """A worker process was killed."""


class CopyError(PassingError):
    """A file could not be copied, because of its server or of this machine. The file itself may be whole."""


def shortage(error: BaseException | None) -> str:
    """The resource that ran out or the device that failed, with the remedy; empty for any other error.

    Also checks the errors that caused ``error``. These errors may be temporary, so a retry may succeed.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:  # a driver may put an error into its own chain
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return SHORTAGES[errno.ENOMEM]
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            return SHORTAGES[error.errno]
        error = error.__cause__ or error.__context__
    return ""
