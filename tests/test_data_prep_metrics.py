"""Metrics of a build: what Prometheus reads over HTTP, from a file and from a Pushgateway, and what may never be."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from data_prep import metrics
from data_prep.__main__ import main
from data_prep.errors import DataError
from data_prep.manifest import load_manifest
from data_prep.metrics import COUNTERS, STAGES, BuildMetrics, check_textfile, push, serve, write_textfile
from data_prep.workers import Stopped
from tests.helpers.corpora import write_corpus
from tests.helpers.programs import program
from tests.helpers.ranks import ROOT, free_port

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
VERSIONS = {"lambert": "0.1.0", "tokenizers": "0.22.1"}
NAME = re.compile(
    r"lambert_prep_((bytes|characters|documents|sentences|tokens|pairs|samples|shards)(_[a-z]+)*_total|build_info"
    r"|stage_seconds_total|progress_ratio|last_(success|failure)_timestamp_seconds)"
)
SUCCESS, FAILURE = (f"lambert_prep_last_{end}_timestamp_seconds" for end in ("success", "failure"))


def read(text: str) -> Samples:
    """Every sample of an exposition, by name and labels; each has a help text and a type."""
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation.endswith(".") and family.type != "unknown" for family in families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def ask(port: int | None) -> str:
    """Ask as Prometheus does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def scrape(port: int | None) -> Samples:
    """The series that Prometheus reads from a port."""
    return read(ask(port))


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """The key of a series of the data set ``train``."""
    return f"lambert_prep_{name}", frozenset({"dataset": "train", **labels}.items())


def work() -> BuildMetrics:
    """A build that is in its second stage; each counter has a value of its own."""
    build_metrics = BuildMetrics("train", VERSIONS)
    for value, name in enumerate(COUNTERS, 1):
        setattr(build_metrics, name, value)
    build_metrics.begin("tokenize", 50)
    build_metrics.advance(20)
    build_metrics.begin("select", 40)
    build_metrics.advance(4)
    build_metrics.advance(6)
    return build_metrics


def test_a_scrape_shows_how_far_a_build_is() -> None:
    build_metrics = work()
    with serve(build_metrics, 0, "127.0.0.1") as port:
        found = scrape(port)
        assert found[key("build_info", **VERSIONS)] == 1
        for value, name in enumerate(COUNTERS, 1):
            assert found[key(f"{name}_total")] == value
        progress = {stage: found[key("progress_ratio", stage=stage)] for stage in STAGES}
        assert progress == {"tokenize": 1.0, "select": 0.25, "plan": 0.0, "write": 0.0}
        build_metrics.tokens += 1000
        build_metrics.advance(10)
        more = scrape(port)
    assert more[key("tokens_total")] == found[key("tokens_total")] + 1000
    assert more[key("progress_ratio", stage="select")] == 0.5
    running, ended = (key("stage_seconds_total", stage=stage) for stage in ("select", "tokenize"))
    assert more[running] > found[running] > 0 and more[ended] == found[ended] > 0


def test_every_count_is_a_series_and_every_series_a_count() -> None:
    assert set(COUNTERS) == {field.name for field in fields(BuildMetrics) if field.type == "int"}


def test_names_end_in_units_and_series_do_not_multiply() -> None:
    build_metrics = work()
    with serve(build_metrics, 0, "127.0.0.1") as port:
        before = scrape(port)
        for number in range(500):
            build_metrics.begin(STAGES[number % 4], number)
            build_metrics.advance(number)
            build_metrics.shards += 1
        assert set(scrape(port)) == set(before)
        build_metrics.succeed()
        after = scrape(port)
    assert set(after) - set(before) == {key("last_success_timestamp_seconds")}
    assert [name for name, _ in after if not NAME.fullmatch(name)] == []


def test_progress_and_seconds_stay_in_bounds() -> None:
    build_metrics = BuildMetrics()
    build_metrics.advance(5)  # in no stage
    assert [build_metrics.progress(stage) for stage in STAGES] == [0.0] * 4
    build_metrics.begin("write", 0)
    build_metrics.advance(0)
    assert build_metrics.progress("write") == 0.0
    build_metrics.begin("write", 3)
    build_metrics.advance(7)
    assert build_metrics.progress("write") == 1.0
    seconds = [build_metrics.seconds("write")]
    for _ in range(100):
        seconds.append(build_metrics.seconds("write"))
        build_metrics.end()
        seconds.append(build_metrics.seconds("write"))
        build_metrics.begin("write", 1)
        seconds.append(build_metrics.seconds("write"))
    assert seconds == sorted(seconds) and seconds[-1] > 0
    assert build_metrics.seconds("plan") == 0.0


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_one_line(address: str) -> None:
    with socket.socket() as other:
        other.bind((address, 0))
        other.listen()
        port = other.getsockname()[1]
        expected = (
            rf"^--metrics-port {port} on {re.escape(address)} cannot be opened \(Address already in use\): [^\n]+$"
        )
        with pytest.raises(DataError, match=expected), serve(BuildMetrics(), port, address):
            pytest.fail("work began")


