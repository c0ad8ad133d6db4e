"""Features of layers that a phase does not train: made once for each view of an image, and kept in a file.

`fedvit.frozen_part` says for which phases.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge_client.storage.feature_file import ID_BYTES, FeatureFile
from edge_client.storage.vault_key import VaultKey
from edge_client.work.batches import Fed, batch_rows, pad_rows, training_length
from edge_client.work.steps import Answer, Graph
from fedvit.data.folder import Split
from fedvit.data.images import DECODING, Flags, Indices, augment, draw_views, find_views, normalise, unfold
from fedvit.files import name_failure
from fedvit.frozen_part import SAMPLES
from fedvit.program import SEEDS, Program, Train
from fedvit.tensors import Array


@dataclass(frozen=True)
class CutGraph:
    """A phase's graph in two parts, and the file of the features between them."""

    features: bytes
    rest: bytes
    inputs: dict[str, str]  # of the rest -> output of the first part
    shapes: dict[str, tuple[int, ...]]  # of one image's features, by input
    share: float  # of the FLOPs, that of the first part
    initial: dict[str, str]  # digests of the first values of groups that never change
    changing: tuple[str, ...]  # the other tensors that the first part reads
    file: Path
    most_records: int
    key: bytes | None  # with which the features are encrypted

    @property
    def numbers(self) -> int:
        """Numbers of one image's features."""
        return sum(map(math.prod, self.shapes.values()))


def open_features(file: Path) -> int:
    """Open a file of features for reading and writing. Raises StorageFailed."""
    with name_failure(f"cannot open {file}"):
        return os.open(file, os.O_RDWR | os.O_CLOEXEC)


def count_flops(flops: int, cut: CutGraph | None, runs: int, computed: int) -> int:
    """Return the FLOPs of runs of a graph, of which `flops` is one run; of a cut one, of runs of both parts."""
    share = cut.share if cut else 0.0
    return round(flops * (runs * (1 - share) + computed * share))


