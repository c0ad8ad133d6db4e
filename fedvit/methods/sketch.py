"""Sketch of features: fewer numbers, each the sum of some of a feature's with random signs.

Source: count sketch (Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002); for ridge
regression: Clarkson and Woodruff, "Low-rank approximation and regression in input sparsity time", arXiv:1207.6365.
Here numbers are added at a fixed distance, as those of a feature have no order. Signs follow from the width.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def sketch_features(features_BD: Tensor, count: int) -> Tensor:
    """Return (B, count) numbers; their mean square is that of the features. `count` is at most D."""
    width = features_BD.shape[1]
    if count == width:
        return features_BD
    signed_BD = features_BD * torch.tensor(_scale_signs(width, count).tolist(), device=features_BD.device)
    parts: tuple[Tensor, ...] = signed_BD.split(count, dim=1)
    first, *others = parts
    for part in others:
        rest = first[:, part.shape[1] :]
        first = (
            first + part if part.shape == first.shape else torch.cat([first[:, : part.shape[1]] + part, rest], dim=1)
        )
    return first


def expand_weights(weights: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Return the weights (D, C) of features that are those of their sketch, (count, C)."""
    count = len(weights)
    if count == width:
        return weights
    expanded: npt.NDArray[np.float64] = weights[np.arange(width) % count] * _scale_signs(width, count)[:, None]
    return expanded


def _scale_signs(width: int, count: int) -> npt.NDArray[np.float64]:
    signs: npt.NDArray[np.float64] = np.random.default_rng(width).choice([-1.0, 1.0], width)
    scaled: npt.NDArray[np.float64] = signs * (count / width) ** 0.5
    return scaled
