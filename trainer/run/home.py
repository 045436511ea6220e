"""A run's home: where its ranks work, where its checkpoints are kept, and what keeps a second run out of it.

A run whose ``run.folder`` is a folder works in it; all nodes see it. A run at an address works in a folder of each node
under ``cache.folder``, and what must last goes to the address: checkpoints from all ranks, and rank 0's other files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from trainer.checkpoint.leftovers import remove
from trainer.checkpoint.object_store import ObjectStore
from trainer.checkpoint.reading import is_name
from trainer.checkpoint.shared_folder import SharedFolder
from trainer.checkpoint.store import Store
from trainer.console import Tell, say, silent, warn
from trainer.data.remote import is_remote
from trainer.errors import TrainerError, explain
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.ranks.world import World, require_shared, together
from trainer.run.config import Config
from trainer.run.folder import ENDED, patience, take
from trainer.run.lock import hold
from trainer.run.resume_checks import require_own_files
from trainer.run.stop_request import STOP_FILE, request
from trainer.store.address import local_folder
from trainer.store.lease import Lease
from trainer.store.lease import take as take_lease
from trainer.store.mirror import Mirror
from trainer.store.objects import Objects

MIRRORED = ("config.yaml", METRICS_LOG, ENDED, "tokenizer", "guard", "tensorboard")  # files, and folders with theirs
_PROBE = "probe"


@dataclass
class Home:
    """A run's home, held by this run until it is closed."""

    folder: Path  # this rank works here
    store: Store  # keeps the checkpoints
    lock: IO[str] | None  # on the folder
    lease: Lease | None = None  # on the address; rank 0 has it
    mirror: Mirror | None = None  # of the folder at the address; rank 0 has it

    def settle(self) -> None:
        """Bring to the address what is not yet there."""
        if self.mirror is not None and self.lease is not None and not self.lease.lost:
            self.mirror.try_push()

    def close(self) -> None:
        """Let another run in."""
        if self.mirror is not None:
            self.mirror.close()
            self.settle()
        if self.lease is not None and not self.lease.lost:
            try:
                self.lease.objects.delete(STOP_FILE)
                self.lease.release()
            except TrainerError as error:
                warn(f"the next start has to wait, because the lease cannot be released: {explain(error)}")
        if self.lock is not None:
            self.lock.close()


def working_folder(config: Config) -> Path:
    """The folder in which this node's ranks work. Raises TrainerError if ``cache.folder`` names no home."""
    address = config.run.folder
    return local_folder(address, config.cache.folder) if is_remote(address) else Path(address)


def store_of(config: Config) -> Store:
    """The place that keeps a run's checkpoints, for reading. Raises TrainerError if it is not a valid address."""
    if not is_remote(config.run.folder):
        return SharedFolder(Path(config.run.folder))
    return ObjectStore(Objects(config.run.folder), working_folder(config))


def try_address(config: Config, world: World, tell: Tell) -> None:
    """Check that every node reaches the run's address, and that rank 0 can write there; leave nothing. A collective.

    Raises TrainerError on all ranks if not, or if what is there is not a run's.
    """
    address, folder = config.run.folder, working_folder(config)

    def reach() -> None:
        objects = Objects(address)
        require_own_files(objects.names(), address)
        if world.is_main:
            objects.write(_PROBE, b"a run can be kept here")
            objects.read(_PROBE)
            objects.delete(_PROBE)
        if world.is_local_main:
            folder.mkdir(parents=True, exist_ok=True)

    together(reach, world)
    tell(f"run.folder {address} is written by rank 0 and reached by every node, which works in {folder}")


def open_home(config: Config, world: World) -> Home:
    """Take a run's home. A collective.

    Raises TrainerError on all ranks if it is not a run's, another run holds it, or some node cannot use it.
    """
    open_one = _open_address if is_remote(config.run.folder) else _open_folder
    return open_one(config, world, say if world.is_main else silent)


def _open_folder(config: Config, world: World, tell: Tell) -> Home:
    folder = Path(config.run.folder)
    lock = together(lambda: take(config, tell) if world.is_main else None, world)
    require_shared(folder, world)
    return Home(folder, SharedFolder(folder), lock)


def _open_address(config: Config, world: World, tell: Tell) -> Home:
    address, folder, wait = config.run.folder, working_folder(config), patience(config)
    objects = together(partial(Objects, address), world)
    home = Home(folder, ObjectStore(objects, folder), None)

    def take_address() -> None:
        require_own_files(objects.names(), address)
        home.lease = take_lease(objects, wait, tell)
        objects.delete(STOP_FILE)  # an earlier attempt's, which was killed before it saw it
        home.lease.keep(partial(_seen, home), partial(_lost, home, tell), tell)

    def take_folder() -> None:
        try:
            home.lock = hold(folder, wait, tell)
        except TrainerError as error:
            own = ", or let cache.folder be on a disk of each node's own" if world.size > world.local_size else ""
            raise TrainerError(f"{error}{own}") from None
        for path in folder.iterdir():
            if (_is_mirrored(path.name) or is_name(path.name) or path.name == STOP_FILE) and (reason := remove(path)):
                raise TrainerError(f"{reason}: remove what is in the way, or set cache.folder to another folder")

    def begin() -> None:
        if home.lease is None:
            return
        mirror = Mirror(objects, folder, _is_mirrored, home.lease.renew, tell)
        mirror.pull()
        home.lease.renew()  # or it was lost in the meantime
        mirror.start()
        home.mirror, home.store = mirror, ObjectStore(objects, folder, home.lease, mirror)
        tell(f"{address}: working in {folder}")

    try:
        together(lambda: take_address() if world.is_main else None, world)
        together(lambda: take_folder() if world.is_local_main else None, world)
        together(begin, world)
    except BaseException:
        home.close()
        raise
    return home


def _seen(home: Home, names: Iterable[str]) -> None:
    """Pass on a stop request at the address, once the run's own folder is there."""
    if STOP_FILE in names and home.mirror is not None:
        request(home.folder)


def _lost(home: Home, tell: Tell, reason: str) -> None:
    """Stop a run whose address another run has taken. It cannot save there any more."""
    warn(f"{reason}: stopping", tell)
    if home.mirror is not None:
        request(home.folder)


def _is_mirrored(name: str) -> bool:
    return name.split("/")[0] in MIRRORED
