"""Recording rules, alerts and runbooks: promtool's unit tests pass, and every name in them exists.

The unit tests are promtool's own, in deploy/monitoring/tests: ``promtool test rules deploy/monitoring/tests/*.yml``.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import promql_parser as promql
import pytest
import yaml

from tests.helpers.programs import program
from tests.helpers.ranks import ROOT
from tests.test_monitoring_dashboards import counts, known, selectors, walk
from trainer.monitor.metrics import MetricsConfig
from trainer.run.config import Config

FOLDER = ROOT / "deploy/monitoring"
RUNBOOKS = ROOT / "docs/runbooks"
UNIT_TESTS = sorted((FOLDER / "tests").glob("*.yml"))
SECONDS = {"s": 1, "m": 60, "h": 3600}


@cache
def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in load(name)["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
RULES = {rule["record"]: rule for rule in rules("rules.yml")}


def queries() -> dict[str, str]:
    """Every expression: of the rules, the alerts, and what the alerts' texts look up."""
    found = {name: rule["expr"] for name, rule in (RULES | ALERTS).items()}
    for name, rule in ALERTS.items():
        for number, text in enumerate(re.findall(r'printf "(.+?[^\\])"', " ".join(rule["annotations"].values()))):
            found[f"{name} {number}"] = text.replace("%q", '"r"').replace('\\"', '"')
    return found


def seconds(duration: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([smh])", duration).groups()  # type: ignore[union-attr]
    return int(number) * SECONDS[unit]


def run(*command: str) -> str:
    """The output of a command; fails if the command does."""
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- what Prometheus and Alertmanager say ----------------------------------------------------------------------


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    assert "SUCCESS" in run(program("promtool"), "test", "rules", str(path))


def test_an_expectation_that_is_not_met_fails(tmp_path: Path) -> None:
    """The unit tests can fail: one does after a limit is moved."""
    for name in ("rules.yml", "alerts.yml", "tests/checkpoints.yml"):
        text = (FOLDER / name).read_text(encoding="utf-8").replace("> 2 * max", "> 4 * max")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(AssertionError, match="LambertCheckpointStale"):
        run(program("promtool"), "test", "rules", str(tmp_path / "tests/checkpoints.yml"))


def test_promtool_takes_the_configuration() -> None:
    said = run(program("promtool"), "check", "config", "prometheus.yml")
    assert f"{len(RULES)} rules found" in said and f"{len(ALERTS)} rules found" in said


def test_amtool_takes_the_configuration(tmp_path: Path) -> None:
    """Debian's Alertmanager is older than url_file (0.26), so that it gets an address in its place."""
    text = (FOLDER / "alertmanager.yml").read_text(encoding="utf-8")
    older, lines = re.subn(r"url_file: \S+", "url: http://localhost:9095/", text)
    assert lines == 1
    path = tmp_path / "alertmanager.yml"
    path.write_text(older, encoding="utf-8")
    assert "1 inhibit rules" in run(program("amtool"), "check-config", str(path))
    for severity in ("page", "ticket"):
        routes = [program("amtool"), "config", "routes", "test", "--config.file", str(path)]
        assert run(*routes, f"severity={severity}").strip() == "webhook"


# ---- what is promised ------------------------------------------------------------------------------------------


def test_every_alert_has_a_test_that_fires_it_and_one_that_does_not() -> None:
    fires: dict[bool, set[str]] = {True: set(), False: set()}
    for path in UNIT_TESTS:
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for case in test.get("alert_rule_test", []):
                fires[bool(case["exp_alerts"])].add(case["alertname"])
    assert fires[True] == fires[False] == ALERTS.keys()


def test_every_recording_rule_is_tested() -> None:
    tested = "".join(path.read_text(encoding="utf-8") for path in UNIT_TESTS)
    used = "".join(rule["expr"] for rule in ALERTS.values())
    assert not [name for name in RULES if name not in tested and name not in used]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_urgent_it_is_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"})
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
    text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name} · {rule['labels']['severity']}\n")


@pytest.mark.parametrize("name", ALERTS)
def test_lost_scrapes_raise_no_alert(name: str) -> None:
    """Each alert waits for longer than four scrapes, or reports an event, which stays true."""
    patience = 4 * seconds(load("prometheus.yml")["global"]["scrape_interval"])
    happened = re.search(r"max_over_time|min_over_time|increase", ALERTS[name]["expr"])
    assert happened or seconds(ALERTS[name].get("for", "0s")) >= patience


