"""Runs from Python: `run` deals data out where that is asked for, trains in this process, and returns what came of it.

For notebooks and scripts (docs/python.md). Everything lies where the commands leave it, so that `coordinator show` and
`report` read these runs as any others.
"""

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from coordinator.commands.flags import existing_store
from coordinator.commands.start import usual_name
from coordinator.config import RunConfig, check_settings
from coordinator.config.reading import convert_table
from coordinator.rounds.display import choose_display
from coordinator.run_view import RoundView, RunView, show_document
from edge_client.vault import Vault
from fedvit.choices import known_are
from fedvit.errors import ConfigError
from fedvit.files import private_files
from fedvit.known_names import TEXTS
from fedvit.tensors import Array, Tensors, mapped
from fedvit.wire.topics import check_name
from fleet.devices import device_folders, virtual_devices
from fleet.partition import deal
from fleet.partitions import Option
from fleet.simulate import Engine, simulate

WHERE = "run()"
"""What an error about a setting begins with."""
WIDTH = 100
"""Letters of a line of the tables."""
DEVICES = 4
"""That a data set is dealt out to, where nothing is said."""


@dataclass(frozen=True, repr=False)
class FinishedRun:
    """A run that came to its end. `print` shows its tables, and a notebook shows them as HTML."""

    name: str
    folder: Path
    seconds: float  # that the call of `run` took, from dealing out to the last figure; a resumed run: the last call
    summary: RunView  # all figures: of rounds, of devices, what was refused

    @property
    def rounds(self) -> list[RoundView]:
        """One entry a round: accuracies, `train_loss`, bytes, `devices_s`, `server_s`."""
        return self.summary.rounds

    @property
    def accuracy(self) -> float | None:
        """Mean over devices in the newest evaluation; None where no device has test images."""
        return self.summary.mean_accuracy

    def to_dict(self) -> dict[str, Any]:
        """All figures as values of JSON: those of `coordinator show --json`, with `seconds` and `folder`."""
        return {**show_document(self.summary), "seconds": self.seconds, "folder": str(self.folder)}

    def tensors(self, device: str | None = None) -> Tensors:
        """The server's tensors by name, read-only; with `device` those that this device alone has.

        A device has tensors of its own where the method keeps some of them on devices, or makes some for each; of
        other methods nothing is returned for a device. Raises ConfigError for a device that took no part,
        StorageFailed and BadPayload for a file that is damaged.
        """
        if device is None:
            return mapped(self.folder / "model.safetensors")
        known = [entry.device for entry in self.summary.devices]
        if device not in known:
            raise ConfigError(f"no device {device!r} in run {self.name!r}; its devices are: {', '.join(known)}")
        made = self.folder / "generated" / f"{device}.safetensors"
        return {**(mapped(made) if made.is_file() else {}), **self._kept_by(device)}

    def embeddings(self) -> dict[str, Array]:
        """The server's embedding of each device that trained, all its numbers in one vector.

        Empty where the method has no embeddings. Raises StorageFailed and BadPayload for a file that is damaged.
        """
        from fedvit.methods.rules.generator_update import PERSONAL  # imports torch, which takes seconds

        file = self.folder / "generator.safetensors"
        held = mapped(file) if file.is_file() else {}
        vectors: dict[str, list[Array]] = {}
        for name in sorted(name for name in held if name.startswith(PERSONAL)):
            vectors.setdefault(name.split("/")[1], []).append(held[name].ravel())
        return {device: np.concatenate(parts) for device, parts in vectors.items()}

    def _kept_by(self, device: str) -> Tensors:
        vault = self.folder / "state" / device / "vault"
        if vault.is_dir():
            return Vault(vault).local(self.name) or {}
        from fleet.engines.simulation import kept_by

        return kept_by(self.folder, device)

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.3f}"
        return f"<run {self.name}: {len(self.rounds)} rounds{accuracy}, {self.seconds:.1f} s, in {self.folder}>"

    def __str__(self) -> str:
        from coordinator.views.terminal import draw_run
        from profiles.report.console import Console

        text = io.StringIO()
        Console(file=text, width=WIDTH, color_system=None).print(draw_run(self.summary, WIDTH))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def _repr_html_(self) -> str:
        from coordinator.views.report.document import read_report
        from coordinator.views.report.page import run_piece  # matplotlib, a second that others need not wait

        store = existing_store(self.folder.parent)
        try:
            return run_piece(read_report(store, self.name))
        finally:
            store.close()


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
    where there are fewer folders, they are dealt out in turn. Or `dataset`, the name or path of a data set, is dealt
    out to `devices` (4 by default) by `partition` ("dirichlet" by default) with `partition_options`: to `parts` where
    that is given, which must then be free, else into the run's folder.

    All other keyword arguments are keys of a run's configuration, as in `run.toml` (docs/configuration.md): `method`,
    `options`, `rounds`, `model_options`, ...; tables are mappings. They are over the defaults of a simulation
    (`fleet.simulate`). `engine` is "onnx", "torch" or "auto".

    The run lies in `out`/`name`, by default under a name of its own. Ctrl-C or a crash costs at most the round under
    way: the same call with the same `name` and `resume=True` resumes the run, and returns it at once when it is
    finished. `progress` shows on standard error what `coordinator start` shows.

    Raises ConfigError before anything is written where settings are wrong, and FedvitError when the run fails.
    """
    began = time.monotonic()
    if engine not in get_args(Engine):
        raise ConfigError(f"{WHERE}: unknown engine {engine!r}{known_are(engine, get_args(Engine))}")
    if resume and name is None:
        raise ConfigError(f"{WHERE}: resume=True needs the run's name")
    values = config if engine == "onnx" else {"accelerator": "auto", **config}
    checked = _checked(values)
    out, name = Path(out), check_name(name or usual_name(checked), "run")
    home = out / name
    folders: list[Path] | dict[str, Path]
    if home.exists() and not resume:
        raise ConfigError(f"{WHERE}: {home} exists already; resume the run with resume=True, or choose another name")
    if dataset is not None:
        dealt = Path(parts or home / "parts")
        if not (resume and dealt.exists()):
            with private_files():
                deal(
                    dataset,
                    partition or "dirichlet",
                    DEVICES if devices is None else devices,
                    dealt,
                    options=partition_options,
                    seed=checked.seed,
                    size=checked.model_options.get("context" if checked.model in TEXTS else "image_size"),
                )
        folders = device_folders(dealt, None)
    elif parts is None or partition is not None or partition_options is not None:
        raise ConfigError(
            f"{WHERE}: expected parts, a folder that was dealt out before, or dataset, which partition deals out"
        )
    else:
        folders = device_folders(Path(parts), None) if devices is None else virtual_devices(Path(parts), devices)
    with choose_display(quiet=not progress) as display:
        try:
            outcome = simulate(folders, values, out=out, run=name, display=display, resume=resume, engine=engine)
        except KeyboardInterrupt:
            display.line(f"interrupted: the same call with name={name!r} and resume=True resumes the run")
            raise
    return FinishedRun(name, outcome.folder, time.monotonic() - began, outcome.summary)


def _checked(values: dict[str, Any]) -> RunConfig:
    config = convert_table(values, RunConfig, WHERE)
    check_settings(config, WHERE)
    from coordinator.compute.planning.checks import check_run  # torch: seconds that a mistyped name need not wait

    check_run(config, WHERE)
    return config
