"""The reference of drift: features around the means of the answered classes."""

import numpy as np
import pytest

from export.bundle import reference
from export.bundle.reference import find_centres
from fedvit.data.images import Floats


def draw(images: int, width: int, shared: float = 0.0) -> Floats:
    """Draw features that have a share in common, each with the variance 1."""
    rng = np.random.default_rng(0)
    own, common = rng.normal(size=(images, width)), rng.normal(size=(images, 1))
    return (np.sqrt(1 - shared) * own + np.sqrt(shared) * common).astype(np.float32)


def test_means_are_those_of_the_answered_classes() -> None:
    features = draw(90, 5)
    answers = np.arange(90) % 2
    features[answers == 1] += 3
    few = np.where(np.arange(90) < 4, 2, answers)
    assert (scarce := find_centres(features, few, 3))
    assert scarce.images[2] == 0
    assert np.allclose(scarce.means[2], features.mean(0), atol=1e-4), "a mean of four images stays on the device"
    centres = find_centres(features, answers, 3)
    assert centres
    assert centres.images == (45, 45, 0)
    assert np.allclose(
        centres.means, [features[answers == 0].mean(0), features[answers == 1].mean(0), features.mean(0)], atol=1e-4
    )
    assert np.asarray(centres.variance) == pytest.approx(np.ones(5), abs=0.4), "around each class, not around all"


@pytest.mark.parametrize("images", [60, 2000])
def test_spread_is_the_sum_of_squared_correlations(images: int) -> None:
    """Whatever the number of images."""
    width, shared = 40, 0.5
    free, tied = (find_centres(draw(images, width, share), np.zeros(images, np.int64), 1) for share in (0.0, shared))
    assert free
    assert tied
    assert width <= free.spread < 1.5 * width
    assert tied.spread == pytest.approx(width + shared**2 * width * (width - 1), rel=0.5)


def test_too_many_classes_have_no_centres(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MOST_CENTRE_VALUES", 99)
    assert find_centres(draw(40, 10), np.zeros(40, np.int64), 10) is None
