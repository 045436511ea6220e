"""A TrainJob's progress: posted as Kubeflow Trainer takes it, to a real HTTPS server, and never at training's cost."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks
from tests.helpers.runs import write_config
from tests.helpers.status_server import PLACE, TOKEN, metrics_of, problem, status_server, write_certificates
from trainer.checkpoint.train_state import TrainState
from trainer.monitor import train_job
from trainer.monitor.train_job import Poster, TrainJob, status, values
from trainer.ranks import world
from trainer.ranks.world import StatusServer

FEW: dict[str, Any] = {"trainerStatus": {"metrics": [], "lastUpdatedTime": "2026-11-29T12:00:00Z"}}


def step(number: int, **more: Any) -> dict[str, Any]:
    about = {"event": "step", "step": number, "phase": 0, "samples": 8 * number, "restarts": 1, "applied": True}
    losses = {"loss": 5.5, "mlm_loss": 5.0, "nsp_loss": 0.5, "mlm_accuracy": 0.25, "unigram_loss": 6.0}
    rest = {"batch": 8, "seconds": 0.5, "tokens": 300, "learning_rate": 1e-4, "gradient_norm": 2.0, "loss_scale": 1.0}
    return {**about, **losses, **rest, **more}


def left(state: TrainState) -> tuple[int, float]:
    """800 samples in all."""
    return 800 - state.samples, 0.0


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "EVERY", 0.05)
    monkeypatch.setattr(train_job, "PATIENCE", 2.0)


def first_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The warning that the thread prints; waits for it."""
    until, output = time.monotonic() + 20, ""
    while not output.endswith("\n"):
        assert time.monotonic() < until, output
        time.sleep(0.01)
        output += capsys.readouterr().out
    return output


# ---- what is posted ------------------------------------------------------------------------------------------


def test_a_run_reports_its_progress_from_start_to_end(tmp_path: Path) -> None:
    with status_server(tmp_path) as received:
        job = TrainJob(received.address, left)
        job.write([{"event": "start", "step": 0}])
        received.wait(lambda got: len(got.posts) == 1)
        records = [step(number) for number in range(1, 11)]
        job.write([*records, {"event": "time", "step": 10, "spent": {}}])
        job.progress(TrainState(samples=80), records)
        received.wait(lambda got: len(got.posts) == 2)
        job.write([{"event": "heldout", "step": 10, "mlm_loss": 4.5, "mask_loss": 3.0}])
        job.write([{"event": "checkpoint", "step": 10}, {"event": "end", "how": "done"}])
        job.close()
    first, second, last = received.posts
    assert metrics_of(first) == {"step": "0"} and first["progressPercentage"] == 0
    assert "estimatedRemainingSeconds" not in first
    assert (second["progressPercentage"], second["estimatedRemainingSeconds"]) == (10, 45)  # 90 steps of 0.5 s
    shown = {"step": "10", "phase": "0", "samples": "80", "restarts": "1", "learning_rate": "0.0001", "loss": "5.5"}
    shown |= {"mlm_loss": "5", "nsp_loss": "0.5", "mlm_accuracy": "0.25", "gradient_norm": "2", "loss_scale": "1"}
    assert metrics_of(second) == shown | {"tokens_per_second": "600"}
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert metrics_of(last) == metrics_of(second) | {"heldout_mlm_loss": "4.5", "checkpoint_step": "10"}
    assert not received.problems


def test_a_run_that_fails_keeps_its_progress(tmp_path: Path) -> None:
    with status_server(tmp_path) as received:
        job = TrainJob(received.address, left)
        job.write([{"event": "start", "step": 40}])
        received.wait(lambda got: len(got.posts) == 1)
        job.progress(TrainState(samples=400), [step(50)])
        received.wait(lambda got: len(got.posts) == 2)
        job.write([{"event": "end", "how": "failed"}])
        job.close()
    assert [post.get("progressPercentage") for post in received.posts] == [None, 50, 50]


def test_phases_that_end_by_time_count_too(tmp_path: Path) -> None:
    """800 samples, which take 50 s at the pace of the newest step, and then 50 s by the clock."""
    with status_server(tmp_path) as received:
        job = TrainJob(received.address, lambda state: (800 - state.samples, 50 - state.milliseconds / 1000))
        job.progress(TrainState(samples=800, milliseconds=20_000), [step(100)])
        received.wait(lambda got: len(got.posts) == 1)
        job.close()
    [post] = received.posts
    assert (post["progressPercentage"], post["estimatedRemainingSeconds"]) == (70, 30)