@pytest.mark.parametrize(
    ("port", "address"), [(70000, "127.0.0.1"), (-1, "127.0.0.1"), (9465, "no.host.invalid"), (9465, "no..host")]
)
def test_a_port_or_address_that_cannot_be_is_one_line(port: int, address: str) -> None:
    with (
        pytest.raises(DataError, match=r"^--metrics-port .* cannot be opened \([^\n]+$"),
        serve(BuildMetrics(), port, address),
    ):
        pytest.fail("work began")


def test_one_process_builds_twice_with_one_port() -> None:
    port = free_port()
    for tokens in (1, 2):
        with serve(BuildMetrics("train", tokens=tokens), port, "127.0.0.1") as opened:
            assert opened == port
            assert scrape(port)[key("tokens_total")] == tokens
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_a_file_holds_the_last_success(tmp_path: Path) -> None:
    path = tmp_path / "build.prom"
    check_textfile(path)
    assert not path.exists()
    build_metrics = work()
    begun = time.time()
    build_metrics.succeed()
    write_textfile(build_metrics, path)
    found = read(path.read_text())
    assert begun <= found[key("last_success_timestamp_seconds")] <= time.time()
    assert found[key("progress_ratio", stage="select")] == 1.0
    inode = path.stat().st_ino
    write_textfile(build_metrics, path)
    assert path.stat().st_ino != inode  # replaced, never half written
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_nobody_could_write_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="wanted a file whose name ends in .prom"):
        check_textfile(tmp_path / "build.txt")
    with pytest.raises(DataError, match=r"in the folder .*/absent \(No such file or directory\); name another"):
        check_textfile(tmp_path / "absent" / "build.prom")


def test_node_exporter_reads_the_files_of_two_data_sets(tmp_path: Path) -> None:
    for name in ("train", "heldout"):
        write_textfile(BuildMetrics(name), tmp_path / f"{name}.prom")
    options = ["--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={tmp_path}"]
    with running("prometheus-node-exporter", *options) as port:
        found = re.findall(r'^lambert_prep_tokens_total{dataset="(.+)"} 0$', ask(port), re.MULTILINE)
    assert found == ["heldout", "train"]


# ---- Pushgateway ---------------------------------------------------------------------------------------------


@contextmanager
def running(name: str, *options: str) -> Iterator[int]:
    """Run a program that answers Prometheus until the block ends; yields its port."""
    port = free_port()
    line = [program(name), f"--web.listen-address=127.0.0.1:{port}", *options]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < deadline:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.02)
            assert process.poll() is None
            yield port
        finally:
            process.kill()


@pytest.fixture(scope="module")
def gateway() -> Iterator[int]:
    """The port of a real Pushgateway."""
    with running("prometheus-pushgateway", "--persistence.file=") as port:
        yield port


def group(port: int, dataset: str) -> dict[str, float]:
    """The Pushgateway's series of a data set that have no stage label, by name."""
    series = [line for line in ask(port).splitlines() if f'dataset="{dataset}"' in line and "stage=" not in line]
    assert all('instance="",job="lambert_prep"' in line for line in series)
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in series}


def test_each_data_set_leaves_its_last_result_and_a_later_failure(gateway: int) -> None:
    url = f"http://127.0.0.1:{gateway}/"
    other = BuildMetrics("held out/ä", tokens=5)
    with push(other, url):
        other.succeed()
    build_metrics = work()
    with push(build_metrics, url):
        build_metrics.succeed()
        assert group(gateway, "train") == {}  # results only
    good = group(gateway, "train")
    assert good[SUCCESS] == build_metrics.succeeded and FAILURE not in good
    assert good["lambert_prep_tokens_total"] == build_metrics.tokens
    assert abs(good["push_time_seconds"] - time.time()) < 60
    for stop in (KeyboardInterrupt, Stopped):
        with pytest.raises(stop), push(BuildMetrics("train"), url):
            raise stop
    assert group(gateway, "train") == good  # neither begun nor stopped is a result

    with pytest.raises(DataError, match="no text"), push(BuildMetrics("train"), url):
        raise DataError("no text")
    bad = group(gateway, "train")
    assert bad[FAILURE] > bad[SUCCESS]
    changed = {"push_time_seconds", FAILURE}
    assert {name: bad[name] for name in bad.keys() - changed} == {name: good[name] for name in good.keys() - changed}
    with push(build_metrics, url):
        pass
    assert group(gateway, "train").keys() == good.keys()
    assert group(gateway, "held out/ä")["lambert_prep_tokens_total"] == 5


