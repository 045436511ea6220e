"""A small MLflow server: the requests that Lambert makes, with the same answers, and faults on demand."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class MlflowServer(ThreadingHTTPServer):
    """One experiment with runs, by id. Like the real one, it keeps equal values of a metric only once."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.experiment = ""  # its name, once it was created
        self.deleted = False  # the experiment
        self.runs = dict[str, dict[str, Any]]()
        self.batches = 0  # requests with metrics
        self.broken = False  # answer 500 to everything
        self.dies_after = 10**9  # answer 500 after this many more requests with metrics have been carried out
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def values(self, run: dict[str, Any], metric: str) -> list[tuple[int, float]]:
        """The steps and values of a metric, in the order of arrival."""
        return [(step, value) for key, step, _, value in run["metrics"] if key == metric]


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: MlflowServer

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked: dict[str, Any]) -> None:
        name = urlsplit(self.path).path.split("/mlflow/")[-1]
        code, found = 500, dict[str, Any]()
        if not self.server.broken:
            code, found = getattr(self, name.replace("/", "_").replace("-", "_"))(asked)
            self.server.broken |= self.server.dies_after <= 0
        body = json.dumps(found).encode()
        self.send_response(500 if self.server.broken else code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def experiments_get_by_name(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.server.experiment:
            return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}
        named = {"experiment_id": "7", "name": self.server.experiment}
        return 200, {"experiment": named | {"lifecycle_stage": "deleted" if self.server.deleted else "active"}}

    def experiments_create(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.server.experiment = asked["name"]
        return 200, {"experiment_id": "7"}

    def runs_search(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        _, key, _, wanted, _ = asked["filter"].replace("`", "'").split("'")
        return 200, {"runs": [shown(run) for run in self.server.runs.values() if run["tags"].get(key) == wanted]}

    def runs_create(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        tags = {tag["key"]: tag["value"] for tag in asked["tags"]}
        run = {"id": f"run{len(self.server.runs)}", "name": asked["run_name"], "status": "RUNNING", "tags": tags}
        self.server.runs[run["id"]] = run | {"start": asked["start_time"], "end": 0, "params": {}, "metrics": {}}
        return 200, {"run": shown(self.server.runs[run["id"]])}

    def runs_get(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"run": shown(next(iter(self.server.runs.values())))}

    def runs_update(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        run = self.server.runs[asked["run_id"]]
        run |= {"status": asked["status"], "end": int(asked.get("end_time", run["end"]))}
        return 200, {"run_info": shown(run)["info"]}

    def runs_log_batch(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        run = self.server.runs[asked["run_id"]]
        metrics = [(m["key"], int(m.get("step", 0)), int(m["timestamp"]), m["value"]) for m in asked.get("metrics", [])]
        assert len(metrics) <= 1000 and len(asked.get("params", [])) <= 100
        run["metrics"] |= dict.fromkeys(metrics)
        run["params"] |= {each["key"]: each["value"] for each in asked.get("params", [])}
        run["tags"] |= {each["key"]: each["value"] for each in asked.get("tags", [])}
        self.server.batches += bool(metrics)
        self.server.dies_after -= bool(metrics)
        return 200, {}

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing."""


def shown(run: dict[str, Any]) -> dict[str, Any]:
    """A run, as MLflow describes it."""
    data = {kind: [{"key": key, "value": text} for key, text in run[kind].items()] for kind in ("params", "tags")}
    info = {"run_id": run["id"], "run_uuid": run["id"], "run_name": run["name"], "experiment_id": "7"}
    return {"info": info | {"status": run["status"], "lifecycle_stage": "active"}, "data": data}
