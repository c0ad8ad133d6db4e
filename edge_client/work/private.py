"""Clipping and noise on a device, if the Program asks for privacy."""

import secrets

import numpy as np

from edge_client.work.runtime import Seeds
from fedvit.program import Collect
from fedvit.tensors import Array, Tensors


def clip_update(tensors: Tensors, norm: float) -> Tensors:
    """Scale deltas down together, so that their Euclidean norm is at most `norm`.

    >>> clip_update({"w": np.float32([3, 4])}, 1.0)["w"].tolist() == np.float32([0.6, 0.8]).tolist()
    True
    """
    length = float(np.sqrt(sum(float(np.square(value.astype(np.float64)).sum()) for value in tensors.values())))
    if length <= norm:
        return tensors
    return {
        name: (value * np.asarray(norm / length, value.dtype)).astype(value.dtype) for name, value in tensors.items()
    }


def noisy_rows(values: Array, collect: Collect, seeds: Seeds) -> Array:
    """(rows, ...) float32: each row at most `clip` long, plus Gaussian noise of std `noise * clip` in every number.

    The noise is seeded by the operating system, unless the Program asks for deterministic noise (`rehearsal`).
    """
    if collect.clip is None or not len(values):
        return values
    flat = values.reshape(len(values), -1).astype(np.float64)
    lengths = np.sqrt(np.square(flat).sum(axis=1, keepdims=True))
    flat *= collect.clip / np.maximum(lengths, collect.clip)
    draw = seeds.generators(7)[6] if collect.rehearsal else np.random.default_rng(secrets.randbits(256))
    flat += draw.normal(0.0, collect.noise * collect.clip, flat.shape)
    return flat.astype(np.float32).reshape(values.shape)
