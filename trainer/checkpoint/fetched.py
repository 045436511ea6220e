"""Local copies of what commands read at an address: a run, one of its checkpoints, or an exported model.

They are in ``cache.folder``/fetched/s3/bucket/runs/first, which all commands of a user share. What is already there
with the right sha256 is not fetched again, and a checkpoint that the address no longer has is removed.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from data_prep.manifest import TOKENIZER_FOLDER
from trainer.checkpoint.leftovers import remove
from trainer.checkpoint.object_store import ObjectStore
from trainer.checkpoint.reading import is_name, named
from trainer.checkpoint.train_state import state_of
from trainer.console import Tell, warn
from trainer.data.cache import CacheConfig
from trainer.errors import TrainerError, shortage
from trainer.ranks.world import World
from trainer.store.address import local_folder
from trainer.store.objects import LARGEST, Objects

CACHE = CacheConfig().folder
MODEL = "config.json"  # of an exported model
SMALL = ("config.yaml", "metrics.jsonl")  # of a run


def fetched(place: Path | str, tell: Tell, count: int | None = None, cache: str = CACHE) -> Path:
    """The local path of a run, a checkpoint or an exported model; a local ``place`` is its own.

    A run gets its newest intact checkpoint, or the newest ``count``, and its configuration, journal and tokenizer.
    ``tell`` receives a warning for each damaged checkpoint that is skipped. Raises TrainerError if there is none.
    """
    if isinstance(place, Path):
        return place
    objects, name = _split(place)
    folder = local_folder(objects.address, cache, "fetched")
    with _alone(folder):
        there = objects.list()
        if MODEL in there:
            _fetch(objects, folder, there)
            return folder
        _fetch(objects, folder, {key: size for key, size in there.items() if _is_small(key)})
        for path in named(folder):
            if not any(key.startswith(f"{path.name}/") for key in there):
                remove(path)
        names = _fetch_checkpoints(ObjectStore(objects, folder), name, count or 1, tell)
    return folder if count is not None else folder / names[0]


def journal(objects: Objects, cache: str = CACHE) -> Path:
    """The local folder with a run's configuration and journal, without checkpoints."""
    folder = local_folder(objects.address, cache, "fetched")
    with _alone(folder):
        _fetch(
            objects, folder, {key: size for key, size in objects.names().items() if key in SMALL and size is not None}
        )
    return folder


def _split(place: str) -> tuple[Objects, str]:
    """The address of a run, and the name of the checkpoint if ``place`` is one."""
    above, _, last = place.rstrip("/").rpartition("/")
    return (Objects(above), last) if is_name(last) else (Objects(place), "")


def _fetch_checkpoints(store: ObjectStore, name: str, count: int, tell: Tell) -> list[str]:
    alone = World(0, 1, 0, 1, torch.device("cpu"))
    passed, names = dict[str, str](), list[str]()
    while len(names) < count:
        found, reasons = (name, []) if name else _newest(store, passed)
        if not found:
            break
        failure = store.disprove(found, alone)
        passed[found] = failure
        if not failure:
            names.append(found)
        elif name:
            raise TrainerError(failure)
        else:
            warn(f"not used: {failure}", tell)
        if name:
            break
    if not names:
        said = [f"no whole checkpoint in {store.objects.address}: name a run's address, or a step-… in it", *reasons]
        raise TrainerError("; ".join(filter(None, said)))
    return names


def _newest(store: ObjectStore, passed: Mapping[str, str]) -> tuple[str, list[str]]:
    found, reasons = store.newest(passed, state_of)
    return "" if found is None else found.folder.name, reasons


def _is_small(key: str) -> bool:
    return key in SMALL or key.startswith(f"{TOKENIZER_FOLDER}/")


def _fetch(objects: Objects, folder: Path, sizes: Mapping[str, int]) -> None:
    """Fetch files, except a journal that has not grown. A run may replace its own meanwhile, of another size."""
    for key, size in sizes.items():
        path = folder / key
        if not (key == "metrics.jsonl" and path.is_file() and path.stat().st_size == size):
            path.parent.mkdir(parents=True, exist_ok=True)
            objects.get(key, path, LARGEST, size=None if key in SMALL else size)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other commands, and other ranks of this one, from fetching the same at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        if shortage(error):
            raise
        raise TrainerError(
            f"{folder} cannot be used ({error}): make it writable, or set HOME to another folder"
        ) from None
