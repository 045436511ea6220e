"""Grafana's dashboards out of the tables beside: ``python -m deploy.monitoring.dashboards`` writes them all.

The JSON is Grafana's classic model, which Grafana 11 and later load from disk. It is generated, and not edited.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from deploy.monitoring.gpus import GPUS, counters
from deploy.monitoring.panels import Panel, Rows
from deploy.monitoring.tables import DATA_PREP, NODES, OVERVIEW

FOLDER = Path(__file__).parent / "dashboards"
COUNTERS = FOLDER.parent / "dcgm.csv"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
HEIGHTS = {"stat": 4, "table": 6, "state-timeline": 6}  # of Grafana's units; 8 for the rest
SCHEMA = 39  # of Grafana 11.0; later ones migrate it
NO_VALUES = {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True}}}
LINKS = {  # to all dashboards with the tag, for the same run and the same time
    "type": "dashboards",
    "title": "Lambert",
    "tags": ["lambert"],
    "includeVars": True,
    "keepTime": True,
    "asDropdown": False,
    "targetBlank": False,
    "icon": "external link",
    "tooltip": "",
}
Json = dict[str, Any]


class Variable(NamedTuple):
    """A choice on top of the page."""

    query: str
    all: bool  # whether one may choose all of them at once, as is the case at first


class Dashboard(NamedTuple):
    """``uid`` is in links and bookmarks: it never changes."""

    uid: str
    title: str
    text: str
    variables: tuple[str, ...]
    rows: Rows


VARIABLES = {
    "run": Variable("label_values(lambert_step, run)", False),
    "rank": Variable('label_values(lambert_rank_info{run="$run"}, rank)', True),
    "dataset": Variable("label_values(lambert_prep_build_info, dataset)", False),
}
# Marks on the time axis. The first compares with the last hour, since a run may come back at another instance.
MARKS = {
    "Restarts": (
        'max by (run) (lambert_restarts{run="$run"}) '
        '> max by (run) (max_over_time(lambert_restarts{run="$run"}[1h] offset 1m))',
        "orange",
    ),
    "Alerts": ('count by (alertname) (ALERTS{run="$run", alertstate="firing"})', "red"),
}
DASHBOARDS = {
    "overview": Dashboard(
        "lambert-overview", "Lambert: run", "Is it running, learning, fast and safe?", ("run",), OVERVIEW
    ),
    "nodes": Dashboard(
        "lambert-nodes", "Lambert: nodes and stragglers", "Who holds the others up?", ("run", "rank"), NODES
    ),
    "data_prep": Dashboard(
        "lambert-data-prep", "Lambert: data preparation", "How far is the build?", ("dataset",), DATA_PREP
    ),
    "gpu": Dashboard(
        "lambert-gpu", "Lambert: GPUs", "Are the run's GPUs busy and well? Needs dcgm-exporter.", ("run", "rank"), GPUS
    ),
}


def page(made: Dashboard) -> Json:
    """A dashboard as Grafana has it."""
    on_runs = "run" in made.variables
    return {
        "uid": made.uid,
        "title": made.title,
        "description": made.text,
        "tags": ["lambert"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "graphTooltip": 1,  # one cross hair on all panels
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [datasource(), *(variable(name) for name in made.variables)]},
        "annotations": {"list": [mark(name) for name in MARKS] if on_runs else []},
        "links": [LINKS],
        "panels": place(made.rows),
    }


def datasource() -> Json:
    """The choice of a Prometheus: no panel names one."""
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def variable(name: str) -> Json:
    """Looked up anew whenever the time range changes, so that a run of last week is found there."""
    query, may_be_all = VARIABLES[name]
    chosen = {"current": {"text": ["All"], "value": ["$__all"]}, "multi": True, "allValue": ".*"} if may_be_all else {}
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name, "qryType": 1},  # 1: the values of a label
        "refresh": 2,
        "sort": 3 if name == "rank" else 1,  # by number; by name
        "includeAll": may_be_all,
        **chosen,
    }


def mark(name: str) -> Json:
    """Lines across all panels where an expression has a value."""
    expr, colour = MARKS[name]
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": colour,
        "target": {"expr": expr, "refId": name, "range": True, "interval": "30s"},
        "titleFormat": name,
        "textFormat": "{{alertname}}",
    }


def place(rows: Rows) -> list[Json]:
    """The panels from left to right and from top to bottom, each row of the table under its title."""
    placed: list[Json] = []
    top = 0
    for title, panels in rows.items():
        where = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        head = {"type": "row", "title": title, "collapsed": False, "panels": []}
        placed.append({"id": len(placed) + 1, **head, "gridPos": where})
        top, left, height = top + 1, 0, 0
        for panel in panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            tall = HEIGHTS.get(panel.kind, 8)
            where = {"h": tall, "w": panel.width, "x": left, "y": top}
            placed.append({"id": len(placed) + 1, **draw(panel), "gridPos": where})
            left, height = left + panel.width, max(height, tall)
        top += height
    return placed


def draw(panel: Panel) -> Json:
    """A panel without its place."""
    runbooks = "  \n".join(f"Alert {alert}: docs/runbooks/{alert}.md" for alert in panel.alerts.split())
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.good}\n\n{runbooks}",
        "datasource": SOURCE,
        "fieldConfig": {"defaults": field(panel), "overrides": []},
        "options": options(panel),
        "transformations": [NO_VALUES] if panel.kind == "table" else [],
        "targets": [target(panel, index, legend) for index, legend in enumerate(panel.queries)],
    }


def target(panel: Panel, index: int, legend: str) -> Json:
    """A query: of the whole time range for what has a time axis, else of now."""
    ranged = panel.kind in ("timeseries", "state-timeline")
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": panel.queries[legend],
        "legendFormat": legend,
        "range": ranged,
        "instant": not ranged,
        "format": "table" if panel.kind == "table" else "time_series",
    }


def field(panel: Panel) -> Json:
    """How values look. What has no dimension finds its own axis; the rest begins at 0."""
    found: Json = {"unit": panel.unit, "color": {"mode": "palette-classic"}}
    if panel.unit not in ("none", "sci"):
        found["min"] = 0
    if panel.limits:
        steps = [{"value": value, "color": colour} for value, colour in panel.limits]
        found["thresholds"] = {"mode": "absolute", "steps": steps}
        if panel.kind != "timeseries":
            found["color"] = {"mode": "thresholds"}
    if panel.kind == "timeseries":
        found["custom"] = {
            "fillOpacity": 30 if panel.stacked else 0,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
        }
    return found


def options(panel: Panel) -> Json:
    """What is particular to a kind of panel."""
    last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match panel.kind:
        case "timeseries":
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull"]}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "stat":
            return {"reduceOptions": last, "textMode": "name" if panel.unit == "string" else "auto"}
        case "bargauge":
            return {"reduceOptions": last, "orientation": "horizontal", "displayMode": "basic"}
        case "state-timeline":
            return {"showValue": "auto", "mergeValues": True}
        case _:
            return {"showHeader": True}


def queries(dashboard: Json) -> list[tuple[str, str]]:
    """Every query of a dashboard's JSON, with its panel's title, as Grafana would have it: variables and all."""
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]


def substitute(expr: str, run: str = "", interval: str = "1m", dataset: str = "") -> str:
    """``expr`` with its variables filled in as Grafana does, of all ranks."""
    known = {"run": run, "dataset": dataset, "rank": ".*", "__rate_interval": interval}
    return re.sub(r"\$(\w+)", lambda match: known.get(match[1], match[0]), expr)


def text(name: str) -> str:
    """The file of a dashboard."""
    return json.dumps(page(DASHBOARDS[name]), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write them all, and what the one of GPUs needs of dcgm-exporter."""
    COUNTERS.write_text(counters(), encoding="utf-8")
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
