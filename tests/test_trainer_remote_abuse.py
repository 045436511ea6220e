"""A hostile shard server: limits on what it can make a run read, write, wait for and request."""

from __future__ import annotations

import json
import re
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from data_prep.manifest import MANIFEST, load_manifest
from data_prep.servers import RefusedError, open_fs
from tests.helpers.file_server import BATCH, Server, order_of
from trainer.data.cache import CacheConfig, open_cache
from trainer.data.loader import Loader
from trainer.data.remote import Remote
from trainer.errors import TrainerError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_waits")]
STALL = 0.5
FILES = (MANIFEST, "token_counts.npy", "tokenizer.json", "shard-00001.idx.npy", "shard-00001.tar")
BUFFERS = 16 << 20  # bytes on their way when a client hangs up


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that tests need not send 64 MiB."""
    monkeypatch.setattr("trainer.data.cache.SMALL_FILE_BYTES", 1 << 20)


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Server]:
    """A server of another origin, which no shard server may make a run ask."""
    (tmp_path / "inside").mkdir()
    running = Server(tmp_path / "inside")
    yield running
    running.stop()


def read_all(server: Server, cache: Path, redirects: tuple[str, ...] = ()) -> None:
    """Open the data set and read an epoch of it."""
    opened = open_cache(server.address, CacheConfig(str(cache), 0, redirects), STALL, 0)
    loader = Loader(opened.folder, opened.manifest, 0, 1, None, opened)
    order = order_of(loader)
    with closing(loader.steps(order, 0, BATCH, 2)) as batches:
        for _ in range(order.samples // BATCH):
            next(batches)


def refused(server: Server, cache: Path, name: str) -> str:
    """The one line that a run ends with, which names the file."""
    with pytest.raises(TrainerError) as error:
        read_all(server, cache)
    line = str(error.value)
    assert "\n" not in line and f"/{name}: " in line and line.startswith(server.address)
    return line


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", ["endless", "promise", "bomb", "bombs", "compressed"])
def test_no_more_is_taken_than_the_manifest_names(server: Server, cache: Path, name: str, fault: str) -> None:
    server.faults[name] = [fault] * 99
    line = refused(server, cache, name)
    if fault not in ("endless", "promise"):
        assert "the server compresses its answer ('gzip" in line
    else:
        size = load_manifest(server.folder).shards[1].bytes
        assert f"more than the {size if name.endswith('.tar') else ''}".replace("'", "") in line.replace(",", "")
    assert server.sent < BUFFERS + (1 << 20) and server.gets.count(name) <= 2
    _wait_until_gone(cache, name)
    used = sum(path.stat().st_blocks * 512 for path in cache.rglob("*") if path.is_file())
    assert used < 4 << 20


def test_an_endless_answer_costs_no_memory(server: Server, cache: Path) -> None:
    """This includes 256 MiB when unpacked. The peak covers the process's whole life, so compare it with before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for fault in ("endless", "promise", "bomb"):
        server.faults[MANIFEST] = [fault] * 9
        refused(server, cache, MANIFEST)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", ["trickle", "trickle of headers", "hang", "interim"])
def test_an_answer_that_never_ends_is_not_waited_for(server: Server, cache: Path, name: str, fault: str) -> None:
    server.faults[name] = [fault] * 99
    began = time.monotonic()
    line = refused(server, cache, name)
    assert "attempts" in line and time.monotonic() - began < 2 * 5 * STALL + 10
    _wait_until_gone(cache, name)


@pytest.mark.parametrize("name", [MANIFEST, "shard-00001.tar"])
def test_an_answer_that_goes_on_too_slowly_is_broken_off(server: Server, cache: Path, name: str) -> None:
    """Each block comes in time, so nothing ever stands still."""
    server.faults[name] = ["drip"] * 99
    assert re.search(r" bytes in 0.5 s, after [\d,]+ \(5 attempts\)", refused(server, cache, name))


