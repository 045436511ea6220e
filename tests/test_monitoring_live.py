"""Monitoring on a real run: two nodes, a real Prometheus with the project's rules, and faults that reach a webhook.

One run is watched from its start to its end, through a straggler, a stall, a kill, and a restart with its ranks on
each other's node. Meanwhile, a second one diverges. The fixtures take the run through these events in order; the tests
look at what Prometheus recorded. Alerts are awaited at the pace of :func:`~live_monitoring.scaled`, where a minute
becomes a second.
"""

from __future__ import annotations

import math
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.monitoring import pictures
from deploy.monitoring.dashboards import ANNOTATIONS, DASHBOARDS, queries, substitute
from deploy.monitoring.dashboards import page as dashboard
from tests.helpers import ranks
from tests.helpers.live_monitoring import MONITORING, Alert, scaled, wait_until
from tests.helpers.programs import program
from tests.helpers.watched_run import (
    DATASET,
    FIRST,
    PORTS,
    RUN,
    SICK,
    Site,
    prepare,
    said,
    slowed,
    step_of,
    watched,
    write_gpus,
)
from trainer.monitor.metrics_log import read_lines

pytestmark = pytest.mark.slow

FAULTS = {  # planted by the fixture that waits for the alert
    "LambertStraggler": "one of two ranks stands still four fifths of the time (SIGSTOP, SIGCONT)",
    "LambertGpuError": "XID 79 of the second rank's GPU, said by a stand-in for dcgm-exporter",
    "LambertStalled": "one of two ranks stands still (SIGSTOP)",
    "LambertAbsent": "all ranks killed (SIGKILL)",
    "LambertNonFinite": "the second phase has a learning rate of 100",
    "LambertFailed": "the same: the run ends itself",
}
COUNTED = {  # series, where they are those of one attempt: key of a step's JSON line
    'lambert_tokens_total{kind="valid", WHERE}': "tokens",
    "lambert_targets_total{WHERE}": "targets",
    "lambert_samples_total{WHERE}": "batch",
    "lambert_model_flops_total{WHERE}": "flops",
    "lambert_step_duration_seconds_sum{WHERE}": "seconds",
}
Series = tuple[str, frozenset[tuple[str, str]]]
RESTARTED = 100  # steps of the second attempt
QUIET = 6.0  # seconds without an alert after the end, pending ones included; LambertAbsent would be within two


@dataclass(frozen=True)
class Trained:
    """The run's state while all is well."""

    early: list[str]  # what each node said soon after the first phase
    late: list[str]  # and at least 60 steps later
    at: float  # Unix time


@dataclass(frozen=True)
class Restarted:
    """The run's state before and after the kill."""

    killed: float  # Unix time
    step: int  # last one written before
    checkpoint: int  # step that the second attempt went on from
    said: list[str]  # what the nodes' exporters say
    at: float  # Unix time at which the second attempt had been running for a while


@dataclass(frozen=True)
class Ended:
    """The run's state after it was done."""

    at: float  # Unix time at which its processes were gone
    quiet: float  # until then Prometheus has evaluated all rules since


# ---- the story -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with watched(tmp_path_factory.mktemp("site"), tiny_shards) as site:
        yield site


@pytest.fixture(scope="module")
def trained(site: Site) -> Trained:
    site.running = site.start(RUN, site.pair)
    prepare(site)
    early = site.wait_until(
        "there is a checkpoint", lambda: said(site, FIRST[RUN] + 1, "lambert_checkpoint_size_bytes")
    )
    late = site.wait_until("it took 60 steps more", lambda: said(site, step_of(early[0]) + 60))
    seen = f'count_over_time(fast_run:lambert_rank_skew:ratio_rate5m{{run="{RUN}"}}[1m])'
    site.wait_until("all rules have values", lambda: site.prometheus.value(seen) >= 4)
    return Trained(early, late, time.time())


@pytest.fixture(scope="module")
def straggled(site: Site, trained: Trained) -> Alert:
    """The second rank was slow for a while."""
    site.wait_until(
        "the ranks are even", lambda: not [a for a in site.prometheus.alerts(RUN) if a[0] == "LambertStraggler"]
    )
    planted = time.time()
    with slowed(site.running[1]):
        return site.reaches("LambertStraggler", RUN, planted)


