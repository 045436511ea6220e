"""Turns what the command line names as input into files on disk: number ranges into names, addresses into copies.

    corpus-{000..127}.tar           128 files, in this order
    https://host/corpus.tar         needs aiohttp
    https://host/corpus.tar?sig=…   a signed address; its query is never printed or kept
    s3://bucket/corpus.tar          needs s3fs; keys and AWS_ENDPOINT_URL_S3 as in `data_prep/publish.py`

A file of a server is downloaded as a whole into a folder that the user names, and kept for other builds: a build
reads its text twice, once to hash it, and usually follows a `vocab` and other builds. A file that the server changes
(by its size, ETag or time) is downloaded again. Files under way have a temporary name, so a rerun fetches only what is
missing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.addresses import VERSION, Address, read_address, without_query
from data_prep.atomic import TEMPORARY, sync
from data_prep.errors import CopyError, DataError
from data_prep.options import check_folder
from data_prep.retries import Result, is_hopeless, patiently, shown
from data_prep.sources import WANTED, format_of
from data_prep.workers import show_progress

RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
ORIGIN = re.compile(r"https?://[^/?#@\s]+/?")
MOST_FILES = 1_000_000  # that a pattern may name
WAITS = (1, 2, 4, 8)  # seconds between two attempts
STALL = 60.0  # seconds after which an attempt fails if no answer comes, or the download is too slow
FETCHERS = 8  # files that are downloaded, or asked for, at once
ABANDONED = 3600  # seconds without a byte, after which a temporary file is the leftover of a killed command
MOST_NAMED = 3  # missing files in one error line
VERSION_FIELDS = ("ETag", "etag", "LastModified", "Last-Modified", "mtime", "updated")  # how drivers spell them


@dataclass(frozen=True)
class Copy:
    """A file of a server: its address, its size in bytes, and the place of its copy on disk."""

    fs: Any  # fsspec has no types
    name: str  # in ``fs``
    address: Address
    size: int
    path: Path


def find_inputs(
    given: Iterable[str], downloads: Path | None, redirects: Sequence[str] = (), format: str = "auto"
) -> list[Path]:
    """The files and folders that ``given`` names, in its order, with addresses replaced by copies in ``downloads``.

    Args:
        redirects: origins, besides its own, that an HTTP server may redirect to.
        format: as for `sources.find_sources`; a file of a server that it would refuse is not downloaded.

    Raises DataError, one line, that names what is missing or could not be fetched in several attempts.
    """
    for origin in redirects:
        if not ORIGIN.fullmatch(origin):
            raise DataError(f"--redirects {origin}: wanted an origin, such as https://cdn.example.com")
    names = [name for each in given for name in _existing(each)]
    remote = {name: read_address(name) for name in names if is_remote(name)}
    for address in remote.values():
        _refuse_unreadable(address, format)
    if not remote:
        return list(map(Path, names))
    if downloads is None:
        first = next(iter(remote.values()))
        raise DataError(f"--input {first.shown}: name a folder for its copy, too: --downloads DIR")
    check_folder("--downloads", downloads)
    copies = dict(zip(remote, _fetch_all(list(remote.values()), downloads, redirects), strict=True))
    return [copies.get(name, Path(name)) for name in names]


def _refuse_unreadable(address: Address, format: str) -> None:
    if address.name in ("", ".", ".."):
        raise DataError(f"input {address.shown} names no file")
    if address.query and any(map(str.isspace, f"{address.folder}/{address.name}{address.query}")):
        raise DataError(f"input {address.shown}: it contains a space; with a query, write %20 instead")
    if format_of(address.name, format):
        return
    if "?" in address.name:
        raise DataError(
            f"input {address.shown}: only https:// addresses have a query; an s3:// one may end in {VERSION}…"
        )
    raise DataError(f"input {address.shown} is not a text file: {WANTED}")


def is_remote(name: str) -> bool:
    """Whether ``name`` is an address rather than a local path."""
    return "://" in name


def expand(pattern: str) -> list[str]:
    """The names that a pattern stands for: each {000..127} counts up, with leading zeros if one of its ends has some.

    Raises DataError for a range that counts down, or for more than MOST_FILES names.
    """
    found = RANGE.search(pattern)
    if found is None:
        return [pattern]
    low, high = int(found[1]), int(found[2])
    rest = expand(pattern[found.end() :])
    if low > high:
        raise DataError(f"--input {without_query(pattern)}: the range counts down; write {{{found[2]}..{found[1]}}}")
    if (high - low + 1) * len(rest) > MOST_FILES:
        raise DataError(f"--input {without_query(pattern)}: names more than {MOST_FILES:,} files")
    padded = any(len(end) > 1 and end.startswith("0") for end in found.groups())
    width = max(map(len, found.groups())) if padded else 0
    start = pattern[: found.start()]
    return [f"{start}{number:0{width}}{end}" for number in range(low, high + 1) for end in rest]


def _existing(given: str) -> list[str]:
    """The names that ``given`` stands for. Raises DataError if local ones are missing."""
    if is_remote(given):
        return expand(given)
    names = [given] if Path(given).exists() else expand(given)
    _refuse_missing(f"input {given}", [name for name in names if not Path(name).exists()], len(names))
    return names


def _refuse_missing(what: str, missing: Sequence[str], total: int) -> None:
    if missing and total == 1:
        raise DataError(f"input {missing[0]} does not exist: check --input")
    if missing:
        names = ", ".join([*missing[:MOST_NAMED], *(["…"] if len(missing) > MOST_NAMED else [])])
        raise DataError(f"{what}: {len(missing):,} of {total:,} files do not exist ({names}): check --input")


# ---- servers -------------------------------------------------------------------------------------------------


def _fetch_all(addresses: list[Address], folder: Path, redirects: Sequence[str]) -> list[Path]:
    from data_prep.servers import open_fs

    places = dict.fromkeys(map(_place, addresses))
    opened = {place: open_fs(place[0], STALL, redirects, place[1]) for place in places}
    ended = threading.Event()
    with _stopping(ended) as pool:
        asked = list(pool.map(partial(_ask, opened, folder, ended), addresses))
        missing = [address.shown for address, copy in zip(addresses, asked, strict=True) if copy is None]
        _refuse_missing("input", missing, len(addresses))
        copies = [copy for copy in asked if copy is not None]
        wanted = [copy for copy in copies if not copy.path.exists()]
        total = sum(copy.size for copy in wanted)
        _make_room(folder, total)
        if wanted:
            fetched = pool.map(partial(_fetch, ended), wanted)
            for _ in show_progress(fetched, "downloaded", "bytes", lambda copy: copy.size, total):
                pass
    return [copy.path for copy in copies]


def _place(address: Address) -> tuple[str, bool]:
    """The folder that `open_fs` opens for an address, and whether names in it have a query."""
    return address.folder, bool(address.query)


@contextmanager
def _stopping(ended: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """A pool whose work ends at once after an error, Ctrl-C or SIGTERM."""
    with ThreadPoolExecutor(FETCHERS) as pool:
        try:
            yield pool
        except BaseException:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _ask(
    opened: dict[tuple[str, bool], tuple[Any, str]], folder: Path, ended: threading.Event, address: Address
) -> Copy | None:
    """Asks a server for a file's size and version; None if there is no such file."""
    fs, root = opened[_place(address)]
    name = f"{root}/{address.name}{address.query}"
    found = _patiently(address, partial(_info, fs, name), ended)
    if found is None:
        return None
    if found.get("type") == "directory":
        raise DataError(
            f"input {address.shown} is a folder: name its files, such as {address.shown}/corpus-{{000..127}}.tar"
        )
    if not isinstance(found.get("size"), int):
        raise DataError(f"input {address.shown}: the server does not say its size; download it yourself")
    version = next((str(found[field]) for field in VERSION_FIELDS if found.get(field)), "")
    mark = hashlib.sha256("\n".join((address.lasting, str(found["size"]), version)).encode()).hexdigest()[:16]
    return Copy(fs, name, address, found["size"], folder / mark / address.name)


