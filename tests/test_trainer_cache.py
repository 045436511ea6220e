"""The cache of remote shards: shared by ranks and runs, bounded, ahead of the training, and never in the way."""

from __future__ import annotations

import fcntl
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from data_prep.manifest import MANIFEST, load_manifest
from tests.helpers.file_server import BATCH, WINDOW, Server, content, damage, loader_of, order_of, read, whole_tars
from tests.helpers.runs import wait_for
from trainer.data import remote
from trainer.data.cache import Cache, CacheConfig, open_cache
from trainer.data.loader import Loader
from trainer.data.order import Gap
from trainer.data.remote import Remote
from trainer.errors import TrainerError, exit_code
from trainer.exits import FAILED, REFUSED

pytestmark = pytest.mark.usefixtures("no_waits")


# ---- once, ahead, and no more than two windows ---------------------------------------------------------------


def test_the_cache_holds_two_windows_and_fetches_each_shard_once_an_epoch(server: Server, cache: Path) -> None:
    loader, counts = loader_of(server, cache), list[int]()
    epochs = 3 * order_of(loader).samples // BATCH

    def count() -> None:
        wait_for(lambda: len(whole_tars(cache)) <= 2 * WINDOW, timeout=10)  # the newest one is named before one goes
        counts.append(len(whole_tars(cache)))

    with patch.object(Remote, "fetch", autospec=True, side_effect=Remote.fetch) as fetch:  # attempts are not counted
        read(loader, 0, epochs, count)
    assert max(counts) == 2 * WINDOW and len(counts) == epochs
    tars = Counter(call.args[1] for call in fetch.call_args_list if call.args[1].endswith(".tar"))
    assert all(count in (2, 3, 4) for count in tars.values()) and len(tars) == 5, (tars, server.tars())
    assert sum(tars.values()) <= 3 * 5 + 1 + 2  # and what lies ahead


