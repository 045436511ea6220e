"""Number ranges, and input at addresses: the same data set as from the folder, on any network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import braceexpand
import pytest

from data_prep import inputs
from data_prep.__main__ import main
from data_prep.addresses import read_address
from data_prep.errors import DataError, shortage
from data_prep.inputs import expand, find_inputs
from tests.helpers.corpora import contents, write_tokenizer
from tests.helpers.file_server import Server
from tests.helpers.s3 import serving, sign_in
from tests.test_data_prep_tars import write_tar

NAMES = ("part-08.tar", "part-09.tar", "part-10.tar")
BUCKET = "corpora"
PATTERN = "part-{08..10}.tar"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number, name in enumerate(NAMES):
        texts = [(f"{i}.txt", b"a b c.\nd e f." + b" g" * (i + number)) for i in range(9)]
        write_tar(tmp_path / "in" / name, texts)
    return tmp_path / "in"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(inputs, "WAITS", (0.01, 0.01, 0.01, 0.01))
    running = Server(folder)
    yield running
    running.stop()


def refusal(*given: str, downloads: Path | None = None) -> str:
    with pytest.raises(DataError) as error:
        find_inputs(given, downloads)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- ranges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["a-{000..127}.tar", "{0..10}", "{8..010}", "a/{1..2}/b-{9..11}.tar", "{5..5}", "plain.tar", "{a}"]
)
def test_a_range_names_the_files_that_the_stock_library_expands(pattern: str) -> None:
    assert expand(pattern) == list(braceexpand.braceexpand(pattern))


def test_ranges_give_files_in_order(folder: Path) -> None:
    (folder / "x{1..2}.txt").touch()
    assert find_inputs([f"{folder}/{PATTERN}"], None) == [folder / name for name in NAMES]
    assert find_inputs([f"{folder}/x{{1..2}}.txt"], None) == [folder / "x{1..2}.txt"]  # a file may have such a name


def test_ranges_that_name_too_little_or_too_much_take_one_line(folder: Path) -> None:
    place = f"{folder}/part-{{07..12}}.tar"
    first, last = f"{folder}/part-07.tar", f"{folder}/part-12.tar"
    assert refusal(place) == (
        f"input {place}: 3 of 6 files do not exist ({first}, {folder}/part-11.tar, {last}): check --input"
    )
    assert "100 of 100 files do not exist (a-00.txt, a-01.txt, a-02.txt, …)" in refusal("a-{00..99}.txt")
    assert refusal("a.txt") == "input a.txt does not exist: check --input"
    assert "the range counts down; write {1..3}" in refusal("a-{3..1}.txt")
    assert "names more than 1,000,000 files" in refusal("a-{0..999}-{0..999}-{0..1}.txt")


# ---- addresses -----------------------------------------------------------------------------------------------


@pytest.fixture
def s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving() as address:
        sign_in(address, monkeypatch)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for name in NAMES:
            client.upload_file(str(folder / name), BUCKET, f"set/{name}")
        yield f"s3://{BUCKET}/set"


def test_addresses_give_the_data_set_of_the_folder(folder: Path, server: Server, s3: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", [*"abcdefg", "."])
    for name, place in (("local", str(folder)), ("http", server.address), ("s3", s3)):
        command = ["build", "--input", f"{place}/{PATTERN}", "--tokenizer", str(tokenizer), "--processes", "1"]
        command += ["--out", str(tmp_path / name), "--sequence-length", "32", "--downloads", str(tmp_path / "copies")]
        assert main(command) == main(command) == 0
    assert contents(tmp_path / "local") == contents(tmp_path / "http") == contents(tmp_path / "s3")
    assert sorted(server.gets) == sorted(NAMES)  # each once
    boto3.client("s3").put_object(Bucket=BUCKET, Key="set/folder.tar/a.txt", Body=b"a")
    assert f"input {s3}/folder.tar is a folder: name its files" in refusal(f"{s3}/folder.tar", downloads=tmp_path)
    assert f"({s3}/part-07.tar): check --input" in refusal(f"{s3}/part-{{07..08}}.tar", downloads=tmp_path)


def test_a_bad_network_is_tried_again(
    server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First while the server is asked for sizes, then while it sends the files."""

    def plant(*_: object) -> None:
        assert not any(server.faults.values())
        server.faults = {NAMES[0]: ["busy"] * 4, NAMES[1]: ["cut"] * 4, NAMES[2]: ["less"] * 4}

    server.faults = {name: ["busy"] * 4 for name in NAMES}
    monkeypatch.setattr(inputs, "_make_room", plant)
    (tmp_path / "copies").mkdir()
    found = find_inputs([f"{server.address}/{PATTERN}"], tmp_path / "copies")
    assert [path.read_bytes() for path in found] == [(folder / name).read_bytes() for name in NAMES]
    assert [path.name for path in found] == list(NAMES)
    assert len([path for path in (tmp_path / "copies").rglob("*") if path.is_file()]) == 3
    assert not any(server.faults.values())