def test_promtool_finds_nothing_wrong(gateway: int, tmp_path: Path) -> None:
    """Checks a file's contents and a Pushgateway's, of which its own series are left out."""
    build_metrics = BuildMetrics("checked")
    with pytest.raises(OSError, match="full"), push(build_metrics, f"http://127.0.0.1:{gateway}"):
        raise OSError("full")
    write_textfile(build_metrics, tmp_path / "build.prom")
    pushed = "".join(line for line in ask(gateway).splitlines(True) if FAILURE in line)
    text = (tmp_path / "build.prom").read_text() + pushed
    assert text.count("# HELP") == len(COUNTERS) + 4
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_build_is_pushed(gateway: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [4, 4], 8)
    line = ["build", "--input", str(text), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "fresh")]
    line += ["--sequence-length", "32", "--processes", "1", "--metrics-push", f"http://127.0.0.1:{gateway}"]
    assert main([*line, "--input", str(tmp_path / "absent")]) == 2
    assert group(gateway, "fresh").keys() == {FAILURE, "push_time_seconds", "push_failure_time_seconds"}
    assert main(line) == 0
    assert "warning: --metrics-push" not in capsys.readouterr().err
    manifest = load_manifest(tmp_path / "fresh")
    for _ in range(2):
        found = group(gateway, "fresh")
        assert FAILURE not in found and found[SUCCESS] > 0
        assert found["lambert_prep_samples_total"] == manifest.counts.samples > 0
        assert found["lambert_prep_bytes_written_total"] == (tmp_path / "fresh" / "shard-00000.tar").stat().st_size
        assert main(line) == 0  # finds everything done


def test_a_dead_gateway_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [4, 4], 8)
    url = f"http://127.0.0.1:{free_port()}"
    line = ["build", "--input", str(text), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "train")]
    line += ["--sequence-length", "32", "--processes", "1", "--metrics-push", url]
    expected = (
        f"data_prep: warning: --metrics-push {url} did not accept the metrics "
        "(<urlopen error [Errno 111] Connection refused>); run the same command to push again"
    )
    assert main([*line, "--tokenizer", "absent"]) == 2
    warning, error = [line for line in capsys.readouterr().err.splitlines() if "warning" in line or "error:" in line]
    assert warning == expected and error.startswith("data_prep: error: tokenizer folder absent ")
    assert main(line) == 0
    assert capsys.readouterr().err.splitlines().count(expected) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP Error 400: Bad Request"),
        (b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1/\r\n\r\n", "HTTP Error 307: Moved"),
        (b"SSH-2.0-OpenSSH\r\n", "SSH-2.0-OpenSSH"),
        (b"", "Remote end closed connection without response"),
        (None, "timed out"),
    ],
)
def test_a_gateway_that_answers_badly_costs_a_warning(
    answer: bytes | None, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PUSH_SECONDS", 10 if answer is not None else 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if answer is not None:
            threading.Thread(target=_answer, args=(server, answer), daemon=True).start()
        with push(BuildMetrics("train"), f"http://127.0.0.1:{server.getsockname()[1]}"):
            pass
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("data_prep: warning: --metrics-push http://127.0.0.1:") and f"({reason})" in warning


def _answer(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        data = b""
        while b"lambert_prep_progress_ratio{" not in data and (more := connection.recv(65536)):
            data += more
        connection.sendall(answer)


@pytest.mark.parametrize(
    "url",
    [
        "gateway:9091",
        "ftp://gateway:9091",
        "http://",
        "http://:9091",
        "http://gate way:9091",
        "http://gateway:0",
        "http://gateway:70000",
        "http://gateway:port",
        "http://gateway:9091/?job=x",
        "http://me:secret@gateway:9091",
        "http://gateway:9091\n",
    ],
)
def test_an_address_that_is_none_is_refused_before_the_work(url: str) -> None:
    with pytest.raises(DataError) as error, push(BuildMetrics(), url):
        pytest.fail("work began")
    message = str(error.value)
    assert message.startswith("--metrics-push ") and ": wanted http://HOST:PORT of a Pushgateway" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    "url", ["http://gateway", "HTTPS://gateway.example.org/push/", "http://[::1]:9091", "http://10.0.0.1:9091"]
)
def test_an_address_is_taken(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(
        "prometheus_client.push_to_gateway", lambda gateway, job, registry, group, timeout: sent.append((gateway, job))
    )
    with push(BuildMetrics("train"), url):
        assert sent == []
    assert sent == [(url, "lambert_prep")] and capsys.readouterr().err == ""


# ---- without prometheus_client -------------------------------------------------------------------------------


def test_without_prometheus_client_only_an_endpoint_is_missed() -> None:
    """An image for preparation alone lacks the package: ``-S`` hides whatever is installed."""
    code = """
import sys
from pathlib import Path
from data_prep.errors import DataError
from data_prep.metrics import BuildMetrics, check_textfile, push, serve
figures = BuildMetrics()
figures.begin("tokenize", 2)
figures.advance(1)
with serve(figures, None) as port, push(figures, None):
    assert port is None
for ask in (
    lambda: serve(figures, 0).__enter__(),
    lambda: check_textfile(Path("build.prom")),
    lambda: push(figures, "http://gateway:9091").__enter__(),
):
    try:
        ask()
    except DataError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{option} needs the package prometheus-client: pip install prometheus-client, or leave it out"
        for option in ("--metrics-port", "--metrics-file", "--metrics-push")
    ]
