"""`publish` to a real S3 server (moto's) and to folders, through interruption, damage and bad networks."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import numpy as np
import pytest
import webdataset
from fsspec.implementations.local import LocalFileSystem

from data_prep import publish as module
from data_prep.errors import CopyError, DataError
from data_prep.manifest import MANIFEST, load_manifest
from data_prep.publish import publish
from data_prep.retries import LONGEST_REASON, shown
from data_prep.verify import verify, verify_published
from tests.helpers.corpora import contents, read_samples
from tests.helpers.s3 import serving, sign_in

BUCKET = "bucket"
READ = "import sys, urllib.request as web; sys.stdout.buffer.write(web.urlopen(sys.argv[1]).read())"
FETCH = f"{sys.executable} -c '{READ}'"


class Flaky(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A disk behind a bad network: the next uploads go wrong in the ways of ``faults``."""

    protocol = "flaky"
    faults: list[str] = []

    def put_file(self, source: str, target: str, **options: Any) -> None:
        super().put_file(source, target, **options)
        match self.faults.pop() if self.faults else "none":
            case "cut":
                with open(target, "r+b") as file:
                    file.truncate(100)
                raise ConnectionResetError("the line is dead")
            case "flip":
                flip(Path(target))
            case "forbid":
                Path(target).unlink()
                raise PermissionError("not yours")
            case "full":
                raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server."""
    with serving() as address:
        yield address


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of the server, with an empty bucket there; users name their MinIO in the same way."""
    sign_in(server, monkeypatch)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    if left := client.list_objects_v2(Bucket=BUCKET).get("Contents"):
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": item["Key"]} for item in left]})
    client.delete_bucket(Bucket=BUCKET)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    """A flaky disk without faults yet; retries do not wait."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(Flaky, "faults", [])
    monkeypatch.setattr(module, "WAITS", (0, 0))
    return Flaky


def objects(client: Any) -> dict[str, bytes]:
    listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {item["Key"]: client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read() for item in listed}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_all_of_it_gets_there_once(five_shards: Path, s3: Any, capfd: pytest.CaptureFixture[str]) -> None:
    done = publish(five_shards, f"s3://{BUCKET}/sets/first/", 3)
    expected = contents(five_shards)
    assert objects(s3) == {f"sets/first/{name}": content for name, content in expected.items()}
    assert (done.files, done.bytes) == (done.sent, done.sent_bytes)
    assert (done.files, done.bytes) == (len(expected), sum(map(len, expected.values())))
    assert "published" in capfd.readouterr().err
    again = publish(five_shards, f"s3://{BUCKET}/sets/first", 2)
    assert (again.files, again.sent, again.sent_bytes) == (done.files, 0, 0)
    assert_stock_webdataset_reads_it(five_shards, s3, "sets/first")
    assert verify_published(f"s3://{BUCKET}/sets/first", stock=True) == ([], load_manifest(five_shards).counts.samples)


def assert_stock_webdataset_reads_it(whole: Path, s3: Any, folder: str) -> None:
    urls = []
    for shard in load_manifest(whole).shards:
        where = {"Bucket": BUCKET, "Key": f"{folder}/{shard.name}.tar"}
        urls.append(f"pipe:{FETCH} '{s3.generate_presigned_url('get_object', where)}'")
    found = [sample["npy"] for sample in webdataset.WebDataset(urls, shardshuffle=False).decode()]
    samples = list(read_samples(whole))
    assert len(found) == len(samples) > 30
    for numbers, sample in zip(found, samples, strict=True):
        assert np.array_equal(numbers[4 : 4 + len(sample.ids)], sample.ids)


def test_an_interrupted_upload_is_no_data_set_and_goes_on(own_five: Path, five_shards: Path, s3: Any) -> None:
    flip(own_five / "shard-00003.tar")
    with pytest.raises(DataError, match=r"shard-00003\.tar: not the file in the manifest"):
        publish(own_five, f"s3://{BUCKET}/set", 1)
    before = objects(s3)
    assert {"set/shard-00000.tar", "set/shard-00002.idx.npy"} <= set(before)
    assert f"set/{MANIFEST}" not in before and "set/shard-00003.tar" not in before
    done = publish(five_shards, f"s3://{BUCKET}/set", 2)
    assert done.sent == done.files - len(before) > 0
    assert len(objects(s3)) == done.files


def test_damaged_objects_are_found_and_sent_again(five_shards: Path, s3: Any) -> None:
    good = {f"set/{name}": content for name, content in contents(five_shards).items()}
    for key, content in good.items():
        s3.put_object(Bucket=BUCKET, Key=key, Body=content)
    tars = [good[f"set/shard-0000{number}.tar"] for number in range(3)]
    damaged = {
        "shard-00000.tar": tars[0][:-1] + b"?",
        "shard-00001.tar": tars[1][:-10],
        "shard-00002.tar": tars[2] + b"?",
        "shard-00001.idx.npy": tars[0],
        "token_counts.npy": b"",
        "tokenizer/vocab.txt": good["set/tokenizer/vocab.txt"].replace(b"w", b"v", 1),
    }
    for name, content in damaged.items():
        s3.put_object(Bucket=BUCKET, Key=f"set/{name}", Body=content)
    s3.delete_object(Bucket=BUCKET, Key="set/shard-00003.tar")
    done = publish(five_shards, f"s3://{BUCKET}/set", 2)
    assert objects(s3) == good and done.sent == len(damaged) + 1
    assert done.sent_bytes == sum(len(good[f"set/{name}"]) for name in [*damaged, "shard-00003.tar"])


def test_what_others_put_there_is_refused(five_shards: Path, own_five: Path, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="below/other/shard-00000.tar", Body=b"a data set in a folder further down")
    s3.put_object(Bucket=BUCKET, Key="below/README", Body=b"no shard")
    publish(five_shards, f"s3://{BUCKET}/below", 2)
    s3.put_object(Bucket=BUCKET, Key="below/shard-00099.tar", Body=b"?")
    with pytest.raises(DataError, match=r"holds shard-00099\.tar, not named by"):
        publish(five_shards, f"s3://{BUCKET}/below", 2)
    (own_five / MANIFEST).write_bytes((own_five / MANIFEST).read_bytes() + b"\n")
    before = objects(s3)
    with pytest.raises(DataError, match="holds another data set"):
        publish(own_five, f"s3://{BUCKET}/below", 2)
    assert objects(s3) == before


def test_a_folder_is_a_place_too(five_shards: Path, tmp_path: Path) -> None:
    done = publish(five_shards, f"file://{tmp_path}/deep/down", 2)
    assert contents(tmp_path / "deep/down") == contents(five_shards)
    assert verify(tmp_path / "deep/down", full=True) == [] and done.sent == done.files
    assert publish(five_shards, f"file://{five_shards}", 2).sent == 0


def test_half_a_file_is_never_seen_under_its_name(five_shards: Path, tmp_path: Path, flaky: type[Flaky]) -> None:
    again = r"shard-00000\.idx\.npy: failed 3 times, last with ConnectionResetError"
    for faults, problem in ((["cut", "cut", "cut", "none"], again), (["forbid"], "PermissionError")):
        flaky.faults[:] = faults  # here, for the thread may send another file before a failure stops it
        with pytest.raises(CopyError if problem == again else DataError, match=problem):
            publish(five_shards, f"flaky://{tmp_path}/there", 1)
        for path, content in contents(tmp_path / "there").items():
            assert path.endswith(".tmp") or content == (five_shards / path).read_bytes()
    publish(five_shards, f"flaky://{tmp_path}/there", 1)
    assert contents(tmp_path / "there") == contents(five_shards)


def test_what_fails_for_a_while_is_sent_again(five_shards: Path, tmp_path: Path, flaky: type[Flaky]) -> None:
    flaky.faults += ["flip", "cut", "none", "flip"]
    done = publish(five_shards, f"flaky://{tmp_path}/there", 1)
    assert contents(tmp_path / "there") == contents(five_shards) and done.sent == done.files and not flaky.faults
    flip(tmp_path / "there/shard-00002.tar")
    flaky.faults += ["flip"] * 3
    with pytest.raises(DataError, match=r"shard-00002\.tar: failed 3 times.*read back"):
        publish(five_shards, f"flaky://{tmp_path}/there", 1)


def test_a_full_place_is_not_tried_again(five_shards: Path, tmp_path: Path, flaky: type[Flaky]) -> None:
    flaky.faults += ["full"]  # another attempt would do
    with pytest.raises(DataError, match="No space left on device; check the URL, credentials, permissions"):
        publish(five_shards, f"flaky://{tmp_path}/there", 1)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("bucket/folder", "wanted one address"),
        ("simplecache::s3://bucket/folder", "wanted one address"),
        ("s3://", "names no folder"),
        ("nowhere://bucket/folder", "not a valid address"),
        ("sftp://host/folder", "pip install paramiko"),
        ("s3://absent/folder", "bucket does not exist"),
    ],
)
def test_a_bad_place_costs_one_line(five_shards: Path, s3: Any, url: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as raised:
        publish(five_shards, url, 1)
    assert "\n" not in str(raised.value) and url in str(raised.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/set", "https://host/set"])
def test_a_web_server_is_no_place_to_send_to(five_shards: Path, url: str) -> None:
    with pytest.raises(DataError, match=f"^{url}: not writable; publish to the disk or object store"):
        publish(five_shards, url, 1)


def test_only_files_of_the_right_size_are_read_back(
    five_shards: Path, tmp_path: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that others put there may have any size."""
    opened = list[str]()
    monkeypatch.setattr(Flaky, "_open", lambda self, path, *rest, **options: opened.append(path))
    (tmp_path / "there").mkdir()
    with (tmp_path / "there" / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="holds another data set"):
        publish(five_shards, f"flaky://{tmp_path}/there", 1)
    assert not opened