def test_extreme_numbers_stay_within_the_schema() -> None:
    nan, inf = float("nan"), float("inf")
    named = values(step(10**15, loss=nan, mlm_loss=-1e300, gradient_norm=inf, learning_rate=5e-324, seconds=0.0))
    assert "loss" not in named and "gradient_norm" not in named and "tokens_per_second" not in named
    assert values(step(7, applied=False)) == {}
    for share, seconds in ((None, None), (0.0, -1.0), (1.0, 1e30), (0.29, 3e9)):
        assert not problem(status(named, share, seconds, 1.7e9))
    assert status({}, 0.29, None, 0.0)["trainerStatus"]["progressPercentage"] == 29


@pytest.mark.parametrize(
    "body",
    [
        {"trainerStatus": {"metrics": []}},
        {"trainerStatus": {**FEW["trainerStatus"], "progressPercentage": 101}},
        {"trainerStatus": {**FEW["trainerStatus"], "progressPercentage": 1.5}},
        {"trainerStatus": {**FEW["trainerStatus"], "estimatedRemainingSeconds": 2**31}},
        {"trainerStatus": {**FEW["trainerStatus"], "metrics": [{"name": "loss", "value": 5.5}]}},
        {"trainerStatus": {**FEW["trainerStatus"], "progress": 5}},
    ],
)
def test_the_schema_refuses_a_wrong_body(body: dict[str, Any]) -> None:
    assert problem(body) and not problem(FEW)


@pytest.mark.slow
def test_a_run_in_a_pod_of_a_train_job_reports(
    tmp_path: Path, tiny_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with status_server(tmp_path) as received:
        for name, place in zip(("URL", "CA_CERT", "TOKEN"), received.address, strict=True):
            monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{name}", place)
        config = write_config(tmp_path, tiny_shards, steps=4)
        [(code, text)] = ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(config)))
    assert code == 0 and TOKEN not in text and "Kubeflow" not in text, text
    last = received.posts[-1]
    assert last["progressPercentage"] == 100 and metrics_of(last)["step"] == "4" and not received.problems


# ---- the server is bad, or nobody's --------------------------------------------------------------------------


def test_the_rate_is_bounded_and_only_the_newest_is_posted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "EVERY", 0.4)
    with status_server(tmp_path) as received:
        poster = Poster(received.address)
        began = time.monotonic()
        for number in range(100):
            poster.put(status({"step": number}, None, None, 1.7e9))
            time.sleep(0.01)
        took = time.monotonic() - began
        poster.close()
    gaps = [late - early for early, late in zip(received.times, received.times[1:-1], strict=False)]
    assert 2 <= len(received.posts) <= 2 + took / 0.4 and all(gap > 0.2 for gap in gaps)
    assert metrics_of(received.posts[-1]) == {"step": "99"}


@pytest.fixture
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[StatusServer, str]]:
    """A server that fails in some way, and a part of the warning."""
    own, other = tmp_path / "own", tmp_path / "other"
    match request.param:
        case "down" | "silent":
            write_certificates(own)
            (own / "token").write_text(TOKEN)
            with closing(socket.create_server(("127.0.0.1", 0))) as server:
                url = f"https://127.0.0.1:{server.getsockname()[1]}{PLACE}"
                if request.param == "down":
                    server.close()
                said = "Connection refused" if request.param == "down" else "timed out"
                yield StatusServer(url, str(own / "ca.crt"), str(own / "token")), said
        case "slow":
            with status_server(own, delay=3600) as received:
                yield received.address, "timed out"
        case "another CA's":
            write_certificates(other)
            with status_server(own) as received:
                yield received.address._replace(certificate=str(other / "ca.crt")), "CERTIFICATE_VERIFY_FAILED"
                assert not received.tokens
        case "another host's":
            with status_server(own) as received:
                url = received.address.url.replace("127.0.0.1", "localhost")
                yield received.address._replace(url=url), "certificate is not valid for 'localhost'"
                assert not received.tokens
        case "forbidden":
            with status_server(own, refuses=403) as received:
                yield received.address, "answers 403 'Forbidden'"
        case "moved":
            with status_server(own, refuses=307) as received:
                yield received.address, "answers 307"
        case "no token":
            with status_server(own) as received:
                (own / "token").write_text(f"{TOKEN}\nX-More: yes\n")
                yield received.address, "is no token"
                assert not received.tokens
        case "no files":
            yield StatusServer(f"https://127.0.0.1:1{PLACE}", str(own), str(own)), "No such file"


