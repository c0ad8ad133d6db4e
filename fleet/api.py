"""Runs from Python: `run` deals data out on request, trains in this process, and returns the results.

For notebooks and scripts (docs/python.md). Files are those of the commands, so that `coordinator show` and `report`
read these runs like all others.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from coordinator.api import usual_name
from coordinator.compute.planning.checks import check_run
from coordinator.config import RunConfig, check_settings
from coordinator.config.reading import convert_table
from coordinator.rounds.display import choose_display
from fedvit.choices import suggest_names
from fedvit.errors import ConfigError
from fedvit.files import private_files
from fedvit.wire.topics import check_name
from fleet.devices import device_folders, virtual_devices
from fleet.finished import FinishedRun
from fleet.partition import DealSettings, deal
from fleet.partitions import Option
from fleet.request import Engine, RunRequest
from fleet.simulate import simulate

WHERE = "run()"
"""Beginning of an error about a setting."""
DEFAULT_DEVICES = 4
"""Devices to which a data set is dealt out if the call names no number."""


def run(
    parts: str | Path | None = None,
    *,
    dataset: str | None = None,
    devices: int | None = None,
    partition: str | None = None,
    partition_options: Mapping[str, Option | str] | None = None,
    out: str | Path = "runs",
    name: str | None = None,
    resume: bool = False,
    engine: Engine = "onnx",
    progress: bool = True,
    **config: Any,
) -> FinishedRun:
    """Train on device folders, or on a data set that is dealt out first, in this process; return when it is finished.

    `parts` is a folder that `fleet partition` made. `devices` is how many take part, by default one for each folder;
    if there are fewer folders, several devices train on the same images. Or `dataset`, the name or path of a data set,
    is dealt out to `devices` (4 by default) by `partition` ("dirichlet" by default) with `partition_options`: to
    `parts` if that is set, which must then be free, else into the run's folder.

    All other keyword arguments are keys of a run's configuration, as in `run.toml` (docs/configuration.md): `method`,
    `options`, ...; tables are mappings. They override a simulation's defaults. `engine` is "onnx", "torch",
    "eager" (to debug a method) or "auto".

    The run's folder is `out`/`name`, by default with a new name. After Ctrl-C or a crash the same call with the same
    `name` and `resume=True` resumes the run after its last round. `progress` shows what `coordinator start` shows.

    Raises ConfigError before anything is written if settings are wrong, and FedvitError when the run fails.
    """
    began = time.monotonic()
    if resume and name is None:
        raise ConfigError("FV2122", f"{WHERE}: resume=True needs the run's name")
    values = config if engine == "onnx" else {"accelerator": "auto", **config}
    checked = _check(values, engine)
    out, name = Path(out), check_name(name or usual_name(checked), "run")
    home = out / name
    if home.exists() and not resume:
        raise ConfigError(
            "FV2122", f"{WHERE}: {home} exists already; resume the run with resume=True, or choose another name"
        )
    if dataset is not None:
        dealt = Path(parts or home / "parts")
        if not (resume and dealt.exists()):
            count = DEFAULT_DEVICES if devices is None else devices
            settings = DealSettings(partition_options or {}, checked.seed, size=_sample_size(checked))
            with private_files():
                deal(dataset, partition or "dirichlet", count, dealt, settings)
        folders = _choose_folders(dealt, None)
    elif parts is None or partition is not None or partition_options is not None:
        raise ConfigError(
            "FV2122",
            f"{WHERE}: expected parts, a folder that was dealt out before, or dataset, which partition deals out",
        )
    else:
        folders = _choose_folders(Path(parts), devices)
    request = RunRequest(folders, values, out=out, run=name, resume=resume, engine=engine)
    with choose_display(quiet=not progress) as display:
        try:
            outcome = simulate(request, display)
        except KeyboardInterrupt:
            display.line(f"interrupted: the same call with name={name!r} and resume=True resumes the run")
            raise
    return FinishedRun(name, outcome.folder, time.monotonic() - began, outcome.summary)


def _choose_folders(parts: Path, devices: int | None) -> list[Path] | dict[str, Path]:
    return device_folders(parts, None) if devices is None else virtual_devices(parts, devices)


def _check(values: dict[str, Any], engine: str) -> RunConfig:
    if engine not in get_args(Engine):
        raise ConfigError("FV2122", f"{WHERE}: unknown engine {engine!r}{suggest_names(engine, get_args(Engine))}")
    config = convert_table(values, RunConfig, WHERE)
    check_settings(config, WHERE)
    check_run(config, WHERE)
    return config


def _sample_size(config: RunConfig) -> int | None:
    options = config.model_options
    return options.get("context", options.get("image_size"))  # a model has one of them
