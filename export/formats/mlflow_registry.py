"""A new version in MLflow's model registry: an ONNX file with its card, as MLflow's ONNX flavour.

The address is that of MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI; the extra `mlflow` is enough.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from export.bundle.assemble import Precision
from export.bundle.write import Bench, TrainedModel, write_bundle
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write

_FOLDER = "model"
_EXPERIMENT = "fedvit"


def write(out: Path, trained: TrainedModel) -> list[str]:
    """Write a bundle with MLflow's description into `out`, and register it under the run's name.

    Raises ConfigError if the library is missing, StorageFailed if the registry cannot be used.
    """
    try:
        mlflow = import_module("mlflow")  # late: it takes seconds, and is optional
    except ModuleNotFoundError as error:
        raise ConfigError("FV1016", "format mlflow needs: pip install 'fedvit[mlflow]'") from error
    bench = Bench(images=None, described="", threads=1, machine="", cores=1)
    card = write_bundle(out, trained, bench, precisions=(Precision.FP32,))
    atomic_write(out / "MLmodel", json.dumps(_describe(card.machine.onnxruntime)).encode())  # YAML reads JSON
    try:
        client, origin = mlflow.MlflowClient(), trained.origin
        found = client.get_experiment_by_name(_EXPERIMENT)
        experiment = found.experiment_id if found else client.create_experiment(_EXPERIMENT)
        tags = {"run": origin.run, "round": str(origin.round), "method": origin.method, "model": origin.model}
        if trained.licence:
            tags["licence"] = trained.licence
        run = client.create_run(experiment, run_name=f"{origin.run}, round {origin.round}", tags=tags)
        client.log_artifacts(run.info.run_id, str(out), _FOLDER)
        if trained.reported:
            client.log_metric(run.info.run_id, "accuracy", trained.reported.accuracy)
        client.set_terminated(run.info.run_id)
        _make_model(mlflow, client, origin.run)
        source = f"{run.info.artifact_uri}/{_FOLDER}"
        version = client.create_model_version(origin.run, source, run.info.run_id, tags=tags)
    except mlflow.MlflowException as error:
        raise StorageFailed("FV1016", f"MLflow at {mlflow.get_registry_uri()}: {error}; {out} is written") from error
    return [f"MLflow: model {version.name!r}, version {version.version}, at {mlflow.get_registry_uri()}"]


def _make_model(mlflow: Any, client: Any, name: str) -> None:
    """Make the registered model of a run unless it exists."""
    try:
        client.create_registered_model(name)
    except mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _describe(onnxruntime: str) -> dict[str, Any]:
    return {
        "flavors": {
            "onnx": {"data": Precision.FP32.file, "onnx_version": onnxruntime, "providers": ["CPUExecutionProvider"]},
            "python_function": {"loader_module": "mlflow.onnx", "data": Precision.FP32.file},
        },
    }