def test_a_file_that_changed_is_downloaded_again(server: Server, folder: Path, tmp_path: Path) -> None:
    [first] = find_inputs([f"{server.address}/{NAMES[0]}"], tmp_path)
    os.utime(folder / NAMES[0], (1, 1))
    [second] = find_inputs([f"{server.address}/{NAMES[0]}"], tmp_path)
    assert first != second and first.read_bytes() == second.read_bytes()


def test_a_redirect_is_followed_to_the_servers_that_are_named(server: Server, folder: Path, tmp_path: Path) -> None:
    other = Server(folder)
    server.faults = {NAMES[0]: ["redirect"] * 9}
    server.elsewhere = f"{other.address}/{NAMES[1]}"
    [found] = find_inputs([f"{server.address}/{NAMES[0]}"], tmp_path, [other.address])
    other.stop()
    assert found.read_bytes() == (folder / NAMES[1]).read_bytes()


def test_a_leftover_of_a_killed_download_is_removed(server: Server, tmp_path: Path) -> None:
    [found] = find_inputs([f"{server.address}/{NAMES[0]}"], tmp_path)
    old, new = found.with_name("a.0.tmp"), found.with_name("a.1.tmp")
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    find_inputs([f"{server.address}/{NAMES[0]}"], tmp_path)
    assert new.exists() and not old.exists()


def test_what_cannot_be_fetched_takes_one_line(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"{server.address}/{PATTERN}"
    assert refusal(address) == (
        f"--input {server.address}/{NAMES[0]}: name a folder for its copy, too: --downloads DIR"
    )
    assert refusal(f"{server.address}/part-{{07..09}}.tar", downloads=tmp_path) == (
        f"input: 1 of 3 files do not exist ({server.address}/part-07.tar): check --input"
    )
    with pytest.raises(DataError, match="--redirects cdn.example.com: wanted an origin, such as https://cdn"):
        find_inputs([address], tmp_path, ["cdn.example.com"])
    assert f"input {server.address}/a.zip is not a text file" in refusal(f"{server.address}/a.zip", downloads=tmp_path)
    server.faults = {NAMES[1]: ["forbidden"] * 3}
    assert f"input {server.address}/{NAMES[1]}: ClientResponseError: 403" in refusal(address, downloads=tmp_path)
    server.faults = {NAMES[1]: ["busy"] * 99}
    assert f"input {server.address}/{NAMES[1]}: failed 5 times, last with " in refusal(address, downloads=tmp_path)
    server.faults = {NAMES[1]: ["redirect"] * 99}
    server.elsewhere = "http://127.0.0.1:9/"
    assert "the server redirects to http://127.0.0.1:9; name that address" in refusal(address, downloads=tmp_path)
    server.faults = {}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("", (), {"free": 5}))
    assert "bytes to download, 5 free; make room or name another" in refusal(address, downloads=tmp_path)
    assert not [path for path in tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize("place", ["a.txt", "a.txt/copies", "link/copies"])
def test_copies_need_a_folder_before_anything_is_asked(server: Server, tmp_path: Path, place: str) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "link").symlink_to("nowhere")
    server.stop()  # asking would fail in another way
    what, first = f"--downloads {tmp_path / place}: {tmp_path}", place.partition("/")[0]
    said = refusal(f"{server.address}/{NAMES[0]}", downloads=tmp_path / place)
    assert said == f"{what}/{first} is not a folder; name another"