@pytest.fixture(scope="module")
def stalled(site: Site, straggled: Alert) -> Alert:
    """The second rank hangs and never continues. Meanwhile a GPU has an error, and another run diverges."""
    site.running[1].send_signal(signal.SIGSTOP)
    planted = time.time()
    write_gpus(site.folder, xid=79)
    sick = site.start(SICK, site.pair[:1])
    site.reaches("LambertGpuError", RUN, planted)
    alert = site.reaches("LambertStalled", RUN, planted)
    [(code, output)] = ranks.finish(sick)
    assert code == 2 and "diverged" in output
    return alert


@pytest.fixture(scope="module")
def restarted(site: Site, stalled: Alert) -> Restarted:
    """The run was killed, and came back, each rank on the other's node."""
    killed = time.time()
    for rank in site.running:
        rank.kill()
    ranks.finish(site.running)
    write_gpus(site.folder, xid=0)
    site.reaches("LambertAbsent", RUN, killed)
    sick = read_lines(site.folder / SICK / "metrics.jsonl")
    diverged = max(line["time"] for line in sick if line["event"] == "step" and line["phase"] == 0)
    for name in ("LambertNonFinite", "LambertFailed"):
        site.reaches(name, SICK, diverged)
    checkpoint = max(int(path.parent.name[5:]) for path in (site.folder / RUN).glob("step-*/checkpoint.json"))
    step = max(line["step"] for line in site.lines("step"))
    steps = f"phases.1.steps={checkpoint + RESTARTED - FIRST[RUN]}"
    site.running = site.start(RUN, site.pair[::-1], steps)
    later = site.wait_until("it goes on", lambda: said(site) if site.step() > checkpoint + 20 else [])
    return Restarted(killed, step, checkpoint, later, time.time())


@pytest.fixture(scope="module")
def ended(site: Site, restarted: Restarted) -> Ended:
    """The run was done, and for a while nothing has happened."""
    assert [code for code, _ in ranks.finish(site.running)] == [0, 0], site.running[0].log.read_text()
    at = time.time()
    wait_until("all rules were evaluated again", lambda: site.prometheus.evaluated() > at + QUIET)
    return Ended(at, site.prometheus.evaluated())


