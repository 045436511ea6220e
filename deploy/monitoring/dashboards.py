"""Generates Grafana's dashboards from tables.py and gpus.py: ``python -m deploy.monitoring.dashboards``.

The JSON is Grafana's classic model, which Grafana 11 and later load from disk. Do not edit it by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from deploy.monitoring.gpus import GPUS, counters
from deploy.monitoring.panels import Panel, PanelRows
from deploy.monitoring.tables import DATA_PREP, NODES, OVERVIEW

FOLDER = Path(__file__).parent / "dashboards"
DCGM_COUNTERS = FOLDER.parent / "dcgm.csv"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
HEIGHTS = {"stat": 4, "table": 6, "state-timeline": 6}  # in grid units; other kinds are 8 high
SCHEMA = 39  # Grafana 11.0's; later versions migrate it
NO_VALUES = {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True}}}
LINKS = {  # to all dashboards with the tag, keeping the run and the time range
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
    """A drop-down at the top of the page."""

    query: str
    all: bool  # whether "All" can be chosen; it is then the default


class Dashboard(NamedTuple):
    """A page of panels. ``uid`` is in links and bookmarks, so it never changes."""

    uid: str
    title: str
    text: str
    variables: tuple[str, ...]
    rows: PanelRows


VARIABLES = {
    "run": Variable("label_values(lambert_step, run)", False),
    "rank": Variable('label_values(lambert_rank_info{run="$run"}, rank)', True),
    "dataset": Variable("label_values(lambert_prep_build_info, dataset)", False),
}
# Annotations on the time axis. Restarts looks back an hour, since a run may come back on another instance.
ANNOTATIONS = {
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
        "lambert-nodes", "Lambert: nodes and stragglers", "Which rank or node slows the run?", ("run", "rank"), NODES
    ),
    "data_prep": Dashboard(
        "lambert-data-prep", "Lambert: data preparation", "How far is the build?", ("dataset",), DATA_PREP
    ),
    "gpu": Dashboard(
        "lambert-gpu", "Lambert: GPUs", "Are its GPUs busy and healthy? Needs dcgm-exporter.", ("run", "rank"), GPUS
    ),
}


def page(made: Dashboard) -> Json:
    """Build a dashboard's JSON."""
    on_runs = "run" in made.variables
    return {
        "uid": made.uid,
        "title": made.title,
        "description": made.text,
        "tags": ["lambert"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "graphTooltip": 1,  # a crosshair shared by all panels
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [datasource(), *(variable(name) for name in made.variables)]},
        "annotations": {"list": [mark(name) for name in ANNOTATIONS] if on_runs else []},
        "links": [LINKS],
        "panels": place(made.rows),
    }


def datasource() -> Json:
    """Build the variable that selects the Prometheus; no panel names one directly."""
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def variable(name: str) -> Json:
    """Build a query variable. It refreshes with the time range, so last week's runs are listed too."""
    query, may_be_all = VARIABLES[name]
    chosen = {"current": {"text": ["All"], "value": ["$__all"]}, "multi": True, "allValue": ".*"} if may_be_all else {}
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name, "qryType": 1},  # 1: label values
        "refresh": 2,
        "sort": 3 if name == "rank" else 1,  # 3: numerically; 1: by name
        "includeAll": may_be_all,
        **chosen,
    }


def mark(name: str) -> Json:
    """Build an annotation: lines across all panels wherever its expression has a value."""
    expr, colour = ANNOTATIONS[name]
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": colour,
        "target": {"expr": expr, "refId": name, "range": True, "interval": "30s"},
        "titleFormat": name,
        "textFormat": "{{alertname}}",
    }


def place(rows: PanelRows) -> list[Json]:
    """Lay out the panels left to right, top to bottom, each row under its title."""
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
    """Build a panel's JSON, without its position."""
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
    """Build a query: over the time range for panels with a time axis, otherwise for now."""
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
    """Build the display settings of values. The axis starts at 0, except for values without a unit."""
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
    """Build the options specific to a kind of panel."""
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
    """List (panel title, query) for a dashboard's JSON, with variables not yet filled in."""
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]


def substitute(expr: str, run: str = "", interval: str = "1m", dataset: str = "") -> str:
    """Fill in the variables of ``expr`` as Grafana does, for all ranks."""
    known = {"run": run, "dataset": dataset, "rank": ".*", "__rate_interval": interval}
    return re.sub(r"\$(\w+)", lambda match: known.get(match[1], match[0]), expr)


def text(name: str) -> str:
    """Return the contents of a dashboard's file."""
    return json.dumps(page(DASHBOARDS[name]), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all dashboards, and the counters file for dcgm-exporter that the GPU page needs."""
    DCGM_COUNTERS.write_text(counters(), encoding="utf-8")
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
