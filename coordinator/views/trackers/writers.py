"""The registry of writers."""

from importlib.util import find_spec
from pathlib import Path

from coordinator.config import RunConfig, TrackersConfig
from coordinator.config.trackers import WriterName
from coordinator.views.trackers.figures import settings_of
from coordinator.views.trackers.mlflow import MlflowWriter
from coordinator.views.trackers.tensorboard import TensorBoardWriter
from coordinator.views.trackers.writer import RunInfo, Writer
from fedvit.errors import ConfigError

WRITERS: dict[WriterName, type[Writer]] = {"tensorboard": TensorBoardWriter, "mlflow": MlflowWriter}


def check_writers(config: TrackersConfig, where: str) -> None:
    """Raises ConfigError, which begins with `where`, if the library of a writer is not installed."""
    for name in config.writers:
        library = WRITERS[name].library
        if find_spec(library) is None:
            raise ConfigError(
                "FV1016",
                f"{where}: writers: {name!r} needs the package {library!r}, which is not installed: "
                f"pip install 'fedvit[{name}]', or leave the writer out",
            )


def make_writers(run: str, config: RunConfig, folder: Path) -> list[Writer]:
    """The configured writers; `run` is the run's name for them, `folder` its folder."""
    info = RunInfo(run, folder, settings_of(config))
    return [WRITERS[name](info, config.trackers) for name in config.trackers.writers]
