import numpy as np
import pytest

from export.bundle.calibration import LEAST_IMAGES, calibrate, soften
from fedvit.data.images import Floats, Indices


def answer_pictures(images: int, factor: float, seed: int = 0) -> tuple[Floats, Indices]:
    """Logits of a model whose confidences are right when they are divided by `factor`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=2.0, size=(images, 5)).astype(np.float32)
    labels = np.array([rng.choice(5, p=row / row.sum()) for row in soften(logits, 1.0).astype(np.float64)])
    return logits * np.float32(factor), labels


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_temperature_is_found(factor: float) -> None:
    """The mean confidence is the accuracy afterwards, and the classes stay as they were."""
    logits, labels = answer_pictures(4000, factor)
    calibration = calibrate(logits, labels)
    assert calibration is not None
    assert calibration.temperature == pytest.approx(factor, rel=0.1)
    soft = soften(logits, calibration.temperature)
    accuracy = (logits.argmax(axis=1) == labels).mean()
    assert soft.max(axis=1).mean() == pytest.approx(accuracy, abs=0.02)
    assert (soft.argmax(axis=1) == logits.argmax(axis=1)).all()


def test_most_right_answers_are_sure() -> None:
    logits, labels = answer_pictures(1000, 1.0)
    calibration = calibrate(logits, labels)
    assert calibration is not None
    right = logits.argmax(axis=1) == labels
    sure = soften(logits, calibration.temperature).max(axis=1) >= calibration.unsure_below
    assert sure[right].mean() == pytest.approx(0.95, abs=0.01)
    assert sure[~right].mean() < 0.9


def test_few_images_move_little_and_fewer_nothing() -> None:
    logits = 20 * np.eye(5, dtype=np.float32)[np.arange(LEAST_IMAGES) % 5]
    labels = np.arange(LEAST_IMAGES) % 5
    calibration = calibrate(logits, labels)
    assert calibration is not None
    assert calibration.temperature > 0.5, "ten right answers do not prove that a model is always right"
    assert calibrate(logits[1:], labels[1:]) is None
    logits[0, 0] = np.nan
    assert calibrate(logits, labels) is None