class FrozenFeatures:
    """The features of a device's training images in one phase. It closes `handle`, the open file of `cut`."""

    def __init__(
        self,
        cut: CutGraph,
        handle: int,
        open_graph: Callable[[bytes], Graph],
        program: Program,
        values: Mapping[str, Array],
        images: Split,
    ) -> None:
        self.computed = 0  # runs of the first part since `batches` gave the last batch
        self._cut = cut
        self._open_graph = open_graph
        self._graph: Graph | None = None
        self._answer: Answer | None = None  # of the graph, with the tensors that it reads
        self._values = {f"tensor/{name}": value for name, value in values.items()}
        self._images = images
        self._batch = program.batch
        key = None if cut.key is None else VaultKey(cut.file, cut.key)
        self._ids = list_ids(images.paths, describe_origin(cut, program, values), self._batch.views or None)
        known = [name for names in self._ids for name in names if name]
        self._file = FeatureFile(handle, cut.numbers, cut.most_records, known, key)

    def close(self) -> None:
        self._file.close()
        self._graph = self._answer = None

    def batches(
        self,
        phase: Train,
        order_rng: np.random.Generator,
        picture_rng: np.random.Generator,
        seed_rng: np.random.Generator,
    ) -> Iterator[Fed]:
        """Yield the batches of a phase in the order of `training_batches`, with features in place of images."""
        length = training_length(self._batch, phase)
        for epoch, rows in batch_rows(len(self._images), self._batch, phase, order_rng):
            self.computed = 0
            views = draw_views(len(rows), self._batch, picture_rng)
            features, readable = self._load(rows, np.zeros(len(rows), np.int64) if views is None else views)
            feeds: dict[str, Any] = dict(self._divide(pad_rows(features, length)))
            if self._batch.sample_seeds:
                feeds["batch/seeds"] = pad_rows(seed_rng.integers(0, SEEDS, len(rows)), length)
            feeds["batch/labels"] = pad_rows(self._images.labels[rows], length)
            feeds["batch/weight"] = pad_rows(readable.astype(np.float32), length)
            yield Fed(epoch, rows, readable, feeds, self.computed)

    def _load(self, rows: Indices, views: Indices) -> tuple[Array, Flags]:
        """Return features of images in these views, (B, numbers) float32, and which of the images could be read."""
        features = np.zeros((len(rows), self._cut.numbers), np.float32)
        missing = []
        for place, (row, view) in enumerate(zip(rows, views, strict=True)):
            name = self._ids[row][view]
            kept = self._file.read(name) if name else None
            if kept is None:
                missing.append(place)
            else:
                features[place] = kept
        readable = np.ones(len(rows), np.bool_)
        if missing:
            features[missing], readable[missing] = self._compute(rows[missing], views[missing])
        return features, readable

    def _compute(self, rows: Indices, views: Indices) -> tuple[Array, Flags]:
        """Run the first part on images in these views, and keep the features of those that could be read."""
        if self._graph is None or self._answer is None:
            self._graph = self._open_graph(self._cut.features)
            self._answer = self._graph.hold(self._values)
        batch, size = self._batch, self._graph.inputs[SAMPLES].shape[0]
        made, seen = [], []
        for first in range(0, len(rows), size):
            some, seen_in = rows[first : first + size], views[first : first + size]
            pictures, readable = self._images.load(some, batch.image_size)
            if batch.is_augmented:
                pictures = augment(pictures, batch, find_views(some, seen_in, batch))
            patches = unfold(normalise(pictures, batch), batch.patch_size)
            outputs = self._answer({SAMPLES: pad_rows(patches, size)})
            parts = [outputs[value][: len(some)].reshape(len(some), -1) for value in self._cut.inputs.values()]
            features = np.concatenate(parts, axis=1, dtype=np.float32)
            self.computed += 1
            for row, view, is_readable, numbers in zip(some, seen_in, readable, features, strict=True):
                if is_readable and (name := self._ids[row][view]):
                    self._file.write(name, numbers)
            made.append(features)
            seen.append(readable)
        return np.concatenate(made), np.concatenate(seen)

    def _divide(self, features: Array) -> Iterator[tuple[str, Array]]:
        """Yield the inputs of the rest."""
        first = 0
        for name, shape in self._cut.shapes.items():
            end = first + math.prod(shape)
            yield name, features[:, first:end].reshape(len(features), *shape)
            first = end


def describe_origin(cut: CutGraph, program: Program, values: Mapping[str, Array]) -> bytes:
    """Return a digest of everything but the image that features follow from."""
    digest = hashlib.blake2b(cut.features)
    batch = program.batch
    images = (DECODING, batch.image_size, batch.patch_size, batch.mean, batch.std)
    augmentation = (batch.crop_padding, batch.flip, batch.brightness)
    digest.update(msgspec.msgpack.encode((cut.initial, *images, *augmentation)))
    for name in cut.changing:
        digest.update(msgspec.msgpack.encode((name, values[name].shape)))
        digest.update(np.ascontiguousarray(values[name]).reshape(-1).view(np.uint8).data)
    return digest.digest()


def list_ids(paths: Sequence[Path], origin: bytes, views: int | None) -> list[list[bytes]]:
    """Return the ids of the features of each view of the images, of one if `views` is None; b"" if a file is missing.

    Views follow from an image's row, so they are other ones if images before it come or go.
    """
    ids = []
    for row, path in enumerate(paths):
        try:
            now = os.stat(path)
        except OSError:
            ids.append([b""] * (views or 1))
            continue
        stamp = (os.fsencode(path), now.st_size, now.st_mtime_ns)
        stamps = [(*stamp, row, view) for view in range(views)] if views else [stamp]
        ids.append([_digest_stamp(one, origin) for one in stamps])
    return ids


def _digest_stamp(stamp: tuple[object, ...], origin: bytes) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(stamp), key=origin[:64], digest_size=ID_BYTES).digest()