BAD = ["down", "silent", "slow", "another CA's", "another host's", "forbidden", "moved", "no token", "no files"]


@pytest.mark.parametrize("bad", BAD, indirect=True)
def test_a_bad_server_costs_one_warning(
    bad: tuple[StatusServer, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, said = bad
    monkeypatch.setattr(train_job, "PATIENCE", 0.2 if said == "timed out" else 10.0)  # a busy machine answers late
    job = TrainJob(server, left)
    began = time.monotonic()
    for number in range(1, 200):
        job.write([step(number)])
        job.progress(TrainState(samples=number), [step(number)])
    assert time.monotonic() - began < 2  # a wait for the server would take 0.2 s at each step
    output = first_line(capsys)
    time.sleep(0.25)  # the time of another attempt
    monkeypatch.setattr(train_job, "PATIENCE", 10.0)
    job.write([{"event": "end", "how": "done"}])
    began = time.monotonic()
    job.close()
    assert time.monotonic() - began < 5, "the server failed before, so nobody waits for it"
    [line] = (output + capsys.readouterr().out).splitlines()
    assert line.startswith("lambert: warning: Kubeflow Trainer does not get this run's progress: ")
    assert said in line and line.endswith("; the run goes on without it") and TOKEN not in line and "X-More" not in line


def test_the_pauses_grow_while_the_server_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "EVERY", 0.01)
    monkeypatch.setattr(train_job, "LONGEST_PAUSE", 10.0)
    with status_server(tmp_path, refuses=404) as received:
        poster, began = Poster(received.address), time.monotonic()
        for _ in range(70):
            poster.put(FEW)
            time.sleep(0.01)
        took = time.monotonic() - began
        assert 3 <= len(received.times) <= 2 + math.log2(took / 0.01)  # after 0.02, 0.06, 0.14 s and so on
        poster.close()


def test_a_new_token_and_a_server_that_returns_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with status_server(tmp_path) as received:
        poster = Poster(received.address)
        poster.put(FEW)
        received.wait(lambda got: len(got.posts) == 1)
        Path(received.address.token).rename(tmp_path / "hidden")
        poster.put(FEW)
        warning = first_line(capsys)
        (tmp_path / "token").write_text("renewed")
        poster.put(FEW)
        received.wait(lambda got: len(got.posts) == 2)
        poster.close()
    assert received.tokens == [f"Bearer {TOKEN}", "Bearer renewed"]
    assert "No such file" in warning and not capsys.readouterr().out


def test_the_last_post_is_waited_for_but_not_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "PATIENCE", 20.0)
    with status_server(tmp_path / "slow", delay=0.3) as received:
        poster = Poster(received.address)
        poster.put(FEW)
        poster.close()
        assert len(received.posts) == 1
    monkeypatch.setattr(train_job, "PATIENCE", 0.3)
    with status_server(tmp_path / "hangs", delay=3600) as received:
        poster = Poster(received.address)
        poster.put(FEW)
        began = time.monotonic()
        poster.close()
        assert 0.2 < time.monotonic() - began < 10


# ---- the pod's variables -------------------------------------------------------------------------------------


def test_the_variables_are_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.status_server() is None
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://trainer.kubeflow-system.svc:10443/apis/x/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", "/var/run/secrets/kubeflow/trainer/ca.crt")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", "/var/run/secrets/kubeflow/trainer/token")
    found = world.status_server()
    assert found is not None and found.token.endswith("/token") and found.certificate.endswith("/ca.crt")


@pytest.mark.parametrize(
    "server",
    [
        StatusServer("http://trainer/apis", "ca.crt", "token"),
        StatusServer("https://", "ca.crt", "token"),
        StatusServer("https://user:password@trainer/apis", "ca.crt", "token"),
        StatusServer("https://trainer/apis\r\nX: y", "ca.crt", "token"),
        StatusServer("https://trainer/apis", "", "token"),
        StatusServer("https://trainer/apis", "ca.crt", ""),
    ],
)
def test_variables_of_no_use_cost_one_warning(server: StatusServer, capsys: pytest.CaptureFixture[str]) -> None:
    job = TrainJob(server, left)
    job.progress(TrainState(), [step(1)])
    job.close()
    [line] = capsys.readouterr().out.splitlines()
    assert "KUBEFLOW_TRAINER_SERVER_URL, _CA_CERT and _TOKEN must be an https address and two files" in line


def test_without_a_server_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    job = TrainJob(None, left)
    job.write([{"event": "start", "step": 0}])
    job.progress(TrainState(), [step(1)])
    job.close()
    assert not capsys.readouterr().out