def test_what_no_reader_would_take_is_not_published(
    five_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALL_FILE_BYTES", 1000)
    with pytest.raises(
        DataError, match=r"^not published, .*manifest.json has .* bytes: no reader takes more than 1,000"
    ):
        publish(five_shards, f"file://{tmp_path}/there", 1)
    assert not (tmp_path / "there").exists()


def test_what_a_server_says_is_cut_short() -> None:
    said = shown(OSError("bell \x07, colours \x1b[31m\nand " + "x" * 10_000))
    assert said.startswith("OSError: bell ?, colours ?[31m and xxx") and len(said) == LONGEST_REASON + 1


def test_missing_credentials_cost_one_line(
    five_shards: Path, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    with pytest.raises(DataError, match="NoCredentialsError: .*; check the URL, credentials") as raised:
        publish(five_shards, f"s3://{BUCKET}/set", 1)
    assert "\n" not in str(raised.value)


def test_a_damaged_data_set_stays_at_home(own_five: Path, tmp_path: Path) -> None:
    (own_five / "shard-00001.tar").unlink()
    with pytest.raises(DataError, match=r"is damaged: .*shard-00001\.tar missing"):
        publish(own_five, f"file://{tmp_path}/there", 1)
    assert not (tmp_path / "there").exists()
