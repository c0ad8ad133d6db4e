"""One cell of the grid: its folder, its run in its own process, and its result.

A cell's folder holds `cell.json` (its settings), `progress.json`, `runs/` (the run) and, when it is finished,
`result.json`, or `unusable.json` for values of a search that no device could train with. A folder with another
`cell.json` belongs to an earlier version of the experiment and is deleted when the cell starts.
"""

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Struct
from msgspec.structs import replace

from coordinator.config import TrackersConfig
from coordinator.record.store import Store
from coordinator.rounds.cohort import select_uniform
from coordinator.rounds.display import Display, View
from coordinator.run_view import RoundView, RunView, read_run
from fedvit.data.images import normalise, read_image, unfold
from fedvit.data.layout import PARTITION_FILE, find_layout, read_tree
from fedvit.errors import ConfigError, EmptyCohort, StorageFailed
from fedvit.files import atomic_write
from fedvit.known_names import TEXTS
from fedvit.tensors import mapped
from fleet.devices import device_folders
from fleet.experiments.grid import Cell
from fleet.partition import GLOBAL_TEST
from fleet.simulate import simulate
from profiles.probes.host import peak_rss_bytes
from profiles.report.curves import Accuracy, RoundFigures

RUN, NOVEL_RUN = "run", "novel"
CELL_FILE = "cell.json"
PROGRESS_FILE = "progress.json"
RESULT_FILE = "result.json"
UNUSABLE_FILE = "unusable.json"
LOG_FILE = "cell.log"

NOVEL_DRAW = 2
"""An independent draw: which devices join after the training."""

AT_A_TIME = 128
"""Images of the global test."""


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of a cell."""

    round: int = 0  # finished
    accuracy: float | None = None  # mean over devices, newest
    headline: str = ""
    wall_s: float = 0.0  # of all processes of the cell


class EmbeddedDevice(Struct, frozen=True, kw_only=True):
    """A device's embedding on the plane of t-SNE, whose axes mean nothing."""

    device: str
    kind: str  # the device's domain, or the class of which it has most training images
    x: float
    y: float
    novel: bool = False  # it joined after the training


class AttentionPicture(Struct, frozen=True, kw_only=True):
    """A device's test image, and the share of its model's attention that each patch has by attention rollout."""

    device: str
    label: str
    png: bytes
    attention: list[list[float]]  # rows of patches from the top; all together 1


class CellResult(Struct, frozen=True, kw_only=True):
    """The result of a cell."""

    digest: str  # of the cell
    software: str
    protocol: str | None  # how accuracy is measured
    accuracy: Accuracy  # after the last round
    accuracy_by_device: dict[str, float]
    bytes_down: float  # per device and round
    bytes_up: float
    flops: float | None  # of training, per device and round
    wall_s: float
    peak_rss_bytes: int | None  # of the process: coordinator and all devices
    refusals: int  # results that were refused or lost
    rounds: list[RoundFigures]
    epsilon: float | None = None  # of devices' updates, over all rounds; None: no noise
    feature_epsilon: float | None = None  # of one device's features, over all rounds
    generic_accuracy: float | None = None  # of the server's model, on images that no device has; None: there is none
    novel: Accuracy | None = None  # of devices that joined after the training; None: there are none
    novel_by_device: dict[str, float] = {}
    embeddings: list[EmbeddedDevice] = []  # where pictures are asked for
    attention: list[AttentionPicture] = []


class Unusable(Struct, frozen=True, kw_only=True):
    """The outcome of a cell of a search whose values no device could train with; it is not a failure."""

    digest: str  # of the cell
    reason: str


Found = TypeVar("Found", CellResult, Unusable)


