"""A run of MLflow, on a tracking server or in a database. The package `mlflow-skinny` is enough."""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.record.tables import RunStatus
from coordinator.views.trackers.writer import LAST_OF_ROUND, TaggedRound, Writer
from fedvit.files import atomic_write

if TYPE_CHECKING:
    from mlflow import MlflowClient

FILE = "mlflow.json"
"""In the run's folder: names the run of MLflow."""
MOST_ENTRIES = 900
"""Metrics in one request; MLflow takes 1000."""
MOST_PARAMS = 100
MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "interrupted": "KILLED"}
"""End of a run -> MLflow's status."""
MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_CONFIGURE_LOGGING": "0",  # its messages use the logging of this process
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the follower retries, and reports it
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Defaults for MLflow; the environment overrides them."""


class MlflowRun(msgspec.Struct, frozen=True):
    """The content of FILE."""

    uri: str
    run: str


class MlflowWriter(Writer):
    library = "mlflow"
    remedy = "Check that the server runs, and mlflow_uri or MLFLOW_TRACKING_URI"

    _client: "MlflowClient | None" = None
    _id = ""

    @property
    def where(self) -> str:
        uri = self._config.mlflow_uri
        return f"MLflow at {uri}" if uri else "MLflow"

    def begin(self) -> int:
        self._client = client = _library().MlflowClient(tracking_uri=self._config.mlflow_uri)
        known = _read(self._run.folder / FILE)
        if known and known.uri == client.tracking_uri and (newest := _newest_step(client, known.run)) is not None:
            self._id = known.run
            client.update_run(self._id, status="RUNNING")
            return newest
        self._id = self._create_run(client)
        atomic_write(self._run.folder / FILE, msgspec.json.encode(MlflowRun(client.tracking_uri, self._id)))
        return 0

    def write(self, rounds: Sequence[TaggedRound]) -> None:
        assert self._client is not None
        # repeating a request is harmless: a database stores a metric of one step and time only once
        metric = _library().entities.Metric
        entries = [
            metric(tag, value, int(closed_at.timestamp() * 1000), number)
            for number, closed_at, figures in rounds
            for tag, value in figures.items()
        ]
        for first in range(0, len(entries), MOST_ENTRIES):
            self._client.log_batch(self._id, metrics=entries[first : first + MOST_ENTRIES])

    def end(self, status: RunStatus) -> None:
        assert self._client is not None
        self._client.set_terminated(self._id, MLFLOW_STATUS.get(status, "KILLED"))

    def _create_run(self, client: "MlflowClient") -> str:
        """Create a run of MLflow, with the configuration as its parameters."""
        run = client.create_run(_experiment(client, self._config.mlflow_experiment), run_name=self._run.name)
        param = _library().entities.Param
        params = [param(key, str(value)) for key, value in self._run.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(run.info.run_id, params=params[first : first + MOST_PARAMS])
        return str(run.info.run_id)


def _library() -> Any:
    """Import MLflow, which takes seconds and is optional, with its environment."""
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return import_module("mlflow")


def _experiment(client: "MlflowClient", name: str) -> str:
    """Return the experiment's id. If several runs begin at the same time, one of them creates it."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except _library().MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _newest_step(client: "MlflowClient", run: str) -> int | None:
    """The newest completely written round; None if the server has no such run."""
    try:
        client.get_run(run)  # the history of a missing run would be empty, too
        return max((entry.step for entry in client.get_metric_history(run, LAST_OF_ROUND)), default=0)
    except _library().MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _read(file: Path) -> MlflowRun | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=MlflowRun)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
