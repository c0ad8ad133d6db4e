"""The batches of a task: order, augmentation and masking of images, or samples of text.

All draws follow from the task's seeds.
"""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import numpy as np

from fedvit.data.folder import Split, TextSplit
from fedvit.data.images import Flags, Indices, augment, draw_kept, draw_variation, normalise, select, unfold
from fedvit.program import SEEDS, Batch, Program, Train
from fedvit.tensors import Array

IMAGES_AT_ONCE = 4
"""Number of images that are converted to floats at a time."""


class Fed(NamedTuple):
    """One batch, ready for the graphs."""

    epoch: int
    rows: Indices
    readable: Flags
    feeds: dict[str, Any]
    computed: int = 0  # runs of the first part of a cut graph


def training_batches(
    images: Split,
    batch: Batch,
    phase: Train,
    order_rng: np.random.Generator,
    picture_rng: np.random.Generator,
    mask_rng: np.random.Generator,
) -> Iterator[Fed]:
    """The batches of a phase in order, until its epochs or its steps are used up."""
    length = training_length(batch, phase)
    for epoch, rows in batch_rows(len(images), batch, phase, order_rng):
        feeds, readable = training_feeds(images, rows, batch, length, picture_rng, mask_rng)
        yield Fed(epoch, rows, readable, feeds)


def training_length(batch: Batch, phase: Train) -> int:
    """Return the samples of a padded batch: a multiple of a run's where several runs of the graph process it."""
    length = batch.batch_size
    return -(-length // batch.run_size) * batch.run_size if phase.update else length


def batch_rows(
    images: int, batch: Batch, phase: Train, order_rng: np.random.Generator
) -> Iterator[tuple[int, Indices]]:
    """(epoch, rows of the device's images) of each batch of a phase, until its epochs or its steps are used up."""
    left = phase.steps
    for epoch in range(phase.epochs):
        order = order_rng.permutation(images)
        for first in range(0, images, batch.batch_size):
            if left == 0:
                return
            left = None if left is None else left - 1
            yield epoch, order[first : first + batch.batch_size]


def ahead(batches: Iterator[Fed]) -> Generator[Fed]:
    """The same batches; the next one is prepared while the caller works on one, as decoding takes time."""
    ready: queue.Queue[Fed | Exception | None] = queue.Queue(maxsize=1)
    over = threading.Event()

    def put(item: Fed | Exception | None) -> None:
        while not over.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for fed in batches:
                if over.is_set():
                    break
                put(fed)
        except Exception as error:  # noqa: BLE001 - raised again where the batches are used
            put(error)
        put(None)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        over.set()
        thread.join()


def training_feeds(
    images: Split,
    rows: Indices,
    batch: Batch,
    length: int,
    picture_rng: np.random.Generator,
    mask_rng: np.random.Generator,
) -> tuple[dict[str, Any], Flags]:
    """Graph inputs of one batch, padded to `length`, and which of `rows` could be read."""
    if isinstance(images, TextSplit):
        readable = np.ones(len(rows), dtype=np.bool_)
        sample = {"tokens": images.tokens[rows], "labels": images.labels[rows], "weight": readable.astype(np.float32)}
        return {f"batch/{name}": pad_rows(values, length) for name, values in sample.items()}, readable
    pictures, readable = images.load(rows, batch.image_size)
    pictures = augment(pictures, batch, draw_variation(rows, batch, picture_rng))
    masked = batch.kept_patches < batch.patches
    kept = draw_kept(mask_rng, len(rows), batch.patches, batch.kept_patches) if masked else None
    patches = np.zeros((length, batch.kept_patches, batch.patch_values), np.float32)
    for first in range(
        0, len(rows), IMAGES_AT_ONCE
    ):  # a whole batch as floats takes much more memory than its kept patches
        some = slice(first, first + IMAGES_AT_ONCE)
        whole = unfold(normalise(pictures[some], batch), batch.patch_size)
        patches[first : first + len(whole)] = whole if kept is None else select(whole, kept[some])
    feeds: dict[str, Any] = {"batch/patches": patches}
    if kept is not None:
        feeds["batch/kept"] = pad_rows(kept, length)
    if batch.sample_seeds:
        feeds["batch/seeds"] = pad_rows(mask_rng.integers(0, SEEDS, len(rows)), length)
    feeds["batch/labels"] = pad_rows(images.labels[rows], length)
    feeds["batch/weight"] = pad_rows(readable.astype(np.float32), length)
    return feeds, readable


def whole_samples(images: Split, chosen: Indices, batch: Batch) -> Iterator[tuple[Indices, Flags, dict[str, Array]]]:
    """Batches of samples without masks and augmentation: (rows, which of them could be read, padded graph inputs)."""
    for first in range(0, len(chosen), batch.answer_size):
        rows = chosen[first : first + batch.answer_size]
        if isinstance(images, TextSplit):
            yield (
                rows,
                np.ones(len(rows), dtype=np.bool_),
                {"batch/tokens": pad_rows(images.tokens[rows], batch.answer_size)},
            )
            continue
        pictures, readable = images.load(rows, batch.image_size)
        patches = unfold(normalise(pictures, batch), batch.patch_size)
        yield rows, readable, {"batch/patches": pad_rows(patches, batch.answer_size)}


def choose_rows(count: int, capacity: int, rng: np.random.Generator) -> Indices:
    """Return all rows, or a random choice of as many as fit, ascending."""
    return np.arange(count) if count <= capacity else np.sort(rng.choice(count, capacity, replace=False))


def facts_of(program: Program, phase: Train, images: Split, rng: np.random.Generator) -> dict[str, Any]:
    """The inputs of a phase that describe the device, and its random numbers."""
    counts = images.count_classes(len(program.classes)).astype(np.float32)
    facts: dict[str, Any] = {"fact/class_counts": counts}
    for draw in phase.draws:
        numbers = rng.integers(draw.low, draw.high, draw.count)
        facts[f"draw/{draw.name}"] = np.sort(numbers) if draw.ascending else numbers
    return facts


def pad_rows(rows: Any, length: int) -> Any:
    """Pad a short last batch with zeros, whose weight is zero, too."""
    if len(rows) == length:
        return rows
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])
