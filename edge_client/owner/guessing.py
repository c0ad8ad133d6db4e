"""The class that a device's newest own model gives to an image. Imports onnxruntime, which takes seconds."""

import heapq
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_client.owner.trained import load_own_model
from edge_client.storage.models import DeviceModels
from edge_client.storage.vault import Vault
from export.bundle.measure import RunGraph, are_probabilities, as_input
from export.bundle.read import Bundle
from fedvit.data.folder import DeviceData
from fedvit.data.images import DECODED_BYTES, read_image
from fedvit.errors import ConfigError, DataError
from fedvit.program import Batch


class Guess(NamedTuple):
    label: str
    probability: float


MOST_SORTED = 2000
"""Images that are answered before the first one is shown: about a minute of a small model on a board."""

Guesser = Callable[[Path], Guess]
"""Raises DataError when the image cannot be read."""


def newest_guesser(
    *,
    device: str,
    state: Path,
    data: DeviceData | None,
    threads: int,
    vault_key: Path | None = None,
    decoded_bytes: int = DECODED_BYTES,
) -> Guesser | None:
    """Return the guesser of this device's newest run; None if the device has taken part in no run.

    Raises ConfigError when the model is not whole here, and StorageFailed.
    """
    runs = Vault(state / "vault").notes.list_runs()
    if not runs:
        return None
    trained, _ = load_own_model(runs[0], device=device, state=state, data=data, threads=threads, vault_key=vault_key)
    graph = RunGraph(trained.graph, trained.values, trained.batch, threads)
    return lambda path: _guess(graph, trained.batch, trained.classes, path, decoded_bytes)


def serving_guesser(state: Path, threads: int) -> Guesser:
    """Return the guesser of the model that answers on this device. Raises ConfigError if none is promoted."""
    models = DeviceModels(state)
    if (model := models.read().serving()) is None:
        raise ConfigError("FV1491", "no model of this device is promoted yet: edge-client models promote NAME")
    bundle = Bundle.open(models.path(model.name), None, threads)
    bundle.check_classifies()

    def guess(path: Path) -> Guess:
        pixels = read_image(path, bundle.batch.image_size)
        [best] = bundle.rank(bundle.calibrate(bundle.run(pixels).logits[0]), 1)
        return Guess(best.label, best.probability)

    return guess


def sort_least_sure(images: Sequence[Path], guesser: Guesser) -> list[Path]:
    """Sort the newest images by the confidence of their guesses, the least sure first; the others come last."""

    def confidence(path: Path) -> float:
        try:
            return guesser(path).probability
        except DataError:
            return math.inf

    newest = heapq.nlargest(MOST_SORTED, images, key=_read_time)
    chosen = set(newest)
    return [*sorted(newest, key=confidence), *(path for path in images if path not in chosen)]


def _read_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return -math.inf


def _guess(graph: RunGraph, batch: Batch, classes: Sequence[str], path: Path, decoded_bytes: int) -> Guess:
    answers_BC = graph(as_input(read_image(path, batch.image_size, decoded_bytes=decoded_bytes)[None], batch))
    [answers_C] = answers_BC
    if not are_probabilities(answers_BC):
        answers_C = np.exp(answers_C - answers_C.max())
        answers_C /= answers_C.sum()
    best = int(answers_C.argmax())
    return Guess(classes[best], float(answers_C[best]))
