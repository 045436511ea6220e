"""Files, leases, mirrors and checkpoints at an address, on an S3 server that is slow, full, forbidden or cut off."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import boto3
import pytest
import torch

from tests.helpers.s3 import Fault, FaultyS3, faulty, sign_in
from trainer.checkpoint import object_store
from trainer.checkpoint.listing import listing
from trainer.checkpoint.object_store import ObjectStore
from trainer.checkpoint.part import Part
from trainer.checkpoint.reading import CheckpointConfig, load_weights
from trainer.checkpoint.store import Draft
from trainer.errors import PassingError, TrainerError, exit_code
from trainer.exits import FAILED, REFUSED
from trainer.ranks.world import World
from trainer.store import lease, mirror, objects
from trainer.store.address import local_folder
from trainer.store.lease import Lease, take
from trainer.store.mirror import Mirror
from trainer.store.objects import Objects, WrongFileError, require_address

ADDRESS = "s3://bucket/runs/first"
CODES = {"full": FAILED, "forbidden": REFUSED, "error": FAILED, "cut": FAILED}


@pytest.fixture(scope="module")
def running() -> Iterator[FaultyS3]:
    with faulty() as found, pytest.MonkeyPatch.context() as patch:
        sign_in(found.address, patch)
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        yield found


@pytest.fixture(scope="module")
def client(running: FaultyS3) -> Objects:
    """The address for all tests: its client takes half a second to create."""
    return Objects(ADDRESS)


@pytest.fixture
def server(running: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A server with an empty bucket; nothing is tried often."""
    monkeypatch.setattr(objects, "WAITS", (0,))
    monkeypatch.setattr(objects, "STALL", 20.0)
    monkeypatch.setattr(objects, "SLOWEST", 1e9)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(object_store, "POLL_SECONDS", 0.05)
    running.empty("bucket")
    return running


