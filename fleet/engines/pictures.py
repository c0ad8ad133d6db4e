"""The images, or the texts, of all devices of a simulation on one accelerator, and batches of them made there.

The random draws are those of a device (`edge_client.work.batches`); torch computes the batches from them.
Letters: D devices, T steps, B samples, S image side, N patches, K kept patches, V values of a patch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edge_client.work.batches import batch_rows
from fedvit.data.folder import Split, TextSplit
from fedvit.data.images import Flags, Indices, draw_kept, draw_variation
from fedvit.errors import DataError
from fedvit.program import SEEDS, Batch, Train
from fedvit.tensors import Array


@dataclass(frozen=True, eq=False)
class DeviceImages:
    """One device's images of one split, as rows of `Pictures`."""

    split: Split
    rows: Indices  # (n,)
    readable: Flags  # (n,)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Any:
        return self.split.labels


class Pictures:
    """Decoded images of many devices, (n, S, S, 3) uint8, device after device; those of a folder only once.

    Of texts `pixels` are the characters of the samples instead, (n, context) int64.
    """

    def __init__(self, batch: Batch, accelerator: torch.device) -> None:
        self.batch = batch
        self._size = size = batch.image_size
        self._accelerator = accelerator
        self._parts: list[Tensor] = []
        self._count = 0
        self._known: dict[tuple[Path, ...], tuple[Indices, Flags]] = {}
        self.pixels = torch.empty(0, size, size, 3, dtype=torch.uint8, device=accelerator)
        if batch.text:
            self.pixels = torch.empty(0, batch.text.context, dtype=torch.int64, device=accelerator)

    def add(self, split: Split) -> DeviceImages:
        """Decode a split. Call `finish` before the images are used."""
        if split.paths not in self._known:
            pixels: Array
            if isinstance(split, TextSplit):
                pixels, readable = np.ascontiguousarray(split.tokens), np.ones(len(split), dtype=np.bool_)
            else:
                pixels, readable = split.load(np.arange(len(split)), self._size)
                split.files.forget()
            self._parts.append(torch.from_numpy(pixels))
            self._known[split.paths] = np.arange(self._count, self._count + len(split)), readable
            self._count += len(split)
        return DeviceImages(split, *self._known[split.paths])

    def finish(self) -> None:
        """Move what was added to the accelerator."""
        self.pixels = torch.cat([self.pixels.cpu(), *self._parts]).to(self._accelerator)
        self._parts = []


class Drawn(NamedTuple):
    """The batches of a phase on one device, padded to B samples."""

    arrays: dict[str, Array]  # each (T, B, ...)
    epochs: list[int]  # of each step
    rows: list[Indices]  # of each step: which of the device's own images
    readable: list[Flags]
    runs: int  # of a device's graph, which sums gradients over parts of a batch


def draw_training(images: DeviceImages, batch: Batch, phase: Train, generators: Sequence[np.random.Generator]) -> Drawn:
    """A device's draws for a phase: the order of its images, their augmentation, and the kept patches.

    Raises DataError when none of the images can be decoded.
    """
    order_rng, picture_rng, mask_rng = generators
    columns: dict[str, list[Array]] = {}
    drawn = Drawn({}, [], [], [], 0)
    runs = 0
    for epoch, rows in batch_rows(len(images), batch, phase, order_rng):
        variation = draw_variation(rows, batch, picture_rng)
        kept = None
        if batch.kept_patches < batch.patches:
            kept = draw_kept(mask_rng, len(rows), batch.patches, batch.kept_patches)
        seeds = mask_rng.integers(0, SEEDS, len(rows)) if batch.sample_seeds else None
        readable = images.readable[rows]
        if not readable.any():
            continue
        given = {
            "rows": images.rows[rows],
            "labels": images.labels[rows],
            "weight": readable.astype(np.float32),
            "kept": kept,
            "seeds": seeds,
            **variation._asdict(),
        }
        for name, values in given.items():
            if values is not None:
                columns.setdefault(name, []).append(_padded(values, batch.batch_size))
        drawn.epochs.append(epoch)
        drawn.rows.append(rows)
        drawn.readable.append(readable)
        runs += _runs(readable, batch) if phase.update else 1
    if not drawn.epochs:
        raise DataError("FV1403", f"none of the {len(images)} training images can be decoded")
    return drawn._replace(arrays={name: np.stack(values) for name, values in columns.items()}, runs=runs)


