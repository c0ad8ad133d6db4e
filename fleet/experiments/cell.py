"""The run of one cell, in a process of its own: training, tests, pictures, and the result."""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import UNSET
from msgspec.structs import replace

from coordinator.compute.planning.batch import method_batch
from coordinator.record.record import Record, open_record
from coordinator.rounds.cohort import select_uniform
from coordinator.rounds.display import Display, View
from coordinator.run_view import RoundView, RunView, read_run
from fedvit.data.images import normalise, read_image, unfold
from fedvit.data.layout import PARTITION_FILE
from fedvit.data.text import is_text_folder
from fedvit.errors import ConfigError, EmptyCohort, NoRoom, StorageFailed
from fedvit.files import atomic_write
from fedvit.logs import configure_logging
from fedvit.methods.base import Images
from fedvit.tensors import map_tensors
from fleet.devices import device_folders
from fleet.experiments.cells import CellOptions, GridCell
from fleet.experiments.class_scores import score_classes
from fleet.experiments.feature_attacks import attack_features
from fleet.experiments.folder import (
    CELL_FILE,
    PROGRESS_FILE,
    RESULT_FILE,
    UNUSABLE_FILE,
    CellProgress,
    UnusableCell,
    read_progress,
)
from fleet.experiments.pictures import attention_pictures, embed_devices, restore_model
from fleet.finished import FinishedRun
from fleet.partition import GLOBAL_TEST
from fleet.request import RunRequest
from fleet.simulate import simulate
from profiles.probes.host import peak_rss_bytes
from profiles.report.curves import Accuracy, RoundFigures
from profiles.report.experiment import CellResult

RUN, NOVEL_RUN = "run", "novel"

NOVEL_DRAW = 2
"""An independent draw: which devices join after the training."""

AT_A_TIME = 128
"""Images of the global test."""


class CellRuns(NamedTuple):
    """The finished runs of a cell."""

    training: RunView
    novel: RunView | None  # of devices that joined after the training


class ProgressWriter(Display):
    """Writes a cell's progress to its folder about once a second, for the process that started it."""

    EVERY_S = 1.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before_s = read_progress(folder).wall_s
        self._began = time.monotonic()
        self._written_at = -self.EVERY_S
        self._store: Record | None = None

    @property
    def wall_s(self) -> float:
        """Seconds of this process, and of those before it."""
        return self._before_s + time.monotonic() - self._began

    def due(self) -> bool:
        """Return True if the progress on disk is old."""
        return time.monotonic() - self._written_at >= self.EVERY_S

    def show(self, view: View) -> None:
        """Write the progress."""
        self._written_at = time.monotonic()
        self._store = self._store or open_record(self._folder / "runs")
        finished = [entry.round for entry in self._store.rounds.read_all(RUN) if entry.closed_at]
        number = max(finished, default=0)
        rounds = read_run(self._store, RUN).rounds
        evaluated = [entry.accuracy_mean for entry in rounds if entry.accuracy_mean is not None]
        progress = CellProgress(
            round=number, accuracy=evaluated[-1] if evaluated else None, headline=view.headline, wall_s=self.wall_s
        )
        aside = self._folder / f".{PROGRESS_FILE}"
        aside.write_bytes(msgspec.json.encode(progress))
        os.replace(aside, self._folder / PROGRESS_FILE)

    def close(self) -> None:
        """Close the record."""
        if self._store:
            self._store.close()