def test_a_server_that_is_down_ends_the_command(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.stop()
    address = f"{server.address}/{NAMES[0]}"
    command = [
        "vocab",
        "--input",
        address,
        "--out",
        str(tmp_path / "out"),
        "--size",
        "99",
        "--downloads",
        str(tmp_path),
    ]
    assert main(command) == 1  # 2 would keep Kubernetes from another attempt
    [line] = capsys.readouterr().err.splitlines()
    assert f"input {address}: failed 5 times, last with ClientConnectorError" in line and "run again to resume" in line


def test_an_error_in_its_own_chain_of_causes_is_no_shortage() -> None:
    first, second = OSError("a"), OSError("b")
    first.__cause__, second.__cause__ = second, first
    assert shortage(first) == ""


# ---- queries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts", "lasting"),
    [
        ("https://h/d/a.txt", ("https://h/d", "a.txt", ""), "https://h/d/a.txt"),
        ("https://h/d/a.txt?", ("https://h/d", "a.txt", "?"), "https://h/d/a.txt"),
        ("https://h/a.txt?x=a/b.tar", ("https://h", "a.txt", "?x=a/b.tar"), "https://h/a.txt?x=a/b.tar"),
        ("https://h/a.txt?b=1&X-Amz-Date=2&c", ("https://h", "a.txt", "?b=1&X-Amz-Date=2&c"), "https://h/a.txt?b=1&c"),
        ("https://h/a.txt?sv=1&sig=2&size=3", ("https://h", "a.txt", "?sv=1&sig=2&size=3"), "https://h/a.txt?size=3"),
        ("s3://b/a?.txt", ("s3://b", "a?.txt", ""), "s3://b/a?.txt"),
        ("s3://b/a.txt?versionId=v", ("s3://b", "a.txt", "?versionId=v"), "s3://b/a.txt?versionId=v"),
        ("gs://b/why?.txt", ("gs://b", "why?.txt", ""), "gs://b/why?.txt"),
    ],
)
def test_an_address_has_parts(text: str, parts: tuple[str, str, str], lasting: str) -> None:
    address = read_address(text)
    assert ((address.folder, address.name, address.query), address.lasting) == (parts, lasting)
    assert address.shown == text.partition("?")[0] + ("?…" if "?" in text else "")


def test_a_space_does_not_end_a_secret() -> None:
    assert read_address("https://h/a b.txt?sig=c d").shown == "https://h/a b.txt?…"


def test_a_file_is_fetched_once_however_often_its_address_is_signed(
    s3: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, key = boto3.client("s3"), {"Bucket": BUCKET, "Key": f"set/{NAMES[0]}"}
    signed = [client.generate_presigned_url("get_object", key, seconds) for seconds in (600, 700)]
    assert signed[0] != signed[1] and "Signature=" in signed[0]
    found = {find_inputs([address], tmp_path / "copies")[0] for address in signed}
    [copy] = (path for path in (tmp_path / "copies").rglob("*") if path.is_file())
    assert found == {copy} and copy.name == NAMES[0] and copy.read_bytes() == (folder / NAMES[0]).read_bytes()


def test_a_version_of_an_object_is_not_the_newest(s3: str, tmp_path: Path) -> None:
    client = boto3.client("s3")
    client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    old, _ = (client.put_object(Bucket=BUCKET, Key="a.txt", Body=text)["VersionId"] for text in (b"old", b"new"))
    place = f"s3://{BUCKET}/a.txt"
    paths = find_inputs([f"{place}?versionId={old}", place], tmp_path)
    assert [path.read_bytes() for path in paths] == [b"old", b"new"]
    assert refusal(f"{place}?X-Amz-Signature=s", downloads=tmp_path) == (
        f"input {place}?…: only https:// addresses have a query; an s3:// one may end in ?versionId=…"
    )


SECRET = "sig=c2VjcmV0%2F%20/%2B.txt"


def test_a_query_is_sent_as_written_and_kept_nowhere(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", [*"abcdefg", "."])
    address = f"{server.address}/{NAMES[0]}?{SECRET}"
    command = ["build", "--input", address, "--tokenizer", str(tokenizer), "--processes", "1"]
    command += ["--out", str(tmp_path / "out"), "--sequence-length", "32", "--downloads", str(tmp_path / "copies")]
    assert main(command) == 0
    assert set(server.queries) == {SECRET}
    assert "sig=" not in "".join(capfd.readouterr())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"c2VjcmV0" in path.read_bytes()]


@pytest.mark.parametrize(
    ("name", "faults", "said"),
    [
        (NAMES[0], ["forbidden"] * 3, "ClientResponseError: 403"),
        (NAMES[0], ["busy"] * 99, "failed 5 times, last with"),
        (NAMES[0], ["redirect"] * 99, "the server redirects to"),
        (NAMES[0], ["endless"] * 99, "does not say its size"),
        ("part-07.tar", [], "does not exist"),
        ("a.zip", [], "is not a text file"),
        ("", [], "names no file"),
        ("a b.txt", [], "it contains a space; with a query, write %20 instead"),
        ("part-{3..1}.tar", [], "the range counts down"),
    ],
)
def test_a_query_is_never_printed(server: Server, tmp_path: Path, name: str, faults: list[str], said: str) -> None:
    server.faults, server.elsewhere = {name: faults}, "http://127.0.0.1:9/?sig=c2VjcmV0"
    found = refusal(f"{server.address}/{name}?{SECRET}", downloads=tmp_path)
    assert said in found and f"{server.address}/{name}?…" in found
    assert "sig=" not in found and "c2VjcmV0" not in found