@pytest.mark.parametrize("name", ["shard-00001.idx.npy", "shard-00001.tar", "token_counts.npy"])
@pytest.mark.parametrize("fault", ["more", "less"])
def test_a_byte_more_or_less_is_named(server: Server, cache: Path, name: str, fault: str) -> None:
    server.faults[name] = [fault] * 99
    line = refused(server, cache, name)
    assert ("more than the" in line) == (name.endswith(".tar") and fault == "more")
    assert not list(cache.rglob(name))


def test_a_slow_line_is_no_trickle(server: Server, tmp_path: Path) -> None:
    """A transfer that takes longer than a stall, but continues, arrives. The stall outlasts a busy machine's pauses."""
    whole = bytes(1 << 20)
    (server.folder / "slow").write_bytes(whole)
    server.faults["slow"] = ["slow"]
    began = time.monotonic()
    Remote(server.address, 3).fetch("slow", tmp_path / "got", None, len(whole), len(whole))
    assert time.monotonic() - began > 3
    assert (tmp_path / "got").read_bytes() == whole and server.gets == ["slow"]


def test_a_shard_larger_than_the_disk_is_not_begun(server: Server, cache: Path) -> None:
    path = server.folder / MANIFEST
    content = json.loads(path.read_text())
    content["shards"][1]["bytes"] = 10**15
    path.write_text(json.dumps(content))
    with pytest.raises(TrainerError, match=r"shard-00001.tar has 1,000,000,000,000,000 bytes, but the disk") as error:
        read_all(server, cache)
    assert "\n" not in str(error.value) and "shard-00001.tar" not in server.gets


def test_sizes_are_not_waited_for_without_end(server: Server) -> None:
    """A server that answers each question by headers without an end."""
    server.faults[MANIFEST] = ["trickle of headers"] * 9
    began = time.monotonic()
    with pytest.raises(TrainerError, match="no complete answer in 0.5 s"):
        Remote(server.address, STALL).sizes([MANIFEST])
    assert time.monotonic() - began < 10


# ---- requests that somebody else aims ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_redirect_to_another_origin_is_not_followed(server: Server, inside: Server, cache: Path, name: str) -> None:
    server.elsewhere = f"{inside.address}/secret"
    server.faults[name] = ["redirect"] * 99
    line = refused(server, cache, name)
    assert f"redirects to {inside.address}; name that address itself, or add it to cache.redirects" in line
    assert not inside.gets and server.gets.count(name) <= 2


@pytest.mark.parametrize("where", ["localhost", "[::1]", "127.0.0.1:1", "file", "https"])
def test_other_names_ports_and_schemes_are_other_origins(server: Server, cache: Path, where: str) -> None:
    port = f":{server.server_port}"
    places = {"127.0.0.1:1": "http://127.0.0.1:1", "file": "file:///etc/passwd", "https": f"https://127.0.0.1{port}"}
    server.elsewhere = places.get(where, f"http://{where}{port}")
    server.faults[MANIFEST] = ["redirect"] * 99
    refused(server, cache, MANIFEST)
    assert len(server.gets) == (5 if where == "file" else 1)