def run_cell(folder: Path, parts: Path, options: CellOptions, graph_cache: Path | None = None) -> None:
    """Run or resume the cell in `folder`, and write its result; of a search also that its values are unusable.

    Raises FedvitError.
    """
    cell = msgspec.json.decode((folder / CELL_FILE).read_bytes(), type=GridCell)
    out = folder / "runs"
    resumes = out.exists()
    watcher = ProgressWriter(folder)
    try:
        try:
            runs = _train(cell, out, parts, options, graph_cache, watcher)
        except (ConfigError, StorageFailed) as error:
            if not resumes or isinstance(error, NoRoom):
                raise
            shutil.rmtree(out)  # of another version of the software
            runs = _train(cell, out, parts, options, graph_cache, watcher)
    except EmptyCohort as error:
        if cell.tried is UNSET:
            raise
        atomic_write(folder / UNUSABLE_FILE, msgspec.json.encode(UnusableCell(digest=cell.digest, reason=str(error))))
        return
    finally:
        watcher.close()
    result = _score_devices(
        make_result(cell, runs.training, wall_s=watcher.wall_s), out, runs.training.rounds[-1].round
    )
    if cell.deal.global_test and cell.deal.validation_share is None:
        generic = generic_accuracy(cell, out / RUN / "model.safetensors", parts)
        result = replace(result, generic_accuracy=generic)
    if runs.novel:
        last = runs.novel.rounds[-1]
        curve = [entry.accuracy_mean for entry in runs.novel.rounds if entry.accuracy_mean is not None]
        result = replace(result, novel=_make_round(last).accuracy, novel_by_device=last.accuracy, novel_rounds=curve)
    if cell.pictures is not UNSET:
        result = _add_pictures(result, cell, out, parts, runs)
    if cell.attacks is not UNSET:
        folders, _ = _divide_devices(cell, parts)
        trained = FinishedRun(RUN, out / RUN, 0.0, runs.training)
        result = replace(result, attacks=attack_features(trained, cell.run, folders, cell.seed, cell.attacks))
    atomic_write(folder / RESULT_FILE, msgspec.json.format(msgspec.json.encode(result), indent=2))
    if not options.keep:
        for run in (RUN, NOVEL_RUN) if runs.novel else (RUN,):
            for name in ("state", "blobs"):
                if (out / run / name).exists():  # a run in which the server has nothing makes no blobs
                    shutil.rmtree(out / run / name)


def _train(
    cell: GridCell, out: Path, parts: Path, options: CellOptions, graph_cache: Path | None, display: Display
) -> CellRuns:
    """Run or resume the training, and after it the run of novel devices."""

    def run(name: str, folders: Sequence[Path], values: dict[str, Any], label: str) -> RunView:
        values = {**values, "trackers": msgspec.to_builtins(options.metrics)}
        if not is_text_folder(folders[0]):  # some devices alone, as novel ones, may not have images of all classes
            values["classes"] = json.loads((parts / PARTITION_FILE).read_bytes())["classes"]
        request = RunRequest(
            folders, values, out=out, run=name, at_once=options.at_once, engine=cell.engine, precision=cell.precision,
            label=label, graph_cache=graph_cache, resume=True, fused=options.compiles or None,
        )  # fmt: skip
        return simulate(request, display).summary

    first, later = _divide_devices(cell, parts)
    training = run(RUN, first, cell.run, cell.path)
    if cell.novel is UNSET or cell.novel.run is None:
        return CellRuns(training, None)
    values = {**cell.novel.run, "seed": cell.seed, "start_from": RUN}
    return CellRuns(training, run(NOVEL_RUN, later, values, f"{cell.path}/{NOVEL_RUN}"))


def _divide_devices(cell: GridCell, parts: Path) -> tuple[list[Path], list[Path]]:
    """Divide the folders into those that train and those of novel devices, the same for all methods of a seed."""
    folders = device_folders(parts, None)
    if cell.novel is UNSET:
        return folders, []
    novel = select_uniform([folder.name for folder in folders], cell.novel.devices, cell.seed, 0, NOVEL_DRAW)
    return [one for one in folders if one.name not in novel], [one for one in folders if one.name in novel]


def make_result(cell: GridCell, summary: RunView, *, wall_s: float) -> CellResult:
    """Collect the figures of a finished run. Raises ConfigError when no device could test its model."""
    rounds = [_make_round(entry) for entry in summary.rounds]
    if rounds[-1].accuracy is None:
        raise ConfigError("FV2106", "no device has test images; raise test_share")
    tasks = sum(entry.accepted for entry in summary.rounds)
    generator = summary.rounds[-1].generator
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
        generated_difference=generator.difference if generator else None,
    )


