"""The table [trackers]."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from fedvit.errors import ConfigError

WriterName = Literal["tensorboard", "mlflow"]


class TrackersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other tools that receive the figures of rounds: the table [trackers]. It has no influence on training."""

    writers: Annotated[
        tuple[WriterName, ...],
        Meta(
            description="Tool that receives the figures of every round, in addition to the record.",
            extra={"flags": ["writer"]},
        ),
    ] = ()
    mlflow_uri: Annotated[
        str | None,
        Meta(
            description="Address of the MLflow tracking server, or sqlite:///FILE; by default MLFLOW_TRACKING_URI of "
            "the environment, else mlflow.db in the current folder."
        ),
    ] = None
    mlflow_experiment: Annotated[str, Meta(min_length=1, description="Experiment of MLflow that runs belong to.")] = (
        "fedvit"
    )

    def __post_init__(self) -> None:
        if len(set(self.writers)) != len(self.writers):
            raise ConfigError("FV1016", f"writers = {list(self.writers)}: a writer is listed more than once")
        if self.mlflow_uri is not None and "@" in urlsplit(self.mlflow_uri).netloc:
            raise ConfigError(
                "FV1016",
                "mlflow_uri contains a user or password, and would be recorded with the run: set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment, or MLFLOW_TRACKING_URI",
            )
