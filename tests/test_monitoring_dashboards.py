"""The dashboards: mistakes that Grafana would not accept, and every name in a query checked against the real series."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client import Counter, Histogram, Info
from prometheus_client.parser import text_string_to_metric_families as families

from data_prep.metrics import BuildMetrics, write_textfile
from deploy.monitoring.dashboards import DASHBOARDS, DCGM_COUNTERS, FOLDER, SOURCE, queries, substitute, text
from deploy.monitoring.gpus import DCGM, DCGM_LABELS, counters
from tests.helpers.ranks import ROOT
from trainer.monitor.exporter import NODE_SERIES, RUN_SERIES

# Ids of units as Grafana 11's @grafana/data has them, of those that make sense here; count: takes any noun.
UNITS = {"none", "string", "locale", "sci", "percentunit", "s", "dtdurations", "bytes", "Bps", "cps", "flops", "hertz"}
UNITS |= {"celsius", "watt"}
KINDS = {"stat", "timeseries", "bargauge", "table", "state-timeline"}
SCRAPED = ("instance", "job")  # Prometheus adds them to all that it scrapes
INFO_LABELS = {"lambert_rank_info": ("node", "gpu_uuid")}  # labels that are values: no table has them
Labels = dict[str, tuple[str, ...]]  # each with the values that it can have; none: any
Json = dict[str, Any]


@cache
def load(name: str) -> Json:
    loaded: Json = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def panels(name: str) -> list[Json]:
    return [panel for panel in load(name)["panels"] if panel["type"] != "row"]


@cache
def rules(file: str, kind: str) -> dict[str, str]:
    """Expressions of the recording rules ("record") or the alerts ("alert") by their names."""
    found = yaml.safe_load((ROOT / "deploy/monitoring" / file).read_text(encoding="utf-8"))
    return {rule[kind]: rule["expr"] for group in found["groups"] for rule in group["rules"]}


def walk(expr: str) -> list[promql.Expr]:
    """All nodes of an expression; raises ValueError if it is not one."""
    nodes: list[promql.Expr] = []
    promql.walk(promql.parse(substitute(expr, "r", dataset="d")), nodes.append)
    return nodes


def selectors(expr: str) -> list[promql.VectorSelector]:
    return [node for node in walk(expr) if isinstance(node, promql.VectorSelector)]


def expressions(name: str) -> list[str]:
    """The expressions in a dashboard's panels, annotations and variables."""
    page = load(name)
    looked_up = [variable["query"]["query"] for variable in page["templating"]["list"] if variable["type"] == "query"]
    sources = [re.fullmatch(r"label_values\((.+), \w+\)", each) for each in looked_up]
    marks = [each["target"]["expr"] for each in page["annotations"]["list"]]
    return [expr for _, expr in queries(page)] + marks + [source[1] for source in sources if source]


# ---- what Grafana asks for -------------------------------------------------------------------------------------


def test_the_files_are_what_the_tables_say() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.json" for name in DASHBOARDS}
    for name in DASHBOARDS:
        written = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
        assert written == text(name), "run python -m deploy.monitoring.dashboards"
    assert DCGM_COUNTERS.read_text(encoding="utf-8") == counters()