def _runs(readable: Flags, batch: Batch) -> int:
    """Parts of a batch that hold more than padding."""
    size = batch.run_size
    return sum(bool(readable[first : first + size].any()) for first in range(0, len(readable), size))


def _padded(values: Array, length: int) -> Array:
    made = np.zeros((length, *values.shape[1:]), values.dtype)
    made[: len(values)] = values
    return made


def training_samples(pixels: Tensor, fed: Mapping[str, Tensor], batch: Batch | None) -> dict[str, Tensor]:
    """Patches (D, B, K, V) float32 of images, or characters, like `edge_client.work.batches.training_feeds`.

    Without a batch `pixels` are features, which stand for patches.
    """
    if batch is None:
        return {"batch/patches": pixels[fed["rows"]]}
    if batch.text:
        return {"batch/tokens": pixels[fed["rows"]]}
    return {"batch/patches": _training_patches(pixels, fed, batch)}


def whole_samples(pixels: Tensor, batch: Batch | None) -> dict[str, Tensor]:
    """Without masks and augmentation."""
    if batch is None:
        return {"batch/patches": pixels}
    return (
        {"batch/tokens": pixels}
        if batch.text
        else {"batch/patches": unfolded(normalised(pixels, batch), batch.patch_size)}
    )


def _training_patches(pixels: Tensor, fed: Mapping[str, Tensor], batch: Batch) -> Tensor:
    images = varied(pixels[fed["rows"]], fed, batch)
    patches = unfolded(normalised(images, batch), batch.patch_size)
    if "kept" not in fed:
        return patches
    kept = fed["kept"].unsqueeze(-1)
    return patches.gather(-2, kept.expand(*kept.shape[:-1], patches.shape[-1]))


def varied(images: Tensor, fed: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Cropped, flipped, brighter or darker: (..., S, S, 3) uint8, as `fedvit.data.images.augment` does."""
    side, accelerator = images.shape[-2], images.device
    if "top" in fed:
        border = batch.crop_padding
        reflected = (torch.arange(side + 2 * border, device=accelerator) - border).abs()
        reflected = torch.where(reflected >= side, 2 * (side - 1) - reflected, reflected)
        within = torch.arange(side, device=accelerator)
        tall = reflected[fed["top"].unsqueeze(-1) + within]
        wide = reflected[fed["left"].unsqueeze(-1) + within]
        images = images.gather(-3, tall[..., :, None, None].expand(images.shape))
        images = images.gather(-2, wide[..., None, :, None].expand(images.shape))
    if "flipped" in fed:
        images = torch.where(fed["flipped"][..., None, None, None], images.flip(-2), images)
    if "factors" in fed:
        brighter = images * fed["factors"][..., None, None, None]
        images = brighter.clamp(0, 255).round().to(torch.uint8)
    return images


def normalised(images: Tensor, batch: Batch) -> Tensor:
    """(value / 255 - mean) / std for each colour, float32."""
    scale, shift = _scale_and_shift(batch.mean, batch.std, images.device)
    return images.float() * scale - shift


@cache
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], accelerator: torch.device
) -> tuple[Tensor, Tensor]:
    """Cached, since nothing can be copied to a GPU while its kernels are recorded."""
    deviation = np.asarray(std)
    scale = (1.0 / (255.0 * deviation)).astype(np.float32)
    shift = (np.asarray(mean) / deviation).astype(np.float32)
    return torch.from_numpy(scale).to(accelerator), torch.from_numpy(shift).to(accelerator)


def unfolded(images: Tensor, patch: int) -> Tensor:
    """(..., S, S, 3) -> (..., N, V), patches row by row, a patch's values by colour, row, column."""
    grid = images.shape[-2] // patch
    whole = images[..., : grid * patch, : grid * patch, :]
    front = whole.shape[:-3]
    split = whole.reshape(*front, grid, patch, grid, patch, 3)
    last = len(front)
    order = (*range(last), *(last + axis for axis in (0, 2, 4, 1, 3)))
    return split.permute(order).reshape(*front, grid * grid, 3 * patch * patch)
