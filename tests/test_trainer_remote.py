"""Training from remote shards: the same batches as from the folder, each shard fetched once, on any network."""

from __future__ import annotations

import fcntl
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import ranks
import torch
from moto.server import ThreadedMotoServer
from runs import lines, write_config
from torch import Tensor

from data_prep.manifest import MANIFEST, load_manifest, manifest_hash
from data_prep.publish import publish
from data_prep.shards import BLOCK
from trainer import remote
from trainer.batch import MicroBatch
from trainer.cache import Cache, CacheConfig, open_cache
from trainer.config import Config, RunConfig
from trainer.data import PhaseData, open_phases
from trainer.errors import TrainerError
from trainer.loader import Loader, StepBatch
from trainer.model import ModelConfig
from trainer.order import Order
from trainer.schedule import Phase
from trainer.world import World

WINDOW, BATCH = 1, 24  # of shards, of samples; the data set has five shards of 64 samples, the last one less
CPU = torch.device("cpu")


class Server(ThreadingHTTPServer):
    """Serves ``folder``. ``faults`` of a file's name: what becomes of the next requests for it."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.folder = folder
        self.gets = list[str]()  # names, in the order of the requests
        self.faults = dict[str, list[str]]()
        self.released = threading.Event()  # ends what hangs
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()

    def tars(self) -> Counter[str]:
        """How often each tar was asked for."""
        return Counter(name for name in self.gets if name.endswith(".tar"))


class Handler(SimpleHTTPRequestHandler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        self.server.gets.append(name)
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else "none"
        content = b"" if fault == "none" else Path(self.translate_path(self.path)).read_bytes()
        match fault:
            case "busy":
                self.send_error(503)
            case "forbidden":
                self.send_error(403)
            case "cut" | "hang":
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                if fault == "hang":
                    self.server.released.wait(60)
            case "none":
                super().do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(own_shards: Path) -> Iterator[Server]:
    running = Server(own_shards)
    yield running
    running.stop()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.01, 0.01, 0.01))


def phase_of(
    train: str, cache: Path, model: ModelConfig, rank: int = 0, size: int = 1, gigabytes: float = 0
) -> PhaseData:
    phase = Phase("a", train, 32, 5, 1e-3, global_batch=BATCH, micro_batch=8, heldout=train)
    run = RunConfig("r", "unused", seed=4, shuffle_window=WINDOW)
    config = Config(run, model, (phase,), cache=CacheConfig(str(cache), gigabytes))
    [data] = open_phases(config, World(rank, size, rank, size, CPU))
    return data


def loader_of(server: Server, cache: Path, rank: int = 0, size: int = 1, gigabytes: float = 0) -> Loader:
    opened = open_cache(server.address, CacheConfig(str(cache), gigabytes), 30, rank)
    return Loader(opened.folder, opened.manifest, rank, size, None, opened)


def order_of(loader: Loader) -> Order:
    return Order(tuple(shard.samples for shard in loader.manifest.shards), 4, WINDOW)


def read(loader: Loader, position: int, steps: int, each: Callable[[], object] = lambda: None) -> list[StepBatch]:
    out = []
    with closing(loader.steps(order_of(loader), position, BATCH, 2)) as batches:
        for _ in range(steps):
            out.append(next(batches))
            each()
    return out


def values(batch: MicroBatch) -> list[object]:
    found = [getattr(batch, field.name) for field in fields(batch)]
    return [(str(value.dtype), value.tolist()) if isinstance(value, Tensor) else value for value in found]


def content(steps: list[StepBatch]) -> list[object]:
    return [(s.position, s.counts, [values(batch) for batch in s.micro_batches]) for s in steps]


def whole_tars(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*/*.tar")}


# ---- the same batches ----------------------------------------------------------------------------------------


@pytest.fixture
def s3(own_shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    publish(own_shards, "s3://bucket/set", 2)
    yield "s3://bucket/set"
    running.stop()


@pytest.mark.parametrize("place", ["server", "s3", "file"])
def test_a_remote_data_set_gives_the_batches_of_the_folder(
    place: str, request: pytest.FixtureRequest, own_shards: Path, tiny_model: ModelConfig, cache: Path
) -> None:
    there = f"file://{own_shards}" if place == "file" else request.getfixturevalue(place)
    address = there.address if isinstance(there, Server) else there
    for rank in range(2):
        data, local = (phase_of(p, cache, tiny_model, rank, 2) for p in (f"{address}/", str(own_shards)))
        steps = 2 * data.order.samples // BATCH
        assert data.loader.folder == cache / manifest_hash(own_shards)
        assert content(read(data.loader, 0, steps)) == content(read(local.loader, 0, steps))
        assert data.heldout is not None and local.heldout is not None
        assert [*map(values, data.heldout.sweep(9))] == [*map(values, local.heldout.sweep(9))]
    for name in ("tokenizer/vocab.txt", "tokenizer/tokenizer_config.json", "token_counts.npy", MANIFEST):
        assert (data.loader.folder / name).read_bytes() == (own_shards / name).read_bytes()


def test_ranks_train_on_remote_shards_as_on_local_ones(
    server: Server, own_shards: Path, cache: Path, tmp_path: Path
) -> None:
    losses = []
    for name, place in (("local", str(own_shards)), ("remote", server.address)):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, own_shards, 25, cache={"folder": str(cache)})
        options = ["--config", str(config), "--set", f"phases.0.train={place}", "--set", f"phases.0.heldout={place}"]
        ended = ranks.finish(ranks.fork(2, "trainer/__main__.py", *options))
        assert [code for code, _ in ended] == [0, 0], ended
        records = lines(tmp_path / name / "run", "step") + lines(tmp_path / name / "run", "heldout")
        losses.append([record["mlm_loss"] for record in records])
    assert losses[0] == losses[1] and len(losses[0]) > 10
    assert set(server.tars().values()) == {1} and len(server.tars()) == 5
    assert (tmp_path / "remote/run/tokenizer/vocab.txt").read_bytes() == (
        own_shards / "tokenizer/vocab.txt"
    ).read_bytes()


# ---- once, ahead, and no more than two windows ---------------------------------------------------------------


def test_the_cache_holds_two_windows_and_fetches_each_shard_once_an_epoch(server: Server, cache: Path) -> None:
    loader, counts = loader_of(server, cache), list[int]()
    epochs = 3 * order_of(loader).samples // BATCH
    read(loader, 0, epochs, lambda: counts.append(len(whole_tars(cache))))
    assert max(counts) == 2 * WINDOW and len(counts) == epochs
    assert all(count in (2, 3, 4) for count in server.tars().values()) and len(server.tars()) == 5
    assert sum(server.tars().values()) <= 3 * 5 + 1 + 2  # and what lies ahead


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


# ---- a bad network -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["busy", "cut", "hang"])
@pytest.mark.parametrize("name", ["shard-00002.tar", "shard-00002.idx.npy", MANIFEST])
def test_what_passes_is_tried_again(server: Server, fault: str, name: str, cache: Path) -> None:
    server.faults[name] = [fault, fault]
    opened = open_cache(server.address, CacheConfig(str(cache), 0), 0.5, 0)
    loader = Loader(opened.folder, opened.manifest, 0, 1, None, opened)
    local = Loader(server.folder, opened.manifest, 0, 1)
    steps = order_of(loader).samples // BATCH
    assert content(read(loader, 0, steps)) == content(read(local, 0, steps))
    assert server.gets.count(name) >= 3 and not server.faults[name]
    deadline = time.monotonic() + 60
    while list(cache.rglob("*.tmp")):  # of what was fetched ahead when the reading ended
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_goes_away_ends_the_run_with_the_address(server: Server, cache: Path) -> None:
    loader = loader_of(server, cache)
    with closing(loader.steps(order_of(loader), 0, BATCH, 1)) as steps:
        next(steps)
        server.stop()
        with pytest.raises(TrainerError) as error:
            for _ in range(20):
                next(steps)
    assert "\n" not in str(error.value) and f"{server.address}/shard-0000" in str(error.value)
    assert "(5 attempts); check the address" in str(error.value)
    with pytest.raises(TrainerError, match=f"{server.address}/{MANIFEST}: .*5 attempts"):
        loader_of(server, cache)


def test_a_failure_is_shared_by_those_who_wait(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.3, 0.3, 0.3, 0.3))
    loaders = [loader_of(server, cache, rank, 3) for rank in range(3)]
    order = order_of(loaders[0])
    name = f"shard-0000{order.window_at(0)[0][0]}.tar"
    server.faults[name] = ["busy"] * 15

    def failure(loader: Loader) -> str:
        with pytest.raises(TrainerError) as error:
            loader.read(order, 0, BATCH, 1)
        return str(error.value)

    with ThreadPoolExecutor(3) as pool:
        [told] = set(pool.map(failure, loaders))
    assert f"{server.address}/{name}: " in told and "503" in told
    assert server.tars()[name] == 5


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


def test_a_run_ends_at_once_though_the_server_hangs(server: Server, cache: Path) -> None:
    loader = loader_of(server, cache)
    order = order_of(loader)
    [following] = order.window_at(order.window_at(0)[1])[0]
    server.faults[f"shard-0000{following}.tar"] = ["hang"] * 5
    began = time.monotonic()
    read(loader, 0, 1)
    assert time.monotonic() - began < 15  # an attempt takes 30
    for lock in loader.folder.glob("*.lock"):
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    server.faults.clear()
    read(loader, 0, 4)  # nothing of it is left for the next time


# ---- damage --------------------------------------------------------------------------------------------------


DAMAGES = "flipped,cut,cut at a member,empty,gone,foreign,forbidden,index flipped,index gone,index foreign"


def damage(folder: Path, kind: str) -> None:
    """Do to shard 1, or its index, what ``kind`` says."""
    path = folder / ("shard-00001.idx.npy" if kind.startswith("index") else "shard-00001.tar")
    data = path.read_bytes()
    match kind.split()[-1]:
        case "flipped":  # in the ids of sample 17, whose member takes two blocks, as all do
            place = min(17 * 2 * BLOCK + BLOCK + 140, len(data) - 1)
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        case "cut":
            path.write_bytes(data[:-700])
        case "member":  # it ends as a tar may, between two members
            path.write_bytes(data[: 10 * 2 * BLOCK])
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case "foreign":
            shutil.copy(str(path).replace("00001", "00000"), path)


@pytest.mark.parametrize("kind", DAMAGES.split(","))
def test_a_damaged_shard_stops_the_run_with_its_address(server: Server, kind: str, cache: Path) -> None:
    damage(server.folder, kind)
    name = "shard-00001.idx.npy" if kind.startswith("index") else "shard-00001.tar"
    if kind == "forbidden":
        server.faults[name] = ["forbidden"] * 99
    loader = loader_of(server, cache)
    with pytest.raises(TrainerError, match=f"^{server.address}/{name}: ") as error:
        read(loader, 0, order_of(loader).samples // BATCH)
    assert "\n" not in str(error.value)
    assert server.gets.count(name) <= (2 if kind in ("gone", "index gone", "forbidden") else 10)
    assert not (loader.folder / name).exists()


@pytest.mark.parametrize("place", ["server", "s3", "file"])
def test_missing_and_cut_shards_are_told_before_the_ranks_meet(
    place: str, request: pytest.FixtureRequest, own_shards: Path, tiny_model: ModelConfig, cache: Path
) -> None:
    there = f"file://{own_shards}" if place == "file" else request.getfixturevalue(place)
    address = there.address if isinstance(there, Server) else there
    data = phase_of(address, cache, tiny_model)
    assert data.loader.problems() == []
    if place == "s3":
        client = boto3.client("s3")
        for key in ("shard-00001.tar", "shard-00003.idx.npy"):
            client.delete_object(Bucket="bucket", Key=f"set/{key}")
        client.put_object(Bucket="bucket", Key="set/shard-00002.tar", Body=b"short")
    else:
        damage(own_shards, "gone")
        (own_shards / "shard-00003.idx.npy").unlink()
        (own_shards / "shard-00002.tar").write_bytes(b"short")
    with pytest.raises(TrainerError) as error:
        phase_of(address, cache, tiny_model)
    line = str(error.value).split("\n  - ")[1]
    assert line.startswith(
        f"phases.0.train: {address}: missing or cut: shard-00001.tar, shard-00003.idx.npy, shard-00002"
    )
    assert f"(5 bytes instead of {load_manifest(own_shards).shards[2].bytes})" in line


def test_a_cached_shard_that_rots_is_named(server: Server, cache: Path) -> None:
    loader = loader_of(server, cache, gigabytes=1)
    read(loader, 0, order_of(loader).samples // BATCH)
    damage(loader.folder, "flipped")
    match = f"shard-00001.tar is damaged at sample 17: .*remove it, and it is fetched again from {server.address}$"
    with pytest.raises(TrainerError, match=match):
        read(loader, 0, order_of(loader).samples // BATCH + 1)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("{server}/nothing/here", r"/nothing/here/manifest.json: there is no such file"),
        ("http://127.0.0.1:9/set", r"http://127.0.0.1:9/set/manifest.json: .*5 attempts"),
        ("nowhere://bucket/set", "no such place"),
        ("simplecache::{server}", "chained addresses are not taken"),
        ("sftp://host/set", "pip install paramiko"),
    ],
)
def test_a_bad_address_costs_one_line(
    server: Server, address: str, problem: str, tiny_model: ModelConfig, cache: Path
) -> None:
    with pytest.raises(TrainerError, match=problem) as error:
        phase_of(address.format(server=server.address), cache, tiny_model)
    assert len(str(error.value).split("\n")) == 3  # a heading, the training shards, the held-out ones


@pytest.mark.parametrize("kind", ["html", "tokenizer", "counts", "path"])
def test_what_is_no_data_set_is_refused(server: Server, kind: str, cache: Path) -> None:
    manifest, pieces = server.folder / MANIFEST, server.folder / "tokenizer/tokenizer.json"
    match kind:
        case "html":
            manifest.write_text("<html>sign in</html>")
        case "tokenizer":
            pieces.write_text(pieces.read_text().replace('"ba"', '"ab"'))
        case "counts":
            shutil.copy(server.folder / "length_counts.npy", server.folder / "token_counts.npy")
        case "path":
            manifest.write_text(manifest.read_text().replace('"shard-00001"', '"../shard-00001"'))
    with pytest.raises(TrainerError, match=f"^{server.address}") as error:
        loader_of(server, cache)
    assert "\n" not in str(error.value) and not list(cache.glob(f"*/{MANIFEST}"))


def test_a_cache_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        TrainerError, match=r"cache\.folder .*file/cache cannot be used .*: name one that can be written"
    ):
        loader_of(server, tmp_path / "file" / "cache")


def test_an_impossible_cache_is_told() -> None:
    assert CacheConfig().problems() == []
    wrong = replace(CacheConfig(), folder="", gigabytes=-1.0).problems()
    assert [line.split(" is ")[0] for line in wrong] == ["folder", "gigabytes"]


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
    """Whether anybody holds the shard."""
    with (cache.folder / f"shard-0000{number}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