def series(text: str) -> set[Series]:
    """The series of an exporter's page."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {named(sample.name, sample.labels) for sample in samples}


def named(name: str, labels: dict[str, str], drop: tuple[str, ...] = ("gpu_uuid",)) -> Series:
    """A series without some of its labels, and without empty ones, which are the same as missing ones."""
    return name, frozenset((label, value) for label, value in labels.items() if value and label not in drop)


# ---- the exporters ---------------------------------------------------------------------------------------------


def test_promtool_finds_nothing_to_fix(trained: Trained) -> None:
    for text in trained.late:
        checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_number_of_series_is_known_beforehand_for_1024_ranks(trained: Trained) -> None:
    for early, late in zip(trained.early, trained.late, strict=True):
        assert step_of(late) == step_of(early) == -1 or step_of(late) >= step_of(early) + 60
        assert series(early) == series(late)
    first, second = (series(text) for text in trained.late)
    of_rank = {named(name, dict(labels) | {"rank": "0"}, ("node",)) for name, labels in second}
    first = {named(name, dict(labels), ("node",)) for name, labels in first}
    of_run = first - of_rank
    assert len(of_rank) == len(second) and of_rank < first
    assert not [name for name, labels in of_run if "rank" in dict(labels)]
    ranks, nodes = 1024, 128
    total = len(of_run) + ranks * len(of_rank)
    print(f"series: {len(of_run)} of a run, {len(of_rank)} of a rank: {total:,} for {ranks:,} ranks,", end=" ")
    print(f"and Prometheus' own 5 for each of {nodes} nodes")
    assert total < 10_000


# ---- what people look at ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_of_a_dashboard_has_an_answer(site: Site, trained: Trained, name: str) -> None:
    empty = []
    for title, expr in queries(dashboard(DASHBOARDS[name])):
        found = site.prometheus.vector(substitute(expr, RUN, dataset=DATASET), trained.at)
        if not [value for _, value in found if not math.isnan(value)]:
            empty.append((title, expr))
    assert not empty


@pytest.mark.parametrize("file", ["rules.yml", "alerts.yml"])
def test_scaled_rules_differ_in_time_alone(file: str) -> None:
    text = (MONITORING / file).read_text("utf-8")
    fast = scaled(text)
    kind = "alert: " if file == "alerts.yml" else "record: "
    assert fast.count("pace: fast") == (text.count(kind) if file == "alerts.yml" else 0)
    time, name = r"\b\d+(ms|s|m|h)\b|\b(600|10)\b", r"fast_(?=run:|prep:)|pace: fast, "
    assert re.sub(name, "", re.sub(time, "T", fast)) == re.sub(time, "T", text)


def test_counters_are_the_sums_of_the_json_lines(site: Site, ended: Ended) -> None:
    """This covers the whole second attempt with its last steps: the end was scraped."""
    second = [line for line in site.lines("step") if line["restarts"] == 1]
    assert len(second) == RESTARTED
    where = f'run="{RUN}", instance="{site.pair[1].address}:{PORTS[RUN]}"'
    for name, key in COUNTED.items():
        counted = f"sum(last_over_time({name.replace('WHERE', where)}[1m]))"
        assert site.prometheus.value(counted, ended.at) == sum(line[key] for line in second), name


# ---- faults ----------------------------------------------------------------------------------------------------


def test_faults_reach_the_webhook(site: Site, ended: Ended) -> None:
    print("| alert | planted fault | seconds to the webhook, a minute being a second |\n|---|---|---|")
    for name, fault in FAULTS.items():
        planted, alert = site.reached[name]
        print(f"| {name} | {fault} | {alert.at - planted:.1f} |")
        assert alert.labels["severity"] in ("page", "ticket")
        assert (ranks.ROOT / alert.annotations["runbook_url"]).is_file()
        assert alert.labels["run"] in alert.annotations["summary"]
    assert site.reached.keys() == FAULTS.keys()


def test_the_guilty_are_named(site: Site, stalled: Alert) -> None:
    assert "It is rank 1." in site.reached["LambertStraggler"][1].annotations["description"]
    gpu = site.reached["LambertGpuError"][1].labels
    assert (gpu["rank"], gpu["node"], gpu["gpu_uuid"]) == ("1", site.pair[1].namespace, "GPU-1")


# ---- a kill and a restart --------------------------------------------------------------------------------------


def test_a_restart_leaves_no_dead_series(site: Site, restarted: Restarted) -> None:
    alive, beside = series("\n".join(restarted.said)), ("__name__", "instance", "job", "gpu_uuid")
    known = site.prometheus.vector(f'{{run="{RUN}", job="trainer"}}', restarted.at)
    assert len(known) > 50
    assert {named(labels["__name__"], labels, beside) for labels, _ in known} <= alive
    for title, expr in [("all", f'{{run="{RUN}", job="trainer"}}'), *queries(dashboard(DASHBOARDS["overview"]))]:
        found = site.prometheus.vector(substitute(expr, RUN), restarted.at)
        shown = [named(labels.get("__name__", ""), labels, beside) for labels, _ in found]
        assert len(shown) == len(set(shown)), title


def test_a_run_goes_on_where_it_was(site: Site, restarted: Restarted, ended: Ended) -> None:
    run, killed, checkpoint = f'{{run="{RUN}"}}', restarted.killed, restarted.checkpoint
    [(_, before)] = site.prometheus.matrix(f"max by (run) (lambert_step{run})", killed - 600, killed)
    [(_, after)] = site.prometheus.matrix(f"max by (run) (lambert_step{run})", killed + 5, ended.at)
    for points in ([step for _, step in before], [step for _, step in after]):
        assert points == sorted(points)
    assert before[-1][1] >= restarted.step
    assert checkpoint <= after[0][1] < after[-1][1] == checkpoint + RESTARTED
    assert site.prometheus.value(f"max by (run) (lambert_restarts{run})", restarted.at) == 1
    lost = site.prometheus.value(f"max by (run) (lambert_rolled_back_steps{run})", restarted.at)
    assert lost == restarted.step - checkpoint
    marks = site.prometheus.matrix(scaled(substitute(ANNOTATIONS["Restarts"][0], RUN)), killed, ended.at)
    assert len(marks) == 1


def test_a_restart_spoils_no_rate(site: Site, ended: Ended) -> None:
    """No rate is negative or above the run's real one, though counters start again on another node."""
    lines = [(line["time"], line["tokens"], line["flops"]) for line in site.lines("step")]
    for rule, column in {"tokens:rate5m": 1, "steps:rate5m": 0, "mfu:ratio_rate5m": 2}.items():
        amounts = [(line[0], float(line[column]) if column else 1.0) for line in lines]
        most = 2 * fastest(amounts, 5.0) / (2 * 0.01e12 if column == 2 else 1)
        for prefix in ("run", "fast_run"):
            [(_, points)] = site.prometheus.matrix(f'{prefix}:lambert_{rule}{{run="{RUN}"}}', ended.at - 900, ended.at)
            assert len(points) > 20
            assert all(0 <= value <= most for _, value in points), (prefix, rule, most)
    for ratio in ("goodput", "padding", "data_wait"):
        [(_, points)] = site.prometheus.matrix(
            f'fast_run:lambert_{ratio}:ratio_rate5m{{run="{RUN}"}}', ended.at - 900, ended.at
        )
        assert all(0 <= value <= 1.000001 for _, value in points), ratio