def _score_devices(result: CellResult, out: Path, number: int) -> CellResult:
    """Add the scores of the last evaluation that weigh classes equally, if all devices counted answers by class."""
    with open_record(out) as store:
        tested = [entry for entry in store.tasks.read_used_in(RUN, number, "evaluate") if entry.samples]
    scores = {entry.device: score for entry in tested if (score := score_classes(entry.by_class))}
    if not scores or len(scores) < len(tested):
        return result
    macro_f1 = {device: score.macro_f1 for device, score in scores.items() if score.macro_f1 is not None}
    auc = {device: score.auc for device, score in scores.items() if score.auc is not None}
    return replace(
        result,
        balanced_accuracy=fmean(score.balanced for score in scores.values()),
        balanced_by_device={device: score.balanced for device, score in scores.items()},
        macro_f1=fmean(macro_f1.values()) if len(macro_f1) == len(scores) else None,
        macro_f1_by_device=macro_f1,
        auc=fmean(auc.values()) if len(auc) == len(scores) else None,
        auc_by_device=auc,
    )


def generic_accuracy(cell: GridCell, server: Path, parts: Path) -> float | None:
    """Accuracy of the server's tensors, in the file `server`, on the images in `parts` that no device has.

    None if the method has no model without a device's own part.
    """
    classes = json.loads((parts / PARTITION_FILE).read_bytes())["classes"]  # in the run's order
    images = [(path, label) for label, name in enumerate(classes) for path in (parts / GLOBAL_TEST / name).iterdir()]
    method, vit, tensors = restore_model(cell.run, len(classes), cell.seed, map_tensors(server))
    batch = method_batch(method, vit)
    correct = 0
    for begin in range(0, len(images), AT_A_TIME):
        some = images[begin : begin + AT_A_TIME]
        pixels = np.stack([read_image(path, batch.image_size) for path, _ in some])
        patches = torch.from_numpy(unfold(normalise(pixels, batch), batch.patch_size))
        with torch.no_grad():
            logits = method.generic_logits(vit, tensors, Images(patches, None))
        if logits is None:
            return None
        correct += int((logits.argmax(dim=1).numpy() == np.array([label for _, label in some])).sum())
    return correct / len(images)


def _add_pictures(result: CellResult, cell: GridCell, out: Path, parts: Path, runs: CellRuns) -> CellResult:
    """Add the pictures of the report: embeddings on a plane, and the attention of the models of some devices."""
    run = FinishedRun(RUN, out / RUN, 0.0, runs.training)
    later = FinishedRun(NOVEL_RUN, out / NOVEL_RUN, 0.0, runs.novel) if runs.novel else None
    trained = {device.device for device in runs.training.devices if device.rounds}
    count = 0 if cell.pictures is UNSET else cell.pictures
    folders = [folder for folder in device_folders(parts, None) if folder.name in trained][:count]
    return replace(
        result,
        embeddings=embed_devices(run, parts, cell.seed, later),
        attention=attention_pictures(run, cell.run, folders, cell.seed, cell.attention or "mean"),
    )


def _make_round(entry: RoundView) -> RoundFigures:
    accuracy = None
    if entry.accuracy_mean is not None and entry.accuracy_std is not None and entry.accuracy_weighted is not None:
        accuracy = Accuracy(
            mean=entry.accuracy_mean, std_over_devices=entry.accuracy_std, weighted=entry.accuracy_weighted
        )
    devices, parts = entry.accepted, (entry.devices_s, entry.server_s)
    return RoundFigures(
        round=entry.round,
        cohort=entry.cohort,
        accepted=devices,
        accuracy=accuracy,
        train_loss=entry.train_loss,
        bytes_down=entry.bytes_down / devices if devices else None,
        bytes_up=entry.bytes_up / devices if devices else None,
        flops=entry.flops / devices if devices and entry.flops else None,  # 0: no device counted them
        took_s=sum(part or 0.0 for part in parts) if any(parts) else None,
        longest_s=entry.train_s,
    )


def main() -> None:
    """Entry point of a cell's own process on a node; its arguments are those of `run_alone`, options as JSON."""
    folder, parts, options = sys.argv[1:]
    run_alone(Path(folder), Path(parts), msgspec.json.decode(options, type=CellOptions))


def run_alone(folder: Path, parts: Path, options: CellOptions) -> None:
    """Run the cell in `folder` as the only work of this process. Raises FedvitError."""
    torch.set_num_threads(1)  # the figures do not depend on the number of cells that run at the same time
    configure_logging(level=logging.WARNING)
    run_cell(folder, parts, options)
