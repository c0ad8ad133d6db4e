"""A selector of devices: the higher a device's loss, the more often it is asked."""

from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.record.tables import ResultRecord

MOST_LOSS = 100.0
"""Larger losses, whatever a device claims, count as this."""


def select_by_loss(
    devices: Sequence[str], wanted: int, seed: int, round_number: int, answers: Mapping[str, ResultRecord]
) -> list[str]:
    """Draw devices in proportion to the loss in their newest answer; one without an answer has the largest."""
    losses = {name: np.clip(answers[name].metrics.get("loss", 0.0), 1e-3, MOST_LOSS) for name in answers}
    largest = max(losses.values(), default=1.0)
    weights = np.array([losses.get(name, largest) for name in devices])
    draw = np.random.default_rng([seed, round_number])
    chosen = draw.choice(len(devices), min(wanted, len(devices)), replace=False, p=weights / weights.sum())
    return [devices[place] for place in chosen]