def test_inhibitions_name_alerts() -> None:
    [rule] = load("alertmanager.yml")["inhibit_rules"]
    for matcher in rule["source_matchers"] + rule["target_matchers"]:
        names = re.fullmatch(r'alertname =~ "(.+)"', matcher)
        assert names and set(names[1].split("|")) < ALERTS.keys()
    assert rule["equal"] == ["run"]


def test_a_run_that_ends_waits_longer_than_the_next_scrape_takes() -> None:
    assert seconds(load("prometheus.yml")["global"]["scrape_interval"]) * 2 <= MetricsConfig().linger_seconds


# ---- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", queries())
def test_series_and_labels_exist(name: str) -> None:
    expr = queries()[name]
    labels = set(re.findall(r'"(\w+)", "\$1"', expr))  # made by label_replace
    for selector in selectors(expr):
        assert selector.name in known(), expr
        labels |= known()[selector.name].keys()
        for matcher in selector.matchers.matchers:
            assert matcher.name in known()[selector.name], f"{selector.name} has no label {matcher.name}"
            values = known()[selector.name][matcher.name]
            assert not values or set(matcher.value.split("|")) <= set(values), f"{matcher.name} is never that"
    for node in walk(expr):
        if isinstance(node, promql.AggregateExpr) and node.modifier:
            assert set(node.modifier.labels) <= labels, expr
        elif isinstance(node, promql.BinaryExpr) and node.modifier and node.modifier.matching:
            assert {*node.modifier.matching.labels, *(node.modifier.group_labels or ())} <= labels, expr


@pytest.mark.parametrize("name", queries())
def test_a_restart_spoils_no_number(name: str) -> None:
    """Rates before sums, over windows of four scrapes at least; no other use of a counter but its highest value.

    The buckets of all steps since the start are the one exception: a quantile is of their ratio.
    """
    expr = queries()[name]
    assert not [node for node in walk(expr) if isinstance(node, promql.SubqueryExpr)]
    window = 4 * seconds(load("prometheus.yml")["global"]["scrape_interval"])
    used = re.findall(r"\b(\w+)\((lambert_\w+|DCGM_\w+)(?:\{[^}]*\})?\[(\w+)\]\)", expr)
    assert all(seconds(duration) >= window for _, _, duration in used)
    safe = [series for function, series, _ in used if function in ("rate", "increase", "max_over_time")]
    for selector in selectors(expr):
        if counts(selector.name or ""):
            assert selector.name in safe or selector.name == "lambert_step_duration_seconds_bucket", expr
    assert all(counts(series) for function, series, _ in used if function in ("rate", "increase"))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_named_by_what_it_keeps(name: str) -> None:
    assert re.fullmatch(r"(run|prep):lambert_\w+:\w+", name)
    sums = [node for node in walk(RULES[name]["expr"]) if isinstance(node, promql.AggregateExpr)]
    if name.startswith("run:"):
        assert sums and list(sums[0].modifier.labels) == ["run"]  # type: ignore[union-attr]


# ---- runbooks --------------------------------------------------------------------------------------------------


def test_every_runbook_is_an_alerts() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_a_runbook_sends_nobody_to_what_is_not_there(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```promql\n(.+?)```", text, re.DOTALL)
    for line in block.splitlines():
        assert all(selector.name in known() for selector in selectors(line)), line
    pages = [json.loads(path.read_text(encoding="utf-8")) for path in (FOLDER / "dashboards").glob("*.json")]
    panels = {page["title"]: {panel["title"] for panel in page["panels"]} for page in pages}
    sent = re.findall(r'[Dd]ashboard\s"([^"]+)":\s+((?:"[^"]+"(?:,\s+)?)+)', text)
    assert sent and text.count("ashboard") == len(sent)
    for title, named in sent:
        assert set(re.findall(r'"([^"]+)"', named)) <= panels[title]
    for link in re.findall(r"\]\((\w+)\.md\)", text):
        assert link in ALERTS and link != name
    sections = {field: {each.name for each in fields(kind)} for field, kind in config_sections().items()}
    for section, key in re.findall(rf"`({'|'.join(sections)})\.(\w+)", text):
        assert key in sections[section], f"{section}.{key}"


@cache
def config_sections() -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(Config).items() if name != "phases"}