class CellFolder:
    """The folder of a cell. Call `begin` before it is run, `result` after."""

    def __init__(self, cell: Cell, out: Path) -> None:
        self.cell = cell
        self.folder = out / "cells" / cell.path
        images = "seed" if cell.deal.validation_share is None else "validation-seed"
        self.parts = out / "parts" / cell.partition / f"{images}-{cell.seed}"

    def result(self) -> CellResult | None:
        """The result of the cell; None when it is not finished, or its settings have changed."""
        return self._read(RESULT_FILE, CellResult)

    def unusable(self) -> str | None:
        """Why no device could train with the cell's values; None when that is not known."""
        found = self._read(UNUSABLE_FILE, Unusable)
        return found.reason if found else None

    def _read(self, name: str, kind: type[Found]) -> Found | None:
        try:
            found = msgspec.json.decode((self.folder / name).read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return found if found.digest == self.cell.digest else None

    def begin(self) -> None:
        """Prepare the folder; files of the same cell stay, so that it can be resumed."""
        file = self.folder / CELL_FILE
        content = msgspec.json.format(msgspec.json.encode(self.cell), indent=2)
        if file.is_file() and file.read_bytes() == content:
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        atomic_write(file, content)

    def progress(self) -> Progress:
        return read_progress(self.folder)

    def failure(self, code: int) -> str:
        """Why its process ended with `code`: the last line of its log, or that it was killed."""
        if code == -signal.SIGKILL:
            return "its process was killed, as the system does when memory runs out; run fewer cells at the same time"
        lines = (self.folder / LOG_FILE).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended with code {code}"


def read_progress(folder: Path) -> Progress:
    try:
        return msgspec.json.decode((folder / PROGRESS_FILE).read_bytes(), type=Progress)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Progress()


class ProgressWriter(Display):
    """Writes a cell's progress to its folder about once a second, for the process that started it."""

    EVERY_S = 1.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before_s = read_progress(folder).wall_s
        self._began = time.monotonic()
        self._written_at = -self.EVERY_S
        self._store: Store | None = None

    @property
    def wall_s(self) -> float:
        """Seconds of this process, and of those before it."""
        return self._before_s + time.monotonic() - self._began

    def due(self) -> bool:
        return time.monotonic() - self._written_at >= self.EVERY_S

    def show(self, view: View) -> None:
        self._written_at = time.monotonic()
        self._store = self._store or Store.in_folder(self._folder / "runs")
        finished = [entry.round for entry in self._store.rounds(RUN) if entry.closed_at]
        number = max(finished, default=0)
        rounds = read_run(self._store, RUN).rounds
        evaluated = [entry.accuracy_mean for entry in rounds if entry.accuracy_mean is not None]
        progress = Progress(
            round=number, accuracy=evaluated[-1] if evaluated else None, headline=view.headline, wall_s=self.wall_s
        )
        aside = self._folder / f".{PROGRESS_FILE}"
        aside.write_bytes(msgspec.json.encode(progress))
        os.replace(aside, self._folder / PROGRESS_FILE)

    def close(self) -> None:
        if self._store:
            self._store.close()


def run_cell(
    folder: Path,
    parts: Path,
    *,
    at_once: int,
    keep: bool = False,
    metrics: TrackersConfig | None = None,
    graph_cache: Path | None = None,
) -> None:
    """Run or resume the cell in `folder`, and write its result; of a search also that its values are unusable.

    Without `keep`, only the server's tensors and the record of the run are kept. Raises FedvitError.
    """
    cell = msgspec.json.decode((folder / CELL_FILE).read_bytes(), type=Cell)
    out = folder / "runs"
    begun = out.exists()
    watcher = ProgressWriter(folder)
    first, later = _devices(cell, parts)

    def simulated(run: str, folders: Sequence[Path], values: dict[str, Any], label: str) -> RunView:
        values = {**values, "trackers": msgspec.to_builtins(metrics or TrackersConfig())}
        if values["model"] not in TEXTS:  # some devices alone, as novel ones, may not have images of all classes
            values["classes"] = json.loads((parts / PARTITION_FILE).read_bytes())["classes"]
        return simulate(
            folders, values, out=out, run=run, label=label, at_once=at_once, display=watcher,
            graph_cache=graph_cache, resume=True, engine=cell.engine, precision=cell.precision,
        ).summary  # fmt: skip

    def attempt() -> tuple[RunView, RunView | None]:
        training = simulated(RUN, first, cell.run, cell.path)
        if cell.novel is UNSET or cell.novel.run is None:
            return training, None
        values = {**cell.novel.run, "seed": cell.seed, "start_from": RUN}
        return training, simulated(NOVEL_RUN, later, values, f"{cell.path}/{NOVEL_RUN}")

    try:
        try:
            summary, novel = attempt()
        except (ConfigError, StorageFailed):
            if not begun:
                raise
            shutil.rmtree(out)  # of another version of the software
            summary, novel = attempt()
    except EmptyCohort as error:
        if cell.deal.validation_share is None:
            raise
        atomic_write(folder / UNUSABLE_FILE, msgspec.json.encode(Unusable(digest=cell.digest, reason=str(error))))
        return
    finally:
        watcher.close()
    tests_generic = cell.deal.global_test and cell.deal.validation_share is None
    generic = generic_accuracy(cell, out / RUN / "model.safetensors", parts) if tests_generic else None
    result = replace(cell_result(cell, summary, wall_s=watcher.wall_s), generic_accuracy=generic)
    if novel:
        last = novel.rounds[-1]
        result = replace(result, novel=_round(last).accuracy, novel_by_device=last.accuracy)
    if cell.pictures is not UNSET:
        result = with_pictures(result, cell, cell.pictures, out, parts, summary, novel)
    atomic_write(folder / RESULT_FILE, msgspec.json.format(msgspec.json.encode(result), indent=2))
    if not keep:
        for run in (RUN, NOVEL_RUN) if novel else (RUN,):
            for kept in ("state", "blobs"):
                if (out / run / kept).exists():  # a run in which the server has nothing makes no blobs
                    shutil.rmtree(out / run / kept)


def _devices(cell: Cell, parts: Path) -> tuple[list[Path], list[Path]]:
    """The folders of the devices that train, and of the novel ones, which are the same for all methods of a seed."""
    folders = device_folders(parts, None)
    if cell.novel is UNSET:
        return folders, []
    novel = select_uniform([folder.name for folder in folders], cell.novel.devices, cell.seed, 0, NOVEL_DRAW)
    return [one for one in folders if one.name not in novel], [one for one in folders if one.name in novel]


def cell_result(cell: Cell, summary: RunView, *, wall_s: float) -> CellResult:
    """The figures of a finished run. Raises ConfigError when no device could test its model."""
    rounds = [_round(entry) for entry in summary.rounds]
    if rounds[-1].accuracy is None:
        raise ConfigError("no device has test images; raise test_share")
    tasks = sum(entry.accepted for entry in summary.rounds)
    return CellResult(
        digest=cell.digest,
        software=version("fedvit"),
        protocol=summary.protocol,
        accuracy=rounds[-1].accuracy,
        accuracy_by_device=summary.rounds[-1].accuracy,
        bytes_down=sum(entry.bytes_down for entry in summary.rounds) / tasks,
        bytes_up=sum(entry.bytes_up for entry in summary.rounds) / tasks,
        flops=sum(entry.flops for entry in summary.rounds) / tasks or None,
        wall_s=wall_s,
        peak_rss_bytes=peak_rss_bytes(),
        refusals=len(summary.refusals),
        rounds=rounds,
        epsilon=summary.epsilon,
        feature_epsilon=summary.feature_epsilon,
    )


def generic_accuracy(cell: Cell, server: Path, parts: Path) -> float | None:
    """Accuracy of the server's tensors, in the file `server`, on the images in `parts` that no device has.

    None where the method has no model without a device's own part.
    """
    import torch

    from coordinator.compute.planning.batch import method_batch  # these import torch, which takes seconds
    from fedvit.methods.base import Images
    from fleet.experiments.pictures import served

    layout = find_layout(read_tree(parts / GLOBAL_TEST, 1), str(parts))
    method, vit, tensors = served(cell.run, len(layout.classes), cell.seed, mapped(server))
    batch = method_batch(method, vit)
    right = 0
    for begin in range(0, len(layout.train), AT_A_TIME):
        some = layout.train[begin : begin + AT_A_TIME]
        pixels = np.stack([read_image(path, batch.image_size) for path, _ in some])
        patches = torch.from_numpy(unfold(normalise(pixels, batch), batch.patch_size))
        with torch.no_grad():
            logits = method.generic_logits(vit, tensors, Images(patches, None))
        if logits is None:
            return None
        right += int((logits.argmax(dim=1).numpy() == np.array([label for _, label in some])).sum())
    return right / len(layout.train)


def with_pictures(
    result: CellResult, cell: Cell, count: int, out: Path, parts: Path, summary: RunView, novel: RunView | None
) -> CellResult:
    """The result with what the report draws: embeddings on a plane, and the attention of `count` devices' models."""
    from fleet.api import FinishedRun
    from fleet.experiments.pictures import attention_pictures, embedded_devices  # imports torch, which takes seconds

    run = FinishedRun(RUN, out / RUN, 0.0, summary)
    later = FinishedRun(NOVEL_RUN, out / NOVEL_RUN, 0.0, novel) if novel else None
    trained = {device.device for device in summary.devices if device.rounds}
    folders = [folder for folder in device_folders(parts, None) if folder.name in trained][:count]
    return replace(
        result,
        embeddings=embedded_devices(run, parts, cell.seed, later),
        attention=attention_pictures(run, cell.run, folders, cell.seed),
    )


def _round(entry: RoundView) -> RoundFigures:
    accuracy = None
    if entry.accuracy_mean is not None and entry.accuracy_std is not None and entry.accuracy_weighted is not None:
        accuracy = Accuracy(
            mean=entry.accuracy_mean, std_over_devices=entry.accuracy_std, weighted=entry.accuracy_weighted
        )
    trained, parts = entry.accepted, (entry.devices_s, entry.server_s)
    return RoundFigures(
        round=entry.round,
        cohort=entry.cohort,
        accepted=trained,
        accuracy=accuracy,
        train_loss=entry.train_loss,
        bytes_down=entry.bytes_down / trained if trained else None,
        bytes_up=entry.bytes_up / trained if trained else None,
        flops=entry.flops / trained if trained and entry.flops else None,  # 0: no device counted them
        took_s=sum(part or 0.0 for part in parts) if any(parts) else None,
    )


def main() -> None:
    """Entry point of a cell's own process; its arguments are those of `run_cell`."""
    import torch

    from fedvit.logs import configure_logging

    torch.set_num_threads(1)  # the figures do not depend on the number of cells that run at the same time
    configure_logging(level=logging.WARNING)
    folder, parts, at_once, keep, metrics = sys.argv[1:]
    run_cell(
        Path(folder),
        Path(parts),
        at_once=int(at_once),
        keep=bool(int(keep)),
        metrics=msgspec.json.decode(metrics, type=TrackersConfig),
    )
