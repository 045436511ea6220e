"""Sends a run to the MLflow server in the environment variable MLFLOW_TRACKING_URI.

The run has its id as a tag, by which it is found again. The server keeps equal values of a metric only once, so a batch
can be sent again.
"""

from __future__ import annotations

import logging
from typing import Any

from trainer.errors import PassingError, TrainerError
from trainer.track.about import About, as_text, without_secrets
from trainer.track.journal import Batch, Standing
from trainer.track.tracker import outages, repeated

EXPERIMENT = "lambert"  # unless MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID names another
ID = "lambert.id"  # the tag
STATUS = {"running": "RUNNING", "done": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED"}
MOST_METRICS, MOST_PARAMS = 1000, 100  # in a request
LONGEST_PARAM, LONGEST_TAG = 6000, 5000  # characters
TRIES, SECONDS = 1, 20  # of a failed request again, and for an answer; the sender tries again later anyway
_SET = "set it to your server, such as http://localhost:5000"


class Mlflow:
    """A run on an MLflow server. Raises TrainerError if no server is set."""

    lasting = True

    def __init__(self) -> None:
        from mlflow import MlflowClient, get_tracking_uri, is_tracking_uri_set
        from mlflow import environment_variables as variables

        if not is_tracking_uri_set():
            raise TrainerError(f"MLFLOW_TRACKING_URI is not set: {_SET}")
        if "://" not in (address := get_tracking_uri()) and not address.startswith("databricks"):
            raise TrainerError(f"MLFLOW_TRACKING_URI is no address: {_SET}")
        variables.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.set(True)
        limits = {variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES: TRIES, variables.MLFLOW_HTTP_REQUEST_TIMEOUT: SECONDS}
        for variable, value in limits.items():
            if not variable.is_set():
                variable.set(value)
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # its warnings repeat what is reported here
        self._client = MlflowClient()
        self._run = self._experiment = ""
        self._params, self._tags = dict[str, str](), dict[str, str]()  # that the run had

    def open(self, about: About, standing: Standing) -> Standing:
        """Find the run by its id, or create it."""
        with outages("mlflow"):
            self._experiment = self._find_experiment()
            found = self._client.search_runs([self._experiment], f"tags.`{ID}` = '{about.id}'", max_results=1)
            if found:
                self._run = found[0].info.run_id
                self._client.update_run(self._run, status="RUNNING")
                self._params, self._tags = found[0].data.params, found[0].data.tags
                self._set_tags({"state": "running", "reason": ""})
                return standing
            tags = {ID: about.id, "mlflow.source.name": str(about.folder), "mlflow.source.type": "JOB"}
            made = self._client.create_run(self._experiment, int(1000 * about.begun), tags, about.name)
            self._run, self._params, self._tags = made.info.run_id, {}, {}
            return Standing()

    def describe(self, about: About, facts: dict[str, str]) -> None:
        """Set the settings as parameters, and what runs as tags.

        MLflow never changes a parameter: a setting that has changed since becomes a tag.
        """
        from mlflow.entities import Param

        settings = {key: as_text(value)[:LONGEST_PARAM] for key, value in about.settings.items()}
        new = {key: text for key, text in settings.items() if key not in self._params}
        params = [Param(key, text) for key, text in new.items()]
        with outages("mlflow"):
            for first in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self._run, params=params[first : first + MOST_PARAMS])
            self._params = self._params | new
            changed = {f"changed.{key}": text for key, text in settings.items() if self._differs(key, text)}
            self._tags = self._tags | changed
            self._set_tags(facts | changed)

    def send(self, batch: Batch) -> None:
        """Send a batch. Which steps have values from before the run went back becomes a tag."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * point.time), point.step)
            for point in batch.points
            for name, value in point.values.items()
        ]
        with outages("mlflow"):
            for first in range(0, len(metrics), MOST_METRICS):
                self._client.log_batch(self._run, metrics[first : first + MOST_METRICS])
            if batch.back is not None:
                self._set_tags({"repeated_steps": repeated(batch.standing)})

    def close(self, state: str, standing: Standing) -> None:
        """Set the run's status, and its state and the reason for it as tags."""
        with outages("mlflow"):
            self._set_tags({"state": state, "reason": standing.reason})
            if state == "running":
                return
            self._client.set_terminated(self._run, STATUS[state], int(1000 * standing.time))

    @property
    def place(self) -> str:
        """The address of the run's page."""
        return f"{without_secrets(self._client.tracking_uri)}/#/experiments/{self._experiment}/runs/{self._run}"

    def _differs(self, key: str, text: str) -> bool:
        """Whether a setting is not as its parameter says, or is so again after it was changed."""
        return self._params[key] != text or f"changed.{key}" in self._tags

    def _find_experiment(self) -> str:
        from mlflow.entities import LifecycleStage
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_ID, MLFLOW_EXPERIMENT_NAME

        if MLFLOW_EXPERIMENT_ID.get():
            return str(MLFLOW_EXPERIMENT_ID.get())
        name = MLFLOW_EXPERIMENT_NAME.get() or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == LifecycleStage.DELETED:
            other = "restore it, or set MLFLOW_EXPERIMENT_NAME to another"
            raise PassingError(f"mlflow's experiment {name} was deleted: {other}")
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _set_tags(self, tags: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        if tags:
            self._client.log_batch(self._run, tags=[RunTag(key, text[:LONGEST_TAG]) for key, text in tags.items()])