def test_redirects_stay_on_the_host_or_go_where_they_may(server: Server, inside: Server, cache: Path) -> None:
    names = [path.relative_to(server.folder).as_posix() for path in server.folder.rglob("*") if path.is_file()]
    for name in names:
        (inside.folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(server.folder / name, inside.folder / name)
    server.elsewhere = f"{inside.address}/{MANIFEST}"
    server.faults[MANIFEST] = ["redirect"]
    read_all(server, cache, (inside.address,))
    assert inside.gets == [MANIFEST]
    server.elsewhere = ""  # to the same address again
    server.faults[MANIFEST] = ["redirect"]
    read_all(server, cache)
    assert inside.gets == [MANIFEST]


def test_a_question_for_a_size_is_not_redirected(server: Server, inside: Server) -> None:
    server.elsewhere = f"{inside.address}/secret"
    server.faults[MANIFEST] = ["redirect"] * 99
    assert Remote(server.address, STALL).sizes([MANIFEST]) == {MANIFEST: None}  # it may be there: fetching will show
    assert not inside.gets


@pytest.mark.parametrize("place", ["cdn.example.com", "https://cdn.example.com/folder", "file:///etc", "http://"])
def test_a_place_that_is_no_origin_is_refused(place: str) -> None:
    [problem] = CacheConfig(redirects=(place,)).problems()
    assert problem.startswith(f"redirects has {place!r}: name only scheme, host and port")


# ---- the same over S3 ----------------------------------------------------------------------------------------


@pytest.fixture
def s3(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An S3 service that holds the data set; its server gives objects and their sizes, and fails at the rest."""
    held = server.folder / "bucket" / "set"
    shutil.copytree(server.folder, held, ignore=shutil.ignore_patterns("bucket"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.address)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return "s3://bucket/set"


def fetch(address: str, name: str, target: Path, limit: int) -> None:
    Remote(address, STALL).fetch(name, target, None, limit)


def test_an_object_is_fetched_from_that_server(s3: str, server: Server, tmp_path: Path) -> None:
    size = (server.folder / "shard-00001.tar").stat().st_size
    fetch(s3, "shard-00001.tar", tmp_path / "got", size)
    assert (tmp_path / "got").read_bytes() == (server.folder / "shard-00001.tar").read_bytes()


@pytest.mark.parametrize("fault", ["endless", "promise", "endless error", "trickle", "trickle of headers", "drip"])
def test_a_bad_s3_server_is_bounded(
    s3: str, server: Server, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.s3.SMALL_FILE_BYTES", 1 << 20)
    server.faults["shard-00001.tar"] = [fault] * 99
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TrainerError, match=r"^s3://bucket/set/shard-00001.tar: ") as error:
        fetch(s3, "shard-00001.tar", tmp_path / "got", 1 << 20)
    assert "\n" not in str(error.value) and time.monotonic() - began < 20
    assert server.sent < 5 * BUFFERS and not (tmp_path / "got").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize("fault", ["endless", "drip"])
def test_a_listing_without_an_end_is_bounded(
    s3: str, server: Server, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.s3.SMALL_FILE_BYTES", 1 << 20)
    server.faults["bucket"] = [fault] * 99
    with pytest.raises(TrainerError, match=r"^s3://bucket/set: ") as error:
        Remote(s3, STALL).sizes([MANIFEST])
    assert "\n" not in str(error.value) and server.sent < 5 * BUFFERS


def test_an_s3_server_does_not_redirect(s3: str, server: Server, inside: Server, tmp_path: Path) -> None:
    server.elsewhere = f"{inside.address}/secret"
    server.faults[MANIFEST] = ["redirect"] * 99
    with pytest.raises(TrainerError, match=r"^s3://bucket/set/manifest.json: ") as error:
        fetch(s3, MANIFEST, tmp_path / "got", 1 << 20)
    assert "\n" not in str(error.value) and not inside.gets


@pytest.mark.parametrize("fault", ["endless", "promise"])
def test_a_part_of_an_object_is_no_larger_than_asked_for(s3: str, server: Server, fault: str) -> None:
    """`publish` reads back what it sent in this way."""
    server.faults[MANIFEST] = [fault] * 99
    fs, root = open_fs(s3, STALL)
    with pytest.raises(RefusedError, match="asked for 100 bytes"):
        fs.cat_file(f"{root}/{MANIFEST}", start=0, end=100)
    assert server.sent < BUFFERS


def _wait_until_gone(cache: Path, name: str) -> None:
    """An aborted transfer leaves nothing behind, though only after a moment."""
    deadline = time.monotonic() + 10
    while list(cache.rglob(f"{name}*.tmp")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
