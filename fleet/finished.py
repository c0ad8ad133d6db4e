"""A finished run in Python: its figures, its tensors, and its report."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.api import open_existing_record
from coordinator.run_view import RoundView, RunView, show_document
from coordinator.views.report.document import read_report
from coordinator.views.terminal import draw_run
from edge_client.storage.vault import Vault
from fedvit.errors import ConfigError
from fedvit.methods.rules.generator_update import PERSONAL
from fedvit.tensors import Array, Tensors, map_tensors
from fleet.engines.simulation import read_kept_tensors
from profiles.report.console import Console

WIDTH = 100
"""Letters of a line of the tables."""


@dataclass(frozen=True, repr=False)
class FinishedRun:
    """A finished run. `print` shows its tables, and a notebook shows them as HTML."""

    name: str
    folder: Path
    seconds: float  # of the call of `run`, from dealing out to the last figure; a resumed run: the last call
    summary: RunView  # all figures: of rounds, of devices, what was refused

    @property
    def rounds(self) -> list[RoundView]:
        """One entry a round: accuracies, `train_loss`, bytes, `devices_s`, `server_s`."""
        return self.summary.rounds

    @property
    def accuracy(self) -> float | None:
        """Mean over devices in the newest evaluation; None if no device has test images."""
        return self.summary.mean_accuracy

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON values: those of `coordinator show --json`, with `seconds` and `folder`."""
        return {**show_document(self.summary), "seconds": self.seconds, "folder": str(self.folder)}

    def tensors(self, device: str | None = None) -> Tensors:
        """The server's tensors by name, read-only; with `device` those of this device alone.

        A device has its own tensors if the method keeps some of them on devices, or makes some for each; with other
        methods the result is empty. Raises ConfigError for a device that took no part,
        StorageFailed and BadPayload for a file that is damaged.
        """
        if device is None:
            return map_tensors(self.folder / "model.safetensors")
        devices = [entry.device for entry in self.summary.devices]
        if device not in devices:
            raise ConfigError(
                "FV1904", f"no device {device!r} in run {self.name!r}; its devices are: {', '.join(devices)}"
            )
        generated = self.folder / "generated" / f"{device}.safetensors"
        return {**(map_tensors(generated) if generated.is_file() else {}), **self._read_local(device)}

    def embeddings(self) -> dict[str, Array]:
        """The server's embedding of each device that trained, as one vector.

        Empty if the method has no embeddings. Raises StorageFailed and BadPayload for a file that is damaged.
        """
        file = self.folder / "generator.safetensors"
        tensors = map_tensors(file) if file.is_file() else {}
        vectors: dict[str, list[Array]] = {}
        for name in sorted(name for name in tensors if name.startswith(PERSONAL)):
            vectors.setdefault(name.split("/")[1], []).append(tensors[name].ravel())
        return {device: np.concatenate(parts) for device, parts in vectors.items()}

    def _read_local(self, device: str) -> Tensors:
        vault = self.folder / "state" / device / "vault"
        if vault.is_dir():
            return Vault(vault).local(self.name) or {}
        return read_kept_tensors(self.folder, device)

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.3f}"
        return f"<run {self.name}: {len(self.rounds)} rounds{accuracy}, {self.seconds:.1f} s, in {self.folder}>"

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=WIDTH, color_system=None).print(draw_run(self.summary, WIDTH))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def _repr_html_(self) -> str:
        from coordinator.views.report.page import run_piece  # matplotlib: memory that counts in a cell of an experiment

        with open_existing_record(self.folder.parent) as store:
            return run_piece(read_report(store, self.name))
