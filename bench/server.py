"""`python -m bench server`: EFTViT's training on the server, with features in files and with all of them in memory.

`main` is one measured process.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import numpy as np
import psutil
import torch
from msgspec import Struct

from bench.child import run_child
from bench.machine import describe_machine
from bench.reporting import Progress, Report
from fedvit.blobs import BlobStore
from fedvit.errors import ConfigError
from fedvit.methods.base import RoundContext, ServerState, Upload
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.optimizers import AdamW
from fedvit.methods.rules.optimizer_state import PREFIX
from fedvit.models import build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Collect, Role
from fedvit.quantities import format_bytes
from fedvit.roles import ProductPrecision
from fedvit.tensors import Array, TensorFile, Tensors, pack, total_bytes
from profiles.probes.host import peak_rss_bytes

CLASSES = 10
WARM_STEPS = 3
"""First steps, which allocate memory for later ones; they are not timed."""
SPARE_BYTES = 4 << 30
"""Space that must be free beside the features: on the disk, and in memory for the side that holds them all."""

Side = Literal["files", "memory"]


class ServerSettings(Struct, frozen=True, kw_only=True):
    devices: int = 100
    images: int = 500  # whose features each device uploaded
    local_blocks: int = 2
    batch_size: int = 32
    steps: int | None = None  # most steps to measure; None: one pass over the features
    seconds: float = 30.0  # no new step is measured after this time
    rounds: int = 1  # processes of each side, in turn
    threads: int | None = None  # of torch; None: its own choice
    accelerator: str = "cpu"  # torch device that trains
    precision: ProductPrecision = "fp32"  # of its products
    in_memory: bool = True  # whether to measure the side that holds all features in memory, where they fit


class TrainingFigures(Struct, frozen=True, kw_only=True):
    """Figures of one process."""

    steps: int
    images_per_s: float
    cpu_ms_per_image: float  # of all threads, the reading one included
    peak_rss_bytes: int
    loaded_bytes: int  # resident with libraries, model and the optimizer's state, before the round
    model_bytes: int  # of the model and of the optimizer's state, once
    accelerator_peak_bytes: int | None  # of tensors on a GPU; None: it trained on the processor


def run_server_bench(models: Iterable[str], settings: ServerSettings, progress: Progress = lambda line: None) -> Report:
    """Write features of each model as devices upload them, in the folder of temporary files, and train on them.

    Raises ConfigError for a model that does not fit the settings, and when the disk has too little space.
    """
    results = [_measure(model, settings, progress) for model in models]
    device = torch.device(settings.accelerator)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    builtins = msgspec.to_builtins(settings)
    return {"machine": describe_machine(), "accelerator": name, "settings": builtins, "results": results}


def _measure(model: str, settings: ServerSettings, progress: Progress) -> Report:
    with torch.device("meta"):
        collect = _find_collect(build_vit(model, CLASSES, seed=0), settings)
    features_bytes = settings.devices * settings.images * int(np.prod(collect.shape)) * 4
    sides: list[Side] = ["files"]
    if settings.in_memory and psutil.virtual_memory().available > features_bytes + SPARE_BYTES:
        sides.append("memory")
    runs: dict[Side, list[TrainingFigures]] = {"files": [], "memory": []}
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        if shutil.disk_usage(folder).free < features_bytes + SPARE_BYTES:
            raise ConfigError(
                "FV0002",
                f"features of {settings.devices} devices x {settings.images} images take "
                f"{format_bytes(features_bytes)}, and {folder} has less than that and {format_bytes(SPARE_BYTES)} "
                f"free: set TMPDIR to a larger disk, or measure fewer",
            )
        progress(f"{model}: writing {format_bytes(features_bytes)} of features")
        write_features(Path(folder), collect, settings)
        for number in range(settings.rounds):
            for side in sides:
                arguments = (model, side, folder, msgspec.json.encode(settings).decode())
                line = run_child("bench.server", *arguments, what=f"{model}, features in {side}")
                measured = msgspec.json.decode(line, type=TrainingFigures)
                figures = f"{measured.images_per_s:.1f} images/s, peak {format_bytes(measured.peak_rss_bytes)}"
                progress(f"{model}, features in {side}, {number + 1}/{settings.rounds}: {figures}")
                runs[side].append(measured)
    files, memory = runs["files"], runs["memory"]
    speed = median(each.images_per_s for each in files)
    in_memory = median(each.images_per_s for each in memory) if memory else None
    return {
        "model": model,
        "features_bytes": features_bytes,
        "model_bytes": files[0].model_bytes,
        "loaded_bytes": files[0].loaded_bytes,
        "steps": files[0].steps,
        "images_per_s": speed,
        "images_per_s_runs": [each.images_per_s for each in files],
        "cpu_ms_per_image": median(each.cpu_ms_per_image for each in files),
        "peak_rss_bytes": max(each.peak_rss_bytes for each in files),
        "peak_above_model_bytes": max(each.peak_rss_bytes - each.loaded_bytes for each in files),
        "accelerator_peak_bytes": max(each.accelerator_peak_bytes or 0 for each in files) or None,
        # the same with all features concatenated in memory; None: not measured
        "in_memory_images_per_s": in_memory,
        "in_memory_images_per_s_runs": [each.images_per_s for each in memory],
        "in_memory_cpu_ms_per_image": median(each.cpu_ms_per_image for each in memory) if memory else None,
        "in_memory_peak_rss_bytes": max((each.peak_rss_bytes for each in memory), default=None),
        "speed_ratio": speed / in_memory if in_memory else None,
    }


def _make_method(settings: ServerSettings) -> EFTViT:
    return EFTViT(
        local_blocks=settings.local_blocks, server_epochs=1, server_batch_size=settings.batch_size, server_lr=1e-4
    )


def _find_collect(vit: PatchViT, settings: ServerSettings) -> Collect:
    """Find what devices upload of each image. Raises ConfigError when the model has no block for the server."""
    method = _make_method(settings)
    method.rules(vit)
    (phase,) = method.phases(vit)
    assert phase.collect is not None  # EFTViT's only phase collects
    return phase.collect


def write_features(folder: Path, collect: Collect, settings: ServerSettings) -> None:
    """Write uploads of noise as a coordinator stores them, and the digest of each in a file."""
    blobs = BlobStore(folder / "blobs")
    for number in range(settings.devices):
        draw = np.random.default_rng(number)
        features = draw.standard_normal((settings.images, *collect.shape), np.float32)
        labels = draw.integers(CLASSES, size=settings.images)
        digest = blobs.put(pack({collect.output: features, "labels": labels})).digest
        (folder / f"upload-{number:05}").write_text(digest)


class _Enough(Exception):
    """Enough steps were measured."""


class _StepClock:
    """Measures the time of each step, and ends the round when enough are measured."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._began = time.perf_counter()
        self.done_at: list[float] = []
        self.cpu_s: list[float] = []  # of the process, up to then

    def __call__(self, line: str) -> None:
        self.done_at.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        timed = len(self.done_at) - WARM_STEPS
        late = self.done_at[-1] - self._began > self._settings.seconds
        if timed > 0 and (late or timed == self._settings.steps):
            raise _Enough


