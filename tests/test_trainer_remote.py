"""Training from remote shards: the same batches as from the folder, on any network, and all damage named."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import boto3
import pytest
import torch

from data_prep.manifest import MANIFEST, load_manifest, manifest_hash
from data_prep.publish import publish
from tests.helpers import ranks
from tests.helpers.file_server import BATCH, WINDOW, Server, content, damage, loader_of, order_of, read, values
from tests.helpers.runs import lines, write_config
from tests.helpers.s3 import serving, sign_in
from trainer.data.cache import CacheConfig, open_cache
from trainer.data.loader import Loader
from trainer.engine.schedule import Phase
from trainer.errors import TrainerError, exit_code
from trainer.exits import FAILED, REFUSED
from trainer.model.bert import ModelConfig
from trainer.ranks.world import World
from trainer.run.config import Config, RunConfig
from trainer.run.phases import PhaseData, open_phases

pytestmark = pytest.mark.usefixtures("no_waits")
CPU = torch.device("cpu")


def phase_of(
    train: str, cache: Path, model: ModelConfig, rank: int = 0, size: int = 1, gigabytes: float = 0
) -> PhaseData:
    phase = Phase("a", train, 32, 5, 1e-3, global_batch=BATCH, micro_batch=8, heldout=train)
    run = RunConfig("r", "unused", seed=4, shuffle_window=WINDOW)
    config = Config(run, model, (phase,), cache=CacheConfig(str(cache), gigabytes))
    [data] = open_phases(config, World(rank, size, rank, size, CPU)).phases
    return data


# ---- the same batches ----------------------------------------------------------------------------------------


@pytest.fixture
def s3(own_shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving() as address:
        sign_in(address, monkeypatch)
        boto3.client("s3").create_bucket(Bucket="bucket")
        publish(own_shards, "s3://bucket/set", 2)
        yield "s3://bucket/set"


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


@pytest.mark.slow
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
    assert "(5 attempts); check the address" in str(error.value) and exit_code(error.value) == FAILED
    with pytest.raises(TrainerError, match=f"{server.address}/{MANIFEST}: .*5 attempts") as error:
        loader_of(server, cache)
    assert exit_code(error.value) == FAILED


@pytest.mark.slow
def test_a_run_whose_server_is_down_may_be_started_again(server: Server, cache: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, server.folder, 25, cache={"folder": str(cache)})
    server.stop()
    command = ["--config", str(config), "--set", f"phases.0.train={server.address}"]
    [(code, said)] = ranks.finish(ranks.fork(1, "trainer/__main__.py", *command))
    assert code == FAILED and f"phases.0.train: {server.address}/{MANIFEST}: " in said and "Traceback" not in said


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
    assert exit_code(error.value) == REFUSED


@pytest.mark.parametrize("place", ["server", "s3", "file"])
def test_missing_and_cut_shards_are_reported_before_the_ranks_meet(
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
        f"phases.0.train: {address}: missing or truncated: shard-00001.tar, shard-00003.idx.npy, shard-00002"
    )
    assert f"(5 bytes instead of {load_manifest(own_shards).shards[2].bytes})" in line


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("{server}/nothing/here", r"/nothing/here/manifest.json: no such file"),
        ("http://127.0.0.1:9/set", r"http://127.0.0.1:9/set/manifest.json: .*5 attempts"),
        ("nowhere://bucket/set", "not a valid address"),
        ("simplecache::{server}", "wanted one address"),
        ("sftp://host/set", "pip install paramiko"),
    ],
)
def test_a_bad_address_costs_one_line(
    server: Server, address: str, problem: str, tiny_model: ModelConfig, cache: Path
) -> None:
    with pytest.raises(TrainerError, match=problem) as error:
        phase_of(address.format(server=server.address), cache, tiny_model)
    if address.startswith("http:"):  # it may only be down, so nothing is known about the rest
        assert len(str(error.value).split("\n")) == 1 and exit_code(error.value) == FAILED
    else:  # a heading, the training shards, the held-out ones
        assert len(str(error.value).split("\n")) == 3 and exit_code(error.value) == REFUSED


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