def fastest(amounts: list[tuple[float, float]], window: float) -> float:
    """The largest amount a second in any window, from (Unix time, amount)."""
    most, total, first = 0.0, 0.0, 0
    for at, amount in amounts:
        total += amount
        while amounts[first][0] <= at - window:
            total -= amounts[first][1]
            first += 1
        most = max(most, total / window)
    return most


# ---- the end ---------------------------------------------------------------------------------------------------


def test_the_end_was_scraped_before_the_endpoint_went(site: Site, ended: Ended) -> None:
    run = f'run="{RUN}"'
    assert site.prometheus.value(f'max(last_over_time(lambert_run_state{{{run}, state="done"}}[1m]))', ended.at) == 1
    said = site.prometheus.value(f"max(last_over_time(lambert_ended_timestamp_seconds{{{run}}}[1m]))", ended.at)
    assert ended.at - 60 < said < ended.at
    for node in site.pair:
        assert site.prometheus.value(f'up{{instance="{node.address}:{PORTS[RUN]}"}}', ended.quiet) == 0


def test_nothing_fires_after_a_good_end(site: Site, restarted: Restarted, ended: Ended) -> None:
    """No alert, original or scaled, is pending or firing. After the kill they were."""
    absent = f'ALERTS{{run="{RUN}", alertname="LambertAbsent"'
    for pace, state in (("", "pending"), ("fast", "firing")):
        assert site.prometheus.matrix(
            f'{absent}, pace="{pace}", alertstate="{state}"}}', restarted.killed, restarted.at
        )
    assert not site.prometheus.matrix(f'ALERTS{{run="{RUN}"}}', ended.at + 3, ended.quiet)
    assert not site.prometheus.alerts(RUN)


# ---- pictures --------------------------------------------------------------------------------------------------


def test_the_main_panels_are_drawn(site: Site, ended: Ended, tmp_path: Path) -> None:
    url, out = site.prometheus.url, tmp_path / "live.png"
    assert pictures.main([url, RUN, str(out), "--scrape", "1", "--hours", "1"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000
    span = pictures.life(url, RUN, 1, 1)
    for panel in pictures.chosen():
        found = pictures.curves(url, panel, RUN, span)
        assert any(not math.isnan(value) for curve in found for value in curve.values), panel.title


def test_no_picture_is_one_line(site: Site, ended: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = f"http://127.0.0.1:{ranks.free_port()}"
    none = {(nobody, RUN): "no Prometheus answers", (site.prometheus.url, "other"): "has no run 'other'"}
    for (url, run), reason in none.items():
        assert pictures.main([url, run, str(tmp_path / "none.png")]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