def train(model: str, side: Side, folder: Path, settings: ServerSettings) -> TrainingFigures:
    """Run the server step of a round with the optimizer's state of the round before."""
    vit, method = build_vit(model, CLASSES, seed=0), _make_method(settings)
    collect = _find_collect(vit, settings)
    rule = method.server_rule(vit)
    blobs = BlobStore(folder / "blobs")
    digests = {file.name: file.read_text() for file in sorted(folder.glob("upload-*"))}
    files = {digest: TensorFile(blobs.path(digest)) for digest in digests.values()}
    stored: Mapping[str, Mapping[str, Array]] = files
    values = {name: value.numpy() for name, value in vit.tensors().items()}
    server_side = {name: values[name].copy() for name in method.names_with(vit, Role.GLOBAL, Role.SEEDED)}
    state = ServerState(server_side, _make_optimizer_state(server_side))
    loaded_bytes = psutil.Process().memory_info().rss
    if side == "memory":
        stored = {"everything": _concatenate(collect.output, list(files.values()))}
        digests = {"all": "everything"}

    def load(digest: str) -> Mapping[str, Array]:
        return stored[digest]

    clock = _StepClock(settings)
    context = RoundContext(
        round=2,
        seed=0,
        lr_scale=1.0,
        vit=vit,
        accelerator=settings.accelerator,
        load=load,
        progress=clock,
        precision=settings.precision,
    )
    uploads = [Upload(device, settings.images, digest, partial(load, digest)) for device, digest in digests.items()]
    with contextlib.suppress(_Enough):
        rule.close(state, uploads, context)
    steps, device = len(clock.done_at) - WARM_STEPS, torch.device(settings.accelerator)
    images = steps * settings.batch_size
    return TrainingFigures(
        steps=steps,
        images_per_s=images / (clock.done_at[-1] - clock.done_at[WARM_STEPS - 1]),
        cpu_ms_per_image=1e3 * (clock.cpu_s[-1] - clock.cpu_s[WARM_STEPS - 1]) / images,
        peak_rss_bytes=peak_rss_bytes() or 0,
        loaded_bytes=loaded_bytes,
        model_bytes=total_bytes(values) + total_bytes(state.memory),
        accelerator_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def _make_optimizer_state(tensors: Tensors) -> Tensors:
    """Make AdamW's state of each tensor, as the rule keeps it between rounds."""
    slots = {slot: {name: np.full_like(value, 1e-8) for name, value in tensors.items()} for slot in AdamW.slots}
    slots["step"] = {name: np.ones((), np.float32) for name in tensors}
    return {f"{PREFIX}{slot}/{name}": value for slot, values in slots.items() for name, value in values.items()}


def _concatenate(name: str, uploads: list[TensorFile]) -> Tensors:
    """Fill one tensor with the features of all uploads."""
    rows = [upload.shape(name)[0] for upload in uploads]
    features = np.empty((sum(rows), *uploads[0].shape(name)[1:]), np.float32)
    begin = 0
    for upload, count in zip(uploads, rows, strict=True):
        features[begin : begin + count] = upload[name]
        begin += count
    return {name: features, "labels": np.concatenate([upload["labels"] for upload in uploads])}


def main() -> None:
    """Run one measured process; arguments: the model, the side, the folder, the settings as JSON."""
    model, side, folder, text = sys.argv[1:]
    settings = msgspec.json.decode(text, type=ServerSettings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    figures = train(model, msgspec.convert(side, Side), Path(folder), settings)
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")


if __name__ == "__main__":
    main()