@pytest.fixture
def impatient(there: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an answer take no longer than a second."""
    there.names()  # a client's first request takes longer
    monkeypatch.setattr(objects, "STALL", 1.0)


@pytest.fixture
def there(server: FaultyS3, client: Objects) -> Objects:
    return client


# ---- addresses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["https://host/run", "file:///run", "s3://bucket", "s3://b/../c", "s3://b/a?v=1"])
def test_what_is_no_place_for_a_run_is_refused(address: str) -> None:
    with pytest.raises(TrainerError, match=r"name a folder such as s3://bucket/runs/first, gs://… or az://…$"):
        require_address(address)


@pytest.mark.parametrize("address", ["https://host/run?sig=SECRET", "s3://b/a?sig=SECRET", "s3://key:SECRET@b/a/b"])
def test_a_secret_in_an_address_is_not_printed(address: str) -> None:
    with pytest.raises(TrainerError, match="name a folder such as") as error:
        require_address(address)
    assert "SECRET" not in str(error.value)


def test_a_run_works_in_a_folder_that_is_named_like_its_address() -> None:
    assert local_folder(f"{ADDRESS}/", "/cache") == Path("/cache/runs/s3/bucket/runs/first")


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", ["error", "busy", "cut", "hang", "slow 0.2"])
def test_what_passes_is_tried_again(what: str, server: FaultyS3, there: Objects, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    server.faults = [Fault("PUT", "file", what, 1), Fault("GET", "file", what, 1)]
    there.put(tmp_path / "file", "file")
    there.get("file", tmp_path / "back", 7, sha256(b"content").hexdigest(), 7)
    assert (tmp_path / "back").read_bytes() == b"content" and [fault.met for fault in server.faults] == [1, 1]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("what", "code"), CODES.items())
def test_what_does_not_pass_is_one_line_and_leaves_no_file(
    what: str, code: int, server: FaultyS3, there: Objects, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    server.faults = [Fault("PUT", "file", what)]
    with pytest.raises(TrainerError, match=rf"^{ADDRESS}/a/file: .*the space there and the network$") as error:
        there.put(tmp_path / "file", "a/file")
    assert exit_code(error.value) == code and "\n" not in str(error.value)
    server.faults = []
    assert there.list() == {} == there.names()


@pytest.mark.usefixtures("impatient")
def test_a_large_file_that_is_cut_off_leaves_nothing_that_stays(
    server: FaultyS3, there: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "CHUNK", 5 << 20)
    (tmp_path / "file").write_bytes(bytes(11 << 20))
    server.faults = [Fault("PUT", "partNumber=2", "hang")]
    with pytest.raises(PassingError, match="no complete answer in"):
        there.put(tmp_path / "file", "step-1/part")
    assert there.list() == {}
    client = boto3.client("s3")
    client.create_multipart_upload(Bucket="bucket", Key="runs/other/file")
    there.clear_uploads(lambda key: key == "step-1/part")
    assert len(client.list_multipart_uploads(Bucket="bucket")["Uploads"]) > 1
    there.clear_uploads(lambda key: False)
    assert [each["Key"] for each in client.list_multipart_uploads(Bucket="bucket")["Uploads"]] == ["runs/other/file"]
    server.faults = []
    there.put(tmp_path / "file", "step-1/part")
    assert there.list() == {"step-1/part": 11 << 20}


def test_a_file_that_is_not_the_one_is_not_taken(there: Objects, tmp_path: Path) -> None:
    there.write("file", b"content")
    target = tmp_path / "back"
    for arguments in ((7, sha256(b"other").hexdigest()), (7, None, 6), (6,)):
        with pytest.raises(TrainerError, match=f"{ADDRESS}/file"):
            there.get("file", target, *arguments)
    for key, limit in (("absent", 100), ("file", 6)):
        with pytest.raises(WrongFileError, match=f"{ADDRESS}/{key}"):
            there.read(key, limit)
    assert not list(tmp_path.iterdir())


def test_keys_that_no_folder_can_have_are_skipped_and_odd_ones_are_kept(there: Objects, tmp_path: Path) -> None:
    client = boto3.client("s3")
    for key in ("", "tokenizer/", "tokenizer/../../outside", "tokenizer//x", "a b+c%20[x]é#1"):
        client.put_object(Bucket="bucket", Key=f"runs/first/{key}", Body=b"content")
    assert there.list() == {"a b+c%20[x]é#1": 7} and there.names() == {"tokenizer": None, "a b+c%20[x]é#1": 7}
    Mirror(there, tmp_path / "own", lambda name: True, int, print).pull()
    assert [path.name for path in tmp_path.rglob("*")] == ["own", "a b+c%20[x]é#1"]


def test_a_file_is_created_only_once(there: Objects) -> None:
    assert there.create("file", b"first") and not there.create("file", b"second") and there.create("file", b"first")
    assert there.read("file") == b"first"


# ---- the lease -------------------------------------------------------------------------------------------------


def test_one_of_many_takes_the_lease_and_its_release_lets_the_next_one_in(server: FaultyS3) -> None:
    def attempt(there: Objects) -> Lease | None:
        try:
            return take(there, 0, lambda text: None)
        except TrainerError as error:
            assert "is being written by process" in str(error)
            return None

    runs = [Objects(ADDRESS) for _ in range(3)]
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            [held] = filter(None, pool.map(attempt, runs))
        held.release()
    assert runs[0].names().keys() == {held.name}


def test_a_lease_that_is_renewed_is_kept_and_a_dead_one_is_taken(
    there: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.6)
    reported: list[str] = []
    first, seen, lost = take(there, 0, reported.append), threading.Event(), list[str]()
    first.keep(lambda names: seen.set(), lost.append, reported.append)
    with pytest.raises(TrainerError, match=f"{ADDRESS} is being written by process .*: wait until it ends"):
        take(there, 1.2, reported.append)
    assert seen.is_set() and len(reported) == 1 and "waiting up to 1 s for it to end" in reported[0]
    first._ended.set()  # its thread ends, as if it was killed
    began = time.monotonic()
    second = take(there, 5, reported.append)
    assert time.monotonic() - began >= 0.6 and second.number == first.number + 1
    with pytest.raises(TrainerError, match="no longer writes to"):
        first.renew()
    first._ended.clear()
    with pytest.raises(TrainerError, match="has been taken by another run"):
        first.renew()  # it was only slow
    second.renew()


def test_a_run_that_loses_its_lease_is_told_once_and_takes_nothing_back(
    there: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    first, lost = take(there, 0, print), list[str]()
    late = Lease(there, first.number + 1)
    there.write(late.name, json.dumps(late._content).encode())
    first.keep(lambda names: None, lost.append, print)
    assert first._thread is not None
    first._thread.join(5)
    first.release()
    assert len(lost) == 1 and there.names().keys() == {first.name, late.name}
    assert json.loads(there.read(first.name))["free"] is False
    assert lease._create(there, first.number) is None
    there.delete(first.name)
    assert lease._create(there, first.number) is None and there.names().keys() == {late.name}  # it looked long ago


# ---- the mirror ------------------------------------------------------------------------------------------------


def test_a_mirror_follows_its_folder_and_gives_it_back(
    server: FaultyS3, there: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    (tmp_path / "own/kept").mkdir(parents=True)
    ready = [True] * 5

    def require_ready() -> None:
        if not ready.pop():
            raise TrainerError("taken")

    own = Mirror(there, tmp_path / "own", lambda name: name.startswith("kept"), require_ready, reported.append)
    for name in ("kept/a", "kept/b", "other", "kept/c.tmp"):
        (tmp_path / "own" / name).write_text(name)
    own.push()
    (tmp_path / "own/kept/a").unlink()
    with (tmp_path / "own/kept/b").open("a") as file:
        file.write(" and more")
    monkeypatch.setattr(mirror, "RATE", 0.1)
    own._due["kept/b"] = time.monotonic() + 60
    own.push(everything=False)
    assert there.list() == {"kept/b": 6}  # it is not its turn yet
    server.faults = [Fault("PUT", "kept", "full")]
    own.try_push()
    own.try_push()
    assert len(reported) == 1 and f"{ADDRESS} lacks the newest metrics until" in reported[0]
    server.faults, ready[:] = [], [True, False]
    own.try_push()
    assert there.list() == {"kept/b": 6}  # another run has the address
    own.try_push()
    (tmp_path / "back").mkdir()
    back = Mirror(there, tmp_path / "back", lambda name: name.startswith("kept"), int, print)
    back.pull()
    assert (tmp_path / "back/kept/b").read_text() == "kept/b and more" and there.list() == {"kept/b": 15}
    (tmp_path / "back/kept/b").unlink()
    back.push()
    assert there.list() == {}


def test_files_that_others_remove_from_the_folder_meanwhile_stop_no_mirror(
    there: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = mirror._version
    for name in ("kept", "kept too"):
        (tmp_path / name).write_text(name)

    def vanish(path: Path) -> tuple[int, int]:
        if path.name == "kept":
            path.unlink()
        return version(path)

    monkeypatch.setattr(mirror, "_version", vanish)
    own = Mirror(there, tmp_path, lambda name: True, int, print)
    own.push()
    assert there.list() == {"kept too": 8}
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        own.push()
    assert there.list() == {"kept too": 8}


# ---- checkpoints -----------------------------------------------------------------------------------------------


def part_of(rank: int, step: int) -> Part:
    tensors = {f"{kind}/a": torch.full((50,), float(step)) for kind in ("weight", "exp_avg")}
    return Part(tensors, {"a": 50 * rank}, {"a": torch.Size([100])}, rank, 2)


def begin(store: ObjectStore, step: int) -> Draft:
    name = f"step-{step:08d}"
    return Draft(name, store.begin(name))


def save(store: ObjectStore, step: int, keep: int = 3) -> dict[str, str]:
    draft = begin(store, step)
    for rank in (1, 0):
        store.deposit(draft, part_of(rank, step))
    parts = store.collect(draft, 2, threading.Event())
    store.publish(draft, listing({"a": torch.Size([100])}, parts, {"step": step}))
    return store.prune(CheckpointConfig(keep=keep), step)


def kept(there: Objects) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in there.list():
        name, _, file = key.partition("/")
        found.setdefault(name, []).append(file)
    return found


@pytest.fixture
def store(there: Objects, tmp_path: Path) -> ObjectStore:
    return ObjectStore(there, tmp_path / "node")


def newest(store: ObjectStore, damaged: dict[str, str] | None = None) -> tuple[str, list[str]]:
    found, passed = store.newest(damaged or {}, lambda checkpoint: None)
    return "" if found is None else found.folder.name, passed


WORLD = World(0, 1, 0, 1, torch.device("cpu"))
FILES = ["checkpoint.json", "part-00000-of-00002.safetensors", "part-00001-of-00002.safetensors"]


def test_checkpoints_at_an_address_are_whole_kept_and_found_on_an_empty_disk(
    store: ObjectStore, there: Objects, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        assert save(store, step, keep=2) == {}
    assert kept(there) == {"step-00000020": FILES, "step-00000030": FILES, "latest": [""]}
    assert not list((tmp_path / "node").iterdir())
    other = ObjectStore(there, tmp_path / "other")
    assert newest(other) == ("step-00000030", []) and other.disprove("step-00000030", WORLD) == ""
    assert load_weights(other.found("step-00000030"))["a"].tolist() == [30.0] * 100
    other.amend(other.found("step-00000030"), step=31)
    assert other.newest({}, lambda found: None)[0].record == {"step": 31}  # type: ignore[union-attr]
    assert other.remove(range(21, 40)) == [] and newest(other) == ("step-00000020", [])


def test_a_kill_at_any_point_of_a_save_leaves_no_checkpoint_and_the_next_save_clears_up(
    store: ObjectStore, there: Objects, tmp_path: Path
) -> None:
    save(store, 10)
    draft = begin(store, 20)
    store.deposit(draft, part_of(0, 20))
    assert newest(store) == ("step-00000010", [])
    store.deposit(draft, part_of(1, 20))
    parts = store.collect(draft, 2, threading.Event())
    assert newest(store) == ("step-00000010", []) and len(parts) == 2
    (tmp_path / "node/.step-00000020.dead.tmp").mkdir(parents=True)
    again = begin(store, 20)  # the notes of the dead save do not count
    store.deposit(again, part_of(0, 20))
    abandoned = threading.Event()
    threading.Timer(0.3, abandoned.set).start()
    assert store.collect(again, 2, abandoned) == []
    save(store, 30)
    assert kept(there).keys() == {"step-00000010", "step-00000030", "latest"}
    assert not list((tmp_path / "node").iterdir())


def test_a_part_that_is_gone_or_cut_stops_a_publication(store: ObjectStore, there: Objects) -> None:
    draft = begin(store, 10)
    for rank in (0, 1):
        store.deposit(draft, part_of(rank, 10))
    parts = store.collect(draft, 2, threading.Event())
    there.write(f"{draft.name}/{FILES[2]}", b"cut")
    with pytest.raises(PassingError, match=rf"{FILES[2]} has 3 bytes instead of"):
        store.publish(draft, listing({"a": torch.Size([100])}, parts, {}))
    assert newest(store) == ("", [])


def test_what_a_killed_download_and_an_earlier_save_left_in_a_copy_does_no_harm(
    store: ObjectStore, tmp_path: Path
) -> None:
    save(store, 10)
    copy = tmp_path / "node/step-00000010"
    copy.mkdir()
    (copy / "part-00000-of-00001.safetensors").write_bytes(b"of a save by one rank")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", lambda path, target: None)  # as if killed before
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        store.objects.get(f"step-00000010/{FILES[1]}", copy / FILES[1], 1 << 20)
    assert len(list(copy.iterdir())) == 2
    assert store.disprove("step-00000010", WORLD) == ""
    assert list(store.found("step-00000010").parts) == FILES[1:]


def test_a_run_that_has_lost_its_lease_changes_nothing(there: Objects, tmp_path: Path) -> None:
    own = take(there, 0, print)
    slow = ObjectStore(there, tmp_path / "slow", own)
    save(slow, 10)
    draft = begin(slow, 20)
    for rank in (0, 1):
        slow.deposit(draft, part_of(rank, 20))
    parts = slow.collect(draft, 2, threading.Event())
    other = Lease(there, own.number + 1)
    there.write(other.name, json.dumps(other._content).encode())
    there.write("step-00000030/part-of-another-run", b"on its way")
    before = there.list()
    late = partial(slow.deposit, begin(slow, 10), part_of(0, 11))
    with pytest.raises(TrainerError, match="has been taken by another run"):
        late()  # it does not know yet, and this would remove what the other run is saving
    publish = partial(slow.publish, draft, listing({"a": torch.Size([100])}, parts, {}))
    for action in (late, partial(begin, slow, 40), publish, partial(slow.remove, range(40))):
        with pytest.raises(TrainerError, match="has been taken by another run"):
            action()
    with pytest.raises(TrainerError, match="has been taken by another run"):
        slow.amend(slow.newest({}, lambda found: None)[0], step=0)  # type: ignore[arg-type]
    assert there.list() == before


def test_damage_at_the_address_is_seen_and_a_dead_server_is_not_taken_for_it(
    store: ObjectStore, there: Objects, server: FaultyS3
) -> None:
    save(store, 10)
    save(store, 20)
    key = f"step-00000020/{FILES[1]}"
    content = bytearray(there.read(key))
    content[-1] ^= 1
    there.write(key, bytes(content))
    assert newest(store) == ("step-00000020", [])  # its sizes are right
    failure = store.disprove("step-00000020", WORLD)
    assert failure == f"checkpoint {ADDRESS}/step-00000020 is damaged: the sha256 of {ADDRESS}/{key} differs"
    assert newest(store, {"step-00000020": failure}) == ("step-00000010", [failure])
    there.write(key, b"")
    name, [reason] = newest(store)
    assert name == "step-00000010" and f"{ADDRESS}/step-00000020 is damaged: {FILES[1]} has 0 bytes" in reason
    server.faults = [Fault("GET", "step-00000010", "error")]
    with pytest.raises(PassingError):
        store.disprove("step-00000010", WORLD)
    with pytest.raises(PassingError):
        newest(store, {"step-00000020": failure})
    server.faults = []
    save(store, 20)  # again: the damaged one gives way
    assert newest(store) == ("step-00000020", []) and store.disprove("step-00000020", WORLD) == ""


def test_rights_that_are_missing_for_clearing_up_are_reported_and_cost_no_checkpoint(
    store: ObjectStore, there: Objects, server: FaultyS3
) -> None:
    save(store, 10)
    server.faults = [Fault("DELETE", "step-00000010/part", "forbidden"), Fault("GET", "uploads", "forbidden")]
    left = save(store, 20, keep=1)
    assert left.keys() == {"uploads", "step-00000010"} and all("PermissionError" in each for each in left.values())
    assert "step-00000010/checkpoint.json" not in there.list()  # it is the first to go
    assert newest(store) == ("step-00000020", [])
