"""The page of runs over HTTP: its data, what it refuses, and the same page as one file."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import endpoint
from data_prep.endpoint import Endpoint
from tests.helpers.journals import NOW, PHASES, START, begun, invented, journal, step, write
from tests.helpers.runs import wait_for
from tests.helpers.s3 import Fault, faulty, sign_in
from trainer.errors import TrainerError
from trainer.monitor import panels
from trainer.monitor.history import read_history
from trainer.monitor.summary import TIME_COLORS, summary
from trainer.report import main as report
from trainer.run.lock import hold
from trainer.run.stop_request import STOP_FILE
from trainer.runs import addresses, journals, server
from trainer.runs.__main__ import main
from trainer.runs.addresses import Copies
from trainer.runs.document import FOLDER, document
from trainer.runs.server import Runs, identifier, read_token
from trainer.runs.status import RunStatus, read_status
from trainer.store.objects import Objects

pytestmark = pytest.mark.slow  # imports PyTorch

TOKEN = "a token of no one".replace(" ", "-")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of a run that runs, one that is done, one with a hostile name, one without a step, and a damaged one."""
    monkeypatch.setattr(server, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(journals, "PAUSES", 0)
    top = tmp_path / "runs"
    write(top / "live", begun(tmp_path, 20, time.time(), run="live"))
    heldout = {"event": "heldout", "time": NOW, "step": 20, "mlm_loss": 4.25, "mlm_accuracy": 0.25}
    ended = {"event": "end", "time": NOW, "how": "done"}
    write(top / "done", [*begun(tmp_path, run="over"), heldout, ended], {"run": {"seed": 2}, "phases": PHASES})
    write(top / "hostile", begun(tmp_path, run=HOSTILE), {"run": {"name": HOSTILE, HOSTILE: 1}, "phases": PHASES})
    write(top / "empty", begun(tmp_path, 0))
    write(top / "damaged", [step(1, tokens="many")])
    return top


@pytest.fixture
def served(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(endpoint, "CLOCK_CHECK_SECONDS", 0.01)  # it ends sooner
    monkeypatch.setattr(endpoint, "PAUSE", 0.001)
    running = Endpoint(0, "127.0.0.1", Runs([runs], price=3.0, token=TOKEN))
    yield running
    running.close()


def ask(running: Endpoint, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPResponse]:
    """The status, the body and the answer itself."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer


def data(running: Endpoint, path: str) -> dict[str, Any]:
    status, body, _ = ask(running, path)
    assert status == 200, body
    return dict(json.loads(body, parse_constant=lambda name: pytest.fail(name)))


def query(top: Path, *names: str) -> str:
    return "&".join(f"run={identifier(str(top / name))}" for name in names)


# ---- the data ------------------------------------------------------------------------------------------------


def test_the_list_is_that_of_the_command_and_live(
    runs: Path, served: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = data(served, "/list")
    assert main([str(runs), "--json", "--price", "3"]) == 0
    printed = json.loads(capsys.readouterr().out)["runs"]
    assert listed["can_stop"] and [run["folder"] for run in listed["runs"]] == [run["folder"] for run in printed]
    for shown, run in zip(listed["runs"], printed, strict=True):
        assert run.items() <= shown.items()
    [live] = [run for run in listed["runs"] if run["name"] == "live"]
    assert (live["state"], live["live"], live["cells"]["step"]) == ("running", True, "20/200")
    with (runs / "live/metrics.jsonl").open("a") as file:
        file.write(journal([step(21, time.time())]))
    assert {run["name"]: run["step"] for run in data(served, "/list")["runs"]}["live"] == 21


def test_no_runs_is_no_error(tmp_path: Path, served: Endpoint) -> None:
    (tmp_path / "none").mkdir()
    served.application = Runs([tmp_path / "none"])
    assert data(served, "/list")["runs"] == []


def test_a_run_is_shown_as_its_report_has_it(runs: Path, served: Endpoint) -> None:
    tree = data(served, "/runs?" + query(runs, "done"))
    [run], history = tree["runs"], read_history(runs / "done")
    assert run["summary"] == summary(history) and tree["tables"] == {}
    loss = run["curves"]["MLM loss"]
    assert loss["line"] == [list(range(1, 21)), [5.0] * 20] and loss["dots"] == [[20], [4.25]]
    assert run["places"]["samples"] == [8 * n for n in range(1, 21)]
    assert run["places"]["tokens"] == [300 * n for n in range(1, 21)]
    assert ["run.seed", "2"] in run["settings"] and ["phases.1.name", "long"] in run["settings"]
    assert [(at, kind) for at, kind, _ in run["events"]] == [(0, "phase"), (20, "evaluation"), (20, "end")]
    assert run["curves"].keys() < {chart["name"] for chart in tree["charts"]}


def test_what_a_run_did_is_in_its_events_and_shares(tmp_path: Path, served: Endpoint, runs: Path) -> None:
    ranks = {"event": "ranks", "time": NOW, "step": 20, "compute": [0.1, 0.2, 0.3], "slowest": 1}
    parts = {"forward": 0.1, "backward": 0.25, "reduce": 0.1, "optimizer": 0.05, "data": 0.0}
    spent = {"event": "time", "time": NOW, "step": 20, "spent": {"productive": 15.0, "start": 5.0}}
    alarm = {"event": "guard", "time": NOW, "step": 20, "sign": "spike", "action": "rollback"}
    lost = {"event": "checkpoint_failed", "time": NOW, "step": 10, "stall_seconds": 0.1}
    again = [{"event": "attempt", "time": NOW, "restarts": 1}, {**START, "time": NOW, "step": 10}]
    more = [step(n, NOW + n, restarts=1, phase=1, loss_scale=1024.0) for n in range(11, 31)]
    records = [*begun(tmp_path), lost, {**ranks, "parts": parts}, spent, alarm, *again, *more]
    write(runs / "eventful", [*records, {**ranks, "step": 30, "parts": parts}, {**spent, "step": 30, "time": NOW + 60}])
    [run] = data(served, "/runs?" + query(runs, "eventful"))["runs"]
    kinds = {(at, kind): text for at, kind, text in run["events"]}
    assert kinds[10, "restart"] == "resumed from step 10" and kinds[20, "rollback"] == "spike: rollback"
    assert kinds[10, "phase"] == "long begins" and (10, "alarm") in kinds
    assert (run["restarts"], run["phases"]) == ([10], [10])
    assert sum(share for _, share, _ in run["time"]) == pytest.approx(1.0)
    assert [name for name, _, _ in run["time"]] == ["productive", "start", "down"]
    assert dict((name, text) for name, _, text in run["step_time"])["backward"] == "250 ms"
    assert run["slowest"] == [["1", 1.0]] and run["curves"]["rank skew"]["mean"] == [[30], [1.5]]
    assert run["curves"]["loss scale"]["line"][1] == [1024.0] * 20
    assert run["places"]["hours"][-1] == pytest.approx(40 / 3600, rel=1e-5)
    assert run["places"]["cost"][-1] == pytest.approx(3 * 2 * 40 / 3600, rel=1e-5)  # two ranks


def test_several_runs_are_laid_over_one_another(runs: Path, served: Endpoint) -> None:
    tree = data(served, "/runs?" + query(runs, "live", "done", "empty", "damaged"))
    assert [run["label"] for run in tree["runs"]] == ["live", "over"]
    assert {run["state"] for run in tree["waiting"]} == {"silent", "unreadable"}
    assert tree["tables"]["results"]["state"] == ["running", "done"]
    assert all(len(lines.keys() - {"dots"}) <= 1 for run in tree["runs"] for lines in run["curves"].values())


def test_a_zoom_gets_more_points_of_fewer_steps(runs: Path, served: Endpoint) -> None:
    write(runs / "long", [step(n, mlm_loss=5 + n % 2) for n in range(1, 9001)])
    chosen, name = query(runs, "long"), identifier(str(runs / "long"))
    [run] = data(served, "/runs?" + chosen)["runs"]
    x, _ = run["curves"]["MLM loss"]["line"]
    mean, _ = run["curves"]["MLM loss"]["mean"]
    assert len(x) == 4000 and len(mean) == 2000 and (mean[0], mean[-1]) == (1, 9000)
    near = data(served, f"/runs?{chosen}&from=1000&to=1500")["curves"][name]["MLM loss"]["line"]
    assert near == [list(range(1000, 1501)), [5 + n % 2 for n in range(1000, 1501)]]


def test_a_long_journal_is_read_in_parts(runs: Path, served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    write(runs / "long", [step(n) for n in range(1, 12_001)])
    monkeypatch.setattr(journals, "READ_SECONDS", 0.02)
    shares = []
    while "reading" in (tree := data(served, "/runs?" + query(runs, "long", "done"))):
        shares.append(tree["reading"])
    assert len(shares) >= 2 and shares == sorted(shares) and 0 < shares[0] < 1
    assert tree["runs"][0]["step"] == 12_000


def test_old_histories_are_forgotten(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "KEPT_BYTES", 10)
    kept = journals.Journals()
    for name in ("live", "done"):
        assert kept.read([runs / name])[0] == 1.0
    assert list(kept._followed) == [runs / "done"]


def test_a_journal_that_grows_is_not_skimmed_all_the_time(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "PAUSES", 1e6)
    kept, folders = journals.Journals(), [runs / "live", runs / "damaged"]

    def found() -> list[tuple[str, int | None]]:
        share, statuses = kept.renew(folders, None)
        assert share == 1
        return [(run.state, run.step) for run in statuses]

    assert found() == [("running", 20), ("unreadable", None)]
    with (runs / "live/metrics.jsonl").open("a") as file:
        file.write(journal([step(21, time.time())]))
    (runs / "damaged/metrics.jsonl").write_text(journal([step(2, tokens="many")]))
    assert found()[0] == ("running", 20)
    monkeypatch.setattr(journals, "PAUSES", 0)
    kept = journals.Journals()
    assert found()[0] == ("running", 21)


def test_a_run_that_has_ended_is_read_again_only_if_it_changes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of thousands of runs would otherwise be too slow to be sent."""
    read = list[str]()

    def noted(folder: Path, *rest: Any) -> RunStatus:
        read.append(folder.name)
        return read_status(folder, *rest)

    monkeypatch.setattr(journals, "read_status", noted)
    kept, folders = journals.Journals(), [runs / "live", runs / "done"]
    for _ in range(3):
        kept.renew(folders, None)
    assert read == ["live", "done", "live", "live"]
    lock = hold(runs / "done", 0.0, print)
    assert lock is not None
    with lock:
        assert [run.state for run in kept.renew(folders, None)[1]] == ["running", "silent"]
    with (runs / "done/metrics.jsonl").open("a") as file:
        file.write(journal([{"event": "attempt", "time": NOW, "restarts": 1}, step(21, NOW, restarts=1)]))
    assert [run.step for run in kept.renew(folders, None)[1]] == [20, 21]


def test_a_long_list_is_read_in_parts(runs: Path, served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known, each look renews some of the runs, in turn."""
    for number in range(40):
        write(runs / f"more-{number}", begun(runs, 50))
    monkeypatch.setattr(journals, "READ_SECONDS", 0.002)
    shares = []
    while "reading" in (tree := data(served, "/list")):
        shares.append(tree["reading"])
    assert len(shares) >= 2 and shares == sorted(shares) and len(tree["runs"]) == 45
    for number in range(40):
        write(runs / f"more-{number}", begun(runs, 51))
    looks = 0
    while any(run["step"] == 50 for run in data(served, "/list")["runs"]):
        looks += 1
    assert looks >= 2


def test_numbers_that_no_json_has_are_left_out(runs: Path, served: Endpoint) -> None:
    odd = [step(n, tokens=1e308, seconds=1e-300, mlm_loss=None, nsp_loss=float("nan")) for n in range(1, 5)]
    write(runs / "odd", [*odd, {"event": "ranks", "step": 4, "parts": {}, "compute": [0, 0, 1], "slowest": None}])
    [run] = data(served, "/runs?" + query(runs, "odd"))["runs"]
    assert run["curves"]["throughput"] == {}


ODD: tuple[Any, ...] = (
    math.nan,
    math.inf,
    1e308,
    -1e308,
    0,
    -1,
    2**63,
    True,
    None,
    "x",
    [],
    {},
    [1],
    {"a": 1},
    "\u202e</script>\n",
)


def test_whatever_a_journal_contains_the_page_is_answered(runs: Path, served: Endpoint) -> None:
    """One or two records have an odd value. The run is shown or is unreadable, and the list has all other runs."""
    for seed in range(100):
        rng = random.Random(seed)
        records = [json.loads(line) for line in invented(rng).splitlines() if line.endswith("}")]
        for record in rng.choices(records, k=rng.choice((1, 2))):
            record[rng.choice([*record, "time", "spent", "ranks"])] = rng.choice(ODD)
        write(runs / "odd", records)
        listed = {Path(run["folder"]).name: run for run in data(served, "/list")["runs"]}
        assert len(listed) == 6 and listed["odd"]["state"]
        tree = data(served, "/runs?" + query(runs, "odd", "live"))
        assert len(tree["runs"]) + len(tree["waiting"]) == 2, seed


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../etc/passwd", 404),
        ("/page.js", 404),
        ("/runs/live/metrics.jsonl", 404),
        ("//", 404),
        ("/runs?run=../live", 404),
        ("/runs?run=live", 404),
        ("/runs?run=%00", 404),
        ("/runs", 400),
        ("/runs?" + "run=0&" * 51, 400),
        ("/runs?" + "a&b=" * 1000, 400),
        ("/stop?run=x", 405),
    ],
)
def test_no_request_reaches_a_file(served: Endpoint, path: str, status: int) -> None:
    found, body, answer = ask(served, path)
    assert found == status and len(body.splitlines()) == 1 and answer.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("192.0.2.7:1", 200),
        ("evil.example:8080", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.1@evil.example", 421),
        ("", 421),
        ("[::1", 421),
    ],
)
def test_another_sites_name_that_leads_here_is_refused(served: Endpoint, host: str, status: int) -> None:
    """DNS can be made to lead any name to this port: a page under that name could read the runs."""
    for path in ("/", "/list"):
        assert ask(served, path, Host=host)[0] == status


@pytest.mark.parametrize("error", [ValueError, AssertionError])
def test_an_error_is_no_page_and_ends_nothing(runs: Path, served: Endpoint, error: type[Exception]) -> None:
    """Its text may come from a journal."""

    def fail(environ: dict[str, str], start: Any) -> list[bytes]:
        raise error(HOSTILE)

    answers, served.application = served.application, fail
    status, body, answer = ask(served, "/list")
    assert status == 500 and HOSTILE in body
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    served.application = answers
    assert data(served, "/list")["runs"]


def test_an_answer_may_take_longer_than_its_client(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many long runs take the server seconds, which are not the client's."""
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.2)
    answers = served.application

    def slow(environ: dict[str, str], start: Any) -> Any:
        time.sleep(0.5)
        return answers(environ, start)

    served.application = slow
    assert data(served, "/list")["runs"]


def test_an_event_of_an_earlier_connection_closes_no_later_one(served: Endpoint) -> None:
    """Both have the same descriptor, and the later one has sent nothing yet."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        later = endpoint._Connection(theirs, time.monotonic() + 5)
        served._connections[theirs.fileno()] = later
        served._advance(later)
        assert served._connections.pop(theirs.fileno()) is later


def stop(running: Endpoint, top: Path, name: str, **changes: str | None) -> tuple[int, str]:
    """Ask as the page does, but for some headers."""
    own = f"127.0.0.1:{running.port}"
    headers = {"Host": own, "Origin": f"http://{own}", "Authorization": f"Bearer {TOKEN}", "Content-Length": "0"}
    kept = {name: value for name, value in (headers | changes).items() if value is not None}
    status, body, _ = ask(running, "/stop?" + query(top, name), "POST", **kept)
    return status, body


@pytest.mark.parametrize(
    "changes",
    [
        {"Authorization": None},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer \xff"},
        {"Origin": None},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
    ],
)
def test_only_the_page_with_the_token_stops_a_run(runs: Path, served: Endpoint, changes: dict[str, str | None]) -> None:
    status, body = stop(served, runs, "live", **changes)
    assert status in (403, 421) and TOKEN not in body
    assert not list(runs.rglob(STOP_FILE))


def test_a_stop_is_asked_for_once_it_may_be(runs: Path, served: Endpoint) -> None:
    assert stop(served, runs, "done") == (409, "over is not running: its state is done")
    status, said = stop(served, runs, "live", **{"Content-Length": str(10**12)})  # no body is waited for
    assert status == 200 and said.startswith(f"asked live ({runs / 'live'}) to stop: ")
    assert [path.parent.name for path in runs.rglob(STOP_FILE)] == ["live"]
    assert {run["name"]: run["reason"] for run in data(served, "/list")["runs"]}["live"] == "asked to stop"


def test_without_a_token_nothing_can_be_stopped(runs: Path, served: Endpoint) -> None:
    served.application = Runs([runs])
    assert not data(served, "/list")["can_stop"]
    for given in ("Bearer ", "Bearer None", f"Bearer {TOKEN}"):
        assert stop(served, runs, "live", Authorization=given)[0] == 403
    assert not list(runs.rglob(STOP_FILE))


# ---- the document --------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """The parts of a page that a browser acts on: its tags, and the text in scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.texts.append((self.tags[-1][0], data))


def allowed(policy: str, kind: str, text: str) -> bool:
    """Whether a Content-Security-Policy allows this script or style."""
    directives = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'" in directives[f"{kind}-src"].split()


def test_the_page_has_all_it_needs_and_may_do_nothing_else(served: Endpoint) -> None:
    status, page, answer = ask(served, "/")
    policy, read = answer.headers["Content-Security-Policy"], Reader(page)
    assert status == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "*" not in policy
    assert len(read.texts) == 11 and all(allowed(policy, kind, text) for kind, text in read.texts)
    assert not allowed(policy, "script", "alert(1)")
    outside = {"src", "href", "action", "style"}
    assert [attributes for _, attributes in read.tags if outside & attributes.keys()] == [
        {"rel": "icon", "href": "data:,"}
    ]


MARKUP = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|https?:"


def test_our_scripts_build_no_markup_from_text() -> None:
    own = [path for path in FOLDER.glob("*.js") if path.name != "uplot.js"]
    for path in own:
        assert not re.findall(MARKUP, path.read_text()), path
    assert len(own) == 8


def test_the_library_is_the_release_that_its_note_names() -> None:
    named = re.findall(r"^([0-9a-f]{64})  (\S+)$", (FOLDER / "uplot.md").read_text(), re.MULTILINE)
    assert {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for _, name in named} == {
        name: digest for digest, name in named
    }
    assert len(named) == 3


def test_the_colors_are_those_of_the_report() -> None:
    light = (FOLDER / "page.css").read_text().partition("}")[0]
    found = dict(re.findall(r"--(\w+): (#\w{6})", light))
    names = ("INK", "FAINT", "BLUE", "SKY", "GREEN", "ORANGE", "VIOLET", "ROSE", "RED")
    assert {name: found[name.lower()] for name in names} == {name: getattr(panels, name) for name in names}
    sections = (FOLDER / "sections.js").read_text()
    for state, color in {**TIME_COLORS, **panels.PART_COLORS}.items():
        assert found[re.findall(rf'\b{state}: "(\w+)"', sections)[0]] == color, state


def test_a_page_as_a_file_needs_no_server_and_runs_no_foreign_script(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.html"
    assert report([str(runs / "hostile"), "--html", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}\n  steps ") and not (runs / "hostile/report.png").exists()
    read = Reader(path.read_text("utf-8"))
    [policy] = [each["content"] for tag, each in read.tags if tag == "meta" and "http-equiv" in each]
    assert policy is not None and "connect-src" not in policy
    [written] = [text for _, text in read.texts if text.startswith("{")]
    assert json.loads(written)["runs"][0]["name"] == HOSTILE
    scripts = [text for kind, text in read.texts if kind == "script" and text != written]
    assert len(scripts) == 9 and all(allowed(policy, "script", text) for text in scripts)
    assert len([tag for tag, _ in read.tags if tag in ("script", "img")]) == 10
    assert document()[0].count("<!-- data -->") == 1


def test_a_comparison_as_a_file(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.html"
    assert main(["compare", str(runs / "live"), str(runs / "done"), "--html", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    [written] = [text for _, text in Reader(path.read_text("utf-8")).texts if text.startswith("{")]
    assert [run["label"] for run in json.loads(written)["runs"]] == ["live", "over"]


def test_rounding_keeps_seven_digits() -> None:
    from trainer.runs.charts import _numbers

    values = np.array([0.0, 1.23456789, -4.0, 123456789.0, 1650.0, 6.1234567e-5, 1e300, 5e-324])
    assert _numbers(values) == [0.0, 1.234568, -4.0, 123456800.0, 1650.0, 6.123457e-05, 1e300, 0.0]


# ---- the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (["--serve", place], f"argument --serve: {place} must be an address and a port, such as 127.0.0.1:8080")
            for place in ("8080", "localhost", ":8080", "localhost:", "localhost:http", "[::1", "::1:80", "a b:1")
        ),
        (["--serve", "127.0.0.1:65536"], "argument --serve: 127.0.0.1:65536 must be an address and a port"),
        (["--serve", "127.0.0.1:{taken}"], "--serve 127.0.0.1:{taken} cannot be opened (Address already in use): name"),
        (["--serve", "nowhere.invalid:80"], "--serve nowhere.invalid:80 cannot be opened ("),
        (["nowhere", "--serve", "127.0.0.1:0"], "nowhere is not a folder"),
        (["--serve", "127.0.0.1:0", "--json"], "argument --json: not allowed with argument --serve"),
        (["--token-file", "x"], "argument --token-file: needs --serve"),
        (["--serve", "127.0.0.1:0", "--token-file", "nowhere"], "--token-file nowhere cannot be read: No such file"),
        (["--serve", "127.0.0.1:0", "--token-file", "short"], "--token-file short: must be one word of 16 or more"),
    ],
)
def test_a_mistake_takes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "short").write_text("hunter2\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        try:
            code = main([word.replace("{taken}", port) for word in words])
        except SystemExit as end:
            code = int(str(end.code))
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith(f"trainer.runs: error: {said.replace('{taken}', port)}"), line


@pytest.mark.parametrize(
    "text", ["", "two words that are long enough", "one-long-enough\nand-another", "é" * 20, "x" * 5000]
)
def test_a_token_that_cannot_be_one_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(TrainerError, match=r"^--token-file .*token: "):
        read_token(tmp_path / "token")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN


@pytest.mark.parametrize(("address", "lines"), [("127.0.0.1", 1), ("[::1]", 1), ("localhost", 1), ("0.0.0.0", 2)])
def test_it_says_where_it_is_and_who_can_see_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str, lines: int
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.runs.server.time.sleep", interrupt)
    assert main([str(runs), "--serve", f"{address}:0"]) == 130
    first, *more = capsys.readouterr().out.splitlines()
    assert re.match(rf"http://{re.escape(address)}:\d+/ shows the runs \(read-only: --token-file adds", first)
    assert more == ["0.0.0.0 is not only this machine's: whoever reaches it can see these runs"][: lines - 1]


def test_runs_at_addresses_are_copied_again_and_again(
    runs: Path, tmp_path: Path, served: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "COPY_SECONDS", 0.05)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with ExitStack() as stack:
        store = stack.enter_context(faulty())
        sign_in(store.address, monkeypatch)
        store.empty("bucket")
        there, said = Objects("s3://bucket/runs"), list[str]()
        for path in sorted(runs.glob("*/*")):
            there.put(path, str(path.relative_to(runs)))
        copies = stack.enter_context(closing(Copies(["s3://bucket/runs"], said.append)))
        copies.start()
        served.application = Runs([runs / "done"], copies, token=TOKEN)
        listed = {run["folder"]: run for run in data(served, "/list")["runs"]}
        names = ("damaged", "done", "empty", "hostile", "live")
        assert sorted(listed) == [str(runs / "done"), *(f"s3://bucket/runs/{name}" for name in names)]
        live = listed["s3://bucket/runs/live"]
        assert (live["state"], live["step"]) == ("running", 20)
        shown = data(served, f"/runs?run={live['id']}&run={listed[str(runs / 'done')]['id']}")
        assert [run["name"] for run in shown["runs"]] == ["live", "over"]

        post = {"Origin": f"http://127.0.0.1:{served.port}", "Authorization": f"Bearer {TOKEN}"}
        status, body, _ = ask(served, f"/stop?run={live['id']}", "POST", **post)
        assert status == 200 and "(s3://bucket/runs/live)" in body and f"live/{STOP_FILE}" in there.list()

        with (runs / "live/metrics.jsonl").open("a") as file:
            file.write(journal([step(21, time.time())]))
        there.put(runs / "live/metrics.jsonl", "live/metrics.jsonl")
        wait_for(lambda: {run["id"]: run["step"] for run in data(served, "/list")["runs"]}[live["id"]] == 21)

        store.faults = [Fault("GET", "bucket", "forbidden", times=1000)]
        wait_for(lambda: bool(said))
        assert said[0].startswith("warning: the page shows what was copied before: s3://bucket/runs")
        assert len(data(served, "/list")["runs"]) == 6