def _info(fs: Any, name: str) -> dict[str, Any] | None:
    from data_prep.servers import ask

    try:
        found: dict[str, Any] = ask(fs, STALL, "info", name)
        return found
    except FileNotFoundError as error:  # over HTTP it is raised for any failure
        cause = error.__cause__
    if "http" in fs.protocol and cause is not None and getattr(cause, "status", None) != 404:
        raise cause  # outside of the handler, or it would be in its own chain of causes
    return None


def _make_room(folder: Path, size: int) -> None:
    """Removes what killed downloads left. Raises DataError if the disk has no room for ``size`` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"*/*{TEMPORARY}"):
        with suppress(FileNotFoundError):  # another command removed or completed it
            if path.stat().st_mtime < time.time() - ABANDONED:
                path.unlink()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(f"--downloads {folder}: {size:,} bytes to download, {free:,} free; make room or name another")


def _fetch(ended: threading.Event, copy: Copy) -> Copy:
    copy.path.parent.mkdir(exist_ok=True)
    _patiently(copy.address, partial(_attempt, copy, ended), ended)
    return copy


def _attempt(copy: Copy, ended: threading.Event) -> None:
    from data_prep.downloads import download

    temporary = copy.path.with_name(f"{copy.path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        download(copy.fs, copy.name, temporary, copy.size, STALL, ended)
        size = temporary.stat().st_size
        if size != copy.size:
            raise OSError(f"{size:,} bytes arrived of {copy.size:,}")
        sync(temporary)
        temporary.replace(copy.path)
    finally:
        temporary.unlink(missing_ok=True)


def _patiently(address: Address, work: Callable[[], Result], ended: threading.Event) -> Result:
    """Runs ``work()`` and retries after each of WAITS on errors that may be temporary.

    Raises DataError, one line; it is a CopyError if the last attempt may have failed for a passing reason.
    """
    try:
        return patiently(work, WAITS, ended.wait)
    except Exception as error:  # each driver has its own classes, which can't be named without importing it
        reason = shown(error)
        if is_hopeless(error):
            raise DataError(f"input {address.shown}: {reason}; check the address and your access rights") from error
        raise CopyError(
            f"input {address.shown}: failed {len(WAITS) + 1} times, last with {reason}; run again to resume"
        ) from error
