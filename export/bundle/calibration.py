"""Confidences that mean what they say, from a model's answers to test images.

A network's probabilities are mostly too large. One temperature, by which all logits are divided, corrects that (Guo et
al., "On Calibration of Modern Neural Networks", ICML 2017). The classes stay in the same order.
"""

import numpy as np
from msgspec import Struct

from fedvit.data.images import Floats, Indices

LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.1, 10.0
LEAST_IMAGES = 10
"""Test images below which nothing is fitted."""
SURE_SHARE = 0.95
"""Share of the right answers to test images that are not called unsure."""
_PRIOR = 1.0
"""Standard deviation of the temperature's logarithm before any image is seen: few images move it little."""
_STEPS = 40
_GOLDEN = (5**0.5 - 1) / 2


class Calibration(Struct, frozen=True, kw_only=True):
    """The correction of a model's confidences, and the confidence below which its answer is "unsure"."""

    temperature: float
    unsure_below: float
    images: int  # test images that it was chosen on


def calibrate(logits_BC: Floats, labels_B: Indices) -> Calibration | None:
    """Choose the calibration on test images; None if they are too few."""
    images = len(labels_B)
    if images < LEAST_IMAGES or not np.isfinite(logits_BC).all():
        return None
    temperature = fit_temperature(logits_BC, labels_B)
    confidence_B = soften(logits_BC, temperature).max(axis=1)
    right_B = logits_BC.argmax(axis=1) == labels_B
    below = float(np.quantile(confidence_B[right_B], 1 - SURE_SHARE)) if right_B.any() else 0.0
    return Calibration(temperature=round(temperature, 4), unsure_below=round(below, 4), images=images)


def fit_temperature(logits_BC: Floats, labels_B: Indices) -> float:
    """Return the temperature with the greatest posterior probability, by a golden-section search."""

    def cost(log_temperature: float) -> float:
        scaled = logits_BC.astype(np.float64) / np.exp(log_temperature)
        scaled -= scaled.max(axis=1, keepdims=True)
        likelihoods = scaled[np.arange(len(labels_B)), labels_B] - np.log(np.exp(scaled).sum(axis=1))
        return float(-likelihoods.sum() + (log_temperature / _PRIOR) ** 2 / 2)

    low, high = float(np.log(LEAST_TEMPERATURE)), float(np.log(GREATEST_TEMPERATURE))
    for _ in range(_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if cost(left) < cost(right):
            high = right
        else:
            low = left
    return float(np.exp((low + high) / 2))


def soften(logits_BC: Floats, temperature: float) -> Floats:
    """Return the probabilities of logits at a temperature."""
    scaled_BC = logits_BC / np.float32(temperature)
    powers_BC: Floats = np.exp(scaled_BC - scaled_BC.max(axis=1, keepdims=True))
    powers_BC /= powers_BC.sum(axis=1, keepdims=True)
    return powers_BC