def test_ids_are_unique() -> None:
    uids = [load(name)["uid"] for name in DASHBOARDS]
    assert len(set(uids)) == len(uids) and all(re.fullmatch(r"[a-z-]{8,40}", uid) for uid in uids)
    for name in DASHBOARDS:
        ids = [panel["id"] for panel in load(name)["panels"]]
        titles = [panel["title"] for panel in panels(name)]
        assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_panel_covers_another(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in load(name)["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} covers {taken[cell]}"
            taken[cell] = panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_says_what_it_shows_and_what_is_good(name: str) -> None:
    for panel in panels(name):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or re.fullmatch(r"count:[A-Za-z]+(/s)?", unit), panel["title"]
        assert panel["type"] in KINDS and panel["targets"], panel["title"]
        assert "Good: " in panel["description"], panel["title"]
        named = re.findall(r"^Alert (\w+): docs/runbooks/(\w+)\.md\s*$", panel["description"], re.MULTILINE)
        assert named and all(alert == runbook for alert, runbook in named), panel["title"]
        assert {alert for alert, _ in named} <= rules("alerts.yml", "alert").keys(), panel["title"]


def test_every_alert_has_panels_to_look_at() -> None:
    described = "".join(panel["description"] for name in DASHBOARDS for panel in panels(name))
    assert not [alert for alert in rules("alerts.yml", "alert") if f"Alert {alert}:" not in described]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_data_source_is_named(name: str) -> None:
    def sources(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from [value["datasource"]] if "datasource" in value else []
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from sources(inner)

    found = list(sources(load(name)))
    assert len(found) > len(panels(name)) and all(source == SOURCE for source in found)
    chosen = load(name)["templating"]["list"][0]
    assert (chosen["name"], chosen["type"], chosen["query"]) == ("datasource", "datasource", "prometheus")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_of_a_query_is_one_of_its_page(name: str) -> None:
    used = {variable for expr in expressions(name) for variable in re.findall(r"\$(\w+)", expr)}
    assert used - {"__rate_interval", "1"} == set(DASHBOARDS[name].variables)  # $1 is label_replace's


def test_a_query_is_filled_in_as_grafana_does() -> None:
    filled = substitute('label_replace(a{run="$run"}[$__rate_interval], "b", "$1", "c", "$rank")', "r", "4m")
    assert filled == 'label_replace(a{run="r"}[4m], "b", "$1", "c", ".*")'


# ---- queries ---------------------------------------------------------------------------------------------------


@cache
def known() -> dict[str, Labels]:
    """Every series that a query may use, with its labels."""
    found: dict[str, Labels] = {series: dict.fromkeys(DCGM_LABELS, ()) for series in DCGM}
    found |= {record: {"run": ()} if record.startswith("run:") else {} for record in rules("rules.yml", "record")}
    found |= exported() | prepared() | {"up": {}}
    found["ALERTS"] = {"alertname": tuple(rules("alerts.yml", "alert")), "alertstate": ("pending", "firing"), "run": ()}
    return {series: labels | dict.fromkeys(SCRAPED, ()) for series, labels in found.items()}


@cache
def exported() -> dict[str, Labels]:
    """The series of a run, out of the exporter's table."""
    found = {}
    endings = {Counter: ("_total",), Info: ("_info",), Histogram: ("_bucket", "_count", "_sum")}
    for name, (kind, labels, _) in (RUN_SERIES | NODE_SERIES).items():
        for series in (f"lambert_{name}{ending}" for ending in endings.get(kind, ("",))):
            extra = ("le",) if series.endswith("_bucket") else INFO_LABELS.get(series, ())
            found[series] = {"run": (), **labels, **dict.fromkeys(extra, ())}
    return found


@cache
def prepared() -> dict[str, Labels]:
    """The series of data preparation, from a build's last metrics, and those that only a Pushgateway gets."""
    found: dict[str, Labels] = {"lambert_prep_last_failure_timestamp_seconds": {"dataset": ()}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "build.prom")
        write_textfile(BuildMetrics("d", succeeded=1.0), path)
        samples = [sample for family in families(path.read_text()) for sample in family.samples]
    for sample in samples:
        labels = found.setdefault(sample.name, {"dataset": ()})
        labels |= {label: (*labels.get(label, ()), value) for label, value in sample.labels.items() if label == "stage"}
    return found


def counts(series: str) -> bool:
    """Whether the series only grows, except for restarts."""
    if series in DCGM:
        return DCGM[series][0] == "counter"
    return series in exported() | prepared() and series.endswith(("_total", "_bucket", "_count", "_sum"))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_queries_ask_for_series_that_exist(name: str) -> None:
    for expr in expressions(name):
        for selector in selectors(expr):
            assert selector.name in known(), expr
            labels = known()[selector.name]
            for matcher in selector.matchers.matchers:
                assert matcher.name in labels, f"{selector.name} has no label {matcher.name}: {expr}"
                values = labels[matcher.name]
                for wanted in matcher.value.split("|") if values else ():
                    assert any(re.fullmatch(wanted, value) for value in values), f"{matcher.name} is never {wanted}"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_queries_sum_and_join_by_labels_that_exist(name: str) -> None:
    for expr in expressions(name):
        labels = {label for selector in selectors(expr) for label in known()[selector.name or ""]}
        labels |= set(re.findall(r'label_replace\(.+?, "(\w+)", "', expr))
        named: set[str] = set()
        for node in walk(expr):
            if isinstance(node, promql.AggregateExpr) and node.modifier:
                named |= set(node.modifier.labels)
            elif isinstance(node, promql.BinaryExpr) and node.modifier and node.modifier.matching:
                named |= {*node.modifier.matching.labels, *(node.modifier.group_labels or ())}
        assert named <= labels, expr


@pytest.mark.parametrize("name", DASHBOARDS)
def test_queries_take_rates_of_counters_before_they_sum(name: str) -> None:
    """A counter falls at a restart. Only a data build shows its counters directly, because it never restarts."""
    for expr in expressions(name):
        rated = re.findall(r"\b(?:rate|increase)\((\w+)(?:\{[^}]*\})?\[\$__rate_interval\]\)", expr)
        assert len(rated) == len(re.findall(r"\b\w*(?:rate|increase|delta|deriv)\(", expr)), expr
        assert all(counts(series) for series in rated), expr
        plain = {selector.name or "" for selector in selectors(expr)} - set(rated)
        assert not [series for series in plain if counts(series) and series not in prepared()], expr
        assert not [node for node in walk(expr) if isinstance(node, promql.SubqueryExpr)], expr


def test_every_series_is_on_a_dashboard() -> None:
    """Shown directly, or through a recording rule."""
    shown = {selector.name or "" for name in DASHBOARDS for expr in expressions(name) for selector in selectors(expr)}
    recorded = rules("rules.yml", "record")
    shown |= {selector.name or "" for rule in shown & recorded.keys() for selector in selectors(recorded[rule])}
    histograms = {series.removesuffix("_bucket") for series in exported() if series.endswith("_bucket")}
    sums = {f"{histogram}_sum" for histogram in histograms}  # of times, which lambert_time_seconds_total splits
    assert not (exported() | prepared()).keys() - shown - sums


def test_the_gpu_page_and_the_alerts_need_the_fields_of_dcgm_that_are_listed() -> None:
    exprs = [expr for _, expr in queries(load("gpu"))] + list(rules("alerts.yml", "alert").values())
    assert {field for expr in exprs for field in re.findall(r"DCGM_\w+", expr)} == DCGM.keys()
    assert all(line.count(",") == 2 for line in counters().splitlines())  # the help is the last of three columns
