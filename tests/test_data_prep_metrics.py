"""Metrics of a build: what Prometheus reads over HTTP and from a file, and what may never be."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ranks import ROOT, free_port

from data_prep.errors import DataError
from data_prep.metrics import COUNTERS, STAGES, Figures, check_textfile, serve, write_textfile

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
VERSIONS = {"lambert": "0.1.0", "tokenizers": "0.22.1"}
NAME = re.compile(
    r"lambert_prep_((bytes|characters|documents|sentences|tokens|pairs|samples|shards)(_[a-z]+)*_total|build_info"
    r"|stage_seconds_total|progress_ratio|last_success_timestamp_seconds)"
)


def read(text: str) -> Samples:
    """Every sample of an exposition, by name and labels; each has a help text and a type."""
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation.endswith(".") and family.type != "unknown" for family in families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def scrape(port: int | None) -> Samples:
    """As Prometheus asks."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return read(answer.read().decode())


def work() -> Figures:
    """A build that is in its second stage; each counter has a value of its own."""
    figures = Figures(VERSIONS)
    for value, name in enumerate(COUNTERS, 1):
        setattr(figures, name, value)
    figures.begin("tokenize", 50)
    figures.advance(20)
    figures.begin("select", 40)
    figures.advance(4)
    figures.advance(6)
    return figures


def test_a_scrape_shows_how_far_a_build_is() -> None:
    figures = work()
    with serve(figures, 0, "127.0.0.1") as port:
        found = scrape(port)
        assert found["lambert_prep_build_info", frozenset(VERSIONS.items())] == 1
        for value, name in enumerate(COUNTERS, 1):
            assert found[f"lambert_prep_{name}_total", frozenset()] == value
        progress = {stage: found["lambert_prep_progress_ratio", frozenset({("stage", stage)})] for stage in STAGES}
        assert progress == {"tokenize": 1.0, "select": 0.25, "plan": 0.0, "write": 0.0}
        figures.tokens += 1000
        figures.advance(10)
        more = scrape(port)
    assert more["lambert_prep_tokens_total", frozenset()] == found["lambert_prep_tokens_total", frozenset()] + 1000
    assert more["lambert_prep_progress_ratio", frozenset({("stage", "select")})] == 0.5
    running, ended = (("lambert_prep_stage_seconds_total", frozenset({("stage", s)})) for s in ("select", "tokenize"))
    assert more[running] > found[running] > 0 and more[ended] == found[ended] > 0


def test_every_count_is_a_series_and_every_series_a_count() -> None:
    assert set(COUNTERS) == {field.name for field in fields(Figures) if field.type == "int"}


def test_names_end_in_units_and_series_do_not_multiply() -> None:
    figures = work()
    with serve(figures, 0, "127.0.0.1") as port:
        before = scrape(port)
        for number in range(500):
            figures.begin(STAGES[number % 4], number)
            figures.advance(number)
            figures.shards += 1
        assert set(scrape(port)) == set(before)
        figures.succeed()
        after = scrape(port)
    assert set(after) - set(before) == {("lambert_prep_last_success_timestamp_seconds", frozenset())}
    assert [name for name, _ in after if not NAME.fullmatch(name)] == []


def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool")
    figures = work()
    figures.succeed()
    write_textfile(figures, tmp_path / "build.prom")
    text = (tmp_path / "build.prom").read_bytes()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_progress_and_seconds_stay_in_bounds() -> None:
    figures = Figures()
    figures.advance(5)  # in no stage
    assert [figures.progress(stage) for stage in STAGES] == [0.0] * 4
    figures.begin("write", 0)
    figures.advance(0)
    assert figures.progress("write") == 0.0
    figures.begin("write", 3)
    figures.advance(7)
    assert figures.progress("write") == 1.0
    seconds = [figures.seconds("write")]
    for _ in range(100):
        seconds.append(figures.seconds("write"))
        figures.end()
        seconds.append(figures.seconds("write"))
        figures.begin("write", 1)
        seconds.append(figures.seconds("write"))
    assert seconds == sorted(seconds) and seconds[-1] > 0
    assert figures.seconds("plan") == 0.0


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_one_line(address: str) -> None:
    with socket.socket() as other:
        other.bind((address, 0))
        other.listen()
        port = other.getsockname()[1]
        expected = (
            rf"^--metrics-port {port} on {re.escape(address)} cannot be opened \(Address already in use\): [^\n]+$"
        )
        with pytest.raises(DataError, match=expected), serve(Figures(), port, address):
            pytest.fail("work began")


@pytest.mark.parametrize(("port", "address"), [(70000, "127.0.0.1"), (-1, "127.0.0.1"), (9465, "no.host.invalid")])
def test_a_port_or_address_that_cannot_be_is_one_line(port: int, address: str) -> None:
    with (
        pytest.raises(DataError, match=r"^--metrics-port .* cannot be opened \([^\n]+$"),
        serve(Figures(), port, address),
    ):
        pytest.fail("work began")


def test_one_process_builds_twice_with_one_port() -> None:
    port = free_port()
    for tokens in (1, 2):
        with serve(Figures(tokens=tokens), port, "127.0.0.1") as opened:
            assert opened == port
            assert scrape(port)["lambert_prep_tokens_total", frozenset()] == tokens
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_a_file_holds_the_last_success(tmp_path: Path) -> None:
    path = tmp_path / "build.prom"
    check_textfile(path)
    assert not path.exists()
    figures = work()
    begun = time.time()
    figures.succeed()
    write_textfile(figures, path)
    found = read(path.read_text())
    assert begun <= found["lambert_prep_last_success_timestamp_seconds", frozenset()] <= time.time()
    assert found["lambert_prep_progress_ratio", frozenset({("stage", "select")})] == 1.0
    inode = path.stat().st_ino
    write_textfile(figures, path)
    assert path.stat().st_ino != inode  # replaced, never half written
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_nobody_could_write_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only names that end in .prom"):
        check_textfile(tmp_path / "build.txt")
    with pytest.raises(DataError, match="no folder that can be written to"):
        check_textfile(tmp_path / "absent" / "build.prom")


def test_without_prometheus_client_only_an_endpoint_is_missed() -> None:
    """As in an image for preparation alone: ``-S`` hides whatever is installed."""
    code = """
import sys
from pathlib import Path
from data_prep.errors import DataError
from data_prep.metrics import Figures, check_textfile, serve
figures = Figures()
figures.begin("tokenize", 2)
figures.advance(1)
with serve(figures, None) as port:
    assert port is None
for ask in (lambda: serve(figures, 0).__enter__(), lambda: check_textfile(Path("build.prom"))):
    try:
        ask()
    except DataError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{option} needs the package prometheus-client: pip install prometheus-client, or leave it out"
        for option in ("--metrics-port", "--metrics-file")
    ]