def test_a_larger_cache_keeps_what_it_has_room_for(server: Server, cache: Path, tmp_path: Path) -> None:
    loader = loader_of(server, cache, gigabytes=1)
    read(loader, 0, 3 * order_of(loader).samples // BATCH)
    assert server.tars() == Counter(f"shard-0000{number}.tar" for number in range(5))
    gets = len(server.gets)
    again = loader_of(server, cache, gigabytes=1)  # another run, another process, another phase
    read(again, 0, 3)
    assert server.gets[gets:] == [MANIFEST]
    two = 2.5 * max(shard.bytes for shard in loader.manifest.shards) / 1e9
    other = Path(shutil.copytree(server.folder, tmp_path / "other"))
    (other / MANIFEST).write_bytes((other / MANIFEST).read_bytes() + b"\n")
    second = Server(other)
    third = loader_of(second, cache, gigabytes=two)
    read(third, 0, 30)
    second.stop()
    assert len(list(cache.glob("*/shard-*.tar"))) == 2  # those of the first data set are gone: used longest ago
    assert not list(loader.folder.glob("*.tar")) and not list(loader.folder.glob("*.idx.npy"))


def test_the_next_window_is_there_before_it_is_needed(server: Server, cache: Path) -> None:
    loader = loader_of(server, cache)
    order = order_of(loader)
    following = order.window_at(order.window_at(0)[1])[0]
    loader.read(order, 0, BATCH, 1)
    names = {f"shard-0000{number}.tar" for number in order.window_at(0)[0] + following}
    deadline = time.monotonic() + 60
    while whole_tars(cache) != names:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert set(server.tars()) == names


def test_deep_in_an_epoch_only_what_is_needed_is_fetched(server: Server, cache: Path) -> None:
    loader = loader_of(server, cache)
    order = order_of(loader)
    position = 7 * order.samples + 3 * 64 + 5
    before = len(server.gets)
    loader.read(order, position, BATCH, 1)
    now, following = order.window_at(position)
    wanted = {f"shard-0000{number}" for number in now + order.window_at(following)[0]}
    assert {name.split(".")[0] for name in server.gets[before:]} <= wanted
    assert len(server.gets) - before <= 2 * len(wanted) == 4


def test_shards_inside_a_gap_are_not_fetched(server: Server, cache: Path) -> None:
    """The batch begins in one window and ends three windows later."""
    loader = loader_of(server, cache)
    order = order_of(loader)
    firsts = [0]
    while firsts[-1] < 4 * order.samples:
        firsts.append(order.window_at(firsts[-1])[1])
    gapped = replace(order, gaps=(Gap(BATCH // 2, firsts[3] - BATCH // 2),))
    with patch.object(Cache, "want", autospec=True, side_effect=Cache.want) as want:
        assert loader.read(gapped, 0, BATCH, 1).following == firsts[3] + BATCH // 2
    [call] = want.call_args_list
    ends = order.window_at(0)[0] + order.window_at(firsts[3])[0]
    assert call.args[1:] == (sorted(set(ends)), order.window_at(firsts[3])[0])


def test_ranks_share_the_cache_and_fetch_each_shard_once(server: Server, cache: Path) -> None:
    steps = threading.Barrier(4, timeout=60)  # as a collective

    def rank(number: int) -> list[object]:
        loader = loader_of(server, cache, number, 4)
        return content(read(loader, 0, order_of(loader).samples // BATCH, steps.wait))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(rank, range(4)))
    manifest = load_manifest(server.folder)
    for number, batches in enumerate(found):
        local = Loader(server.folder, manifest, number, 4)
        assert batches == content(read(local, 0, len(batches)))
    tars = server.tars()
    assert len(tars) == 5 and sum(tars.values()) <= 5 + 1  # the first of the next epoch may be fetched ahead
    assert Counter(server.gets)["token_counts.npy"] == 1


def test_a_data_set_beside_the_cache_is_not_touched(server: Server, tmp_path: Path) -> None:
    before = sorted(path.name for path in server.folder.iterdir())
    loader = loader_of(server, tmp_path)
    assert server.folder.parent == loader.folder.parent
    read(loader, 0, order_of(loader).samples // BATCH)
    assert sorted(path.name for path in server.folder.iterdir()) == before


def test_what_another_reads_is_not_removed(server: Server, cache: Path) -> None:
    slow, fast = loader_of(server, cache), loader_of(server, cache)
    order = order_of(slow)
    slow.read(order, 0, BATCH, 1)
    held = {f"shard-0000{number}.tar" for number in order.window_at(0)[0]}
    read(fast, 64, order.samples // BATCH, lambda: None if held <= whole_tars(cache) else pytest.fail("removed"))
    slow.read(order, BATCH, BATCH, 1)
    assert server.tars()[min(held)] == 1


def test_a_killed_process_leaves_nothing_in_the_way(server: Server, cache: Path) -> None:
    loader = loader_of(server, cache)
    loader.folder.joinpath("shard-00000.tar").write_bytes(b"half")
    left = loader.folder / "shard-00000.tar.1234abcd.tmp"
    left.write_bytes(b"half")
    read(loader, 0, order_of(loader).samples // BATCH)
    assert not left.exists() and server.tars()["shard-00000.tar"] == 1


# ---- waited for, damaged, impossible ------------------------------------------------------------------------


def test_those_who_wait_for_a_shard_go_on_when_it_is_there(server: Server, cache: Path) -> None:
    caches = [open_cache(server.address, CacheConfig(str(cache), 0), 30, 0) for _ in range(3)]
    server.faults["shard-00000.tar"] = ["hang"]
    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(caches[0].want, [0], [])]
        while "shard-00000.tar" not in server.gets:
            time.sleep(0.01)
        tasks += [pool.submit(one.want, [0], []) for one in caches[1:]]
        time.sleep(0.3)
        server.released.set()
        for task in tasks:
            task.result(60)  # each of them holds it from now on
    assert server.tars()["shard-00000.tar"] == 2


@pytest.mark.parametrize(("fault", "code", "reason"), [("busy", FAILED, "503"), ("less", REFUSED, "the manifest's")])
def test_a_failure_is_shared_by_those_who_wait(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str, code: int, reason: str
) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.3, 0.3, 0.3, 0.3))
    loaders = [loader_of(server, cache, rank, 3) for rank in range(3)]
    order = order_of(loaders[0])
    name = f"shard-0000{order.window_at(0)[0][0]}.tar"
    server.faults[name] = [fault] * 15

    def failure(loader: Loader) -> tuple[str, int]:
        with pytest.raises(TrainerError) as error:
            loader.read(order, 0, BATCH, 1)
        return str(error.value), exit_code(error.value)

    with ThreadPoolExecutor(3) as pool:
        [(line, ends)] = set(pool.map(failure, loaders))
    assert f"{server.address}/{name}: " in line and reason in line and ends == code
    assert server.tars()[name] == 5


def test_a_cached_shard_that_rots_is_named(server: Server, cache: Path) -> None:
    loader = loader_of(server, cache, gigabytes=1)
    read(loader, 0, order_of(loader).samples // BATCH)
    damage(loader.folder, "flipped")
    match = f"shard-00001.tar is damaged at sample 17: .*remove it, and it will be fetched again from {server.address}$"
    with pytest.raises(TrainerError, match=match):
        read(loader, 0, order_of(loader).samples // BATCH + 1)


def test_a_cache_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainerError, match=r"cache\.folder .*file/cache cannot be used .*: name a writable folder"):
        loader_of(server, tmp_path / "file" / "cache")


def test_a_cache_in_the_home_of_nobody_is_named(server: Server) -> None:
    with pytest.raises(TrainerError, match=r"^cache\.folder ~nobody.* cannot be used .*: name a writable folder"):
        open_cache(server.address, CacheConfig("~nobody-of-that-name/cache"), 5, 0)


def test_an_impossible_cache_is_reported() -> None:
    assert CacheConfig().problems() == []
    wrong = replace(CacheConfig(), folder="", gigabytes=-1.0).problems()
    assert [line.split(" is ")[0] for line in wrong] == ["folder", "gigabytes"]
    assert len(replace(CacheConfig(), gigabytes=float("nan")).problems()) == 1


def test_what_is_wanted_no_longer_is_let_go(server: Server, cache: Path) -> None:
    one, other = (open_cache(server.address, CacheConfig(str(cache), 0), 30, 0) for _ in range(2))
    one.want([0, 1], [])
    assert taken(one, 0) and taken(one, 1)
    one.want([1], [2])
    assert not taken(one, 0) and taken(one, 1)
    other.want([1], [])
    one.rest()
    assert taken(one, 1) and not taken(one, 2)
    other.rest()
    assert not taken(one, 1)


def taken(cache: Cache, number: int) -> bool:
    """Whether any process holds the shard."""
    with (cache.folder / f"shard-0000{number}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
