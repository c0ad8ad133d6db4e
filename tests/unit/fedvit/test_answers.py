"""Right answers by the task of the run."""

import numpy as np

from fedvit.answers import count_right, find_equal, find_probabilities, scale_labels, unscale_outputs
from fedvit.label_forms import LARGEST_OUTPUT, LabelForm

SETS, NUMBERS = LabelForm(task="multi_label"), LabelForm(task="regression", low=10.0, high=30.0)
PATCHES = LabelForm(task="segmentation")


def array(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_answers_are_right_by_f1_or_nearness_and_finite() -> None:
    labels = array([1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1])
    outputs = array([2, -1, -1], [-1, -1, -1], [3, -1, -1], [1, -2, -2], [-1, 1, -1])
    np.testing.assert_allclose(count_right(SETS, labels, outputs), [2 / 3, 1, 0, 1, 0])
    labels = scale_labels(NUMBERS, array([10], [20], [30], [20]))
    np.testing.assert_array_equal(labels, [[-1], [0], [1], [0]])
    outputs = scale_labels(NUMBERS, array([10], [25], [60], [15]))
    np.testing.assert_allclose(count_right(NUMBERS, labels, outputs), [1, 0.75, 0, 0.75], rtol=1e-6)
    np.testing.assert_allclose(unscale_outputs(NUMBERS, outputs), [[10], [25], [60], [15]], rtol=1e-6)
    outputs = array([np.nan], [np.inf], [-np.inf])
    assert np.isfinite(unscale_outputs(NUMBERS, outputs)).all()
    assert unscale_outputs(NUMBERS, outputs).max() == 20 + 10 * LARGEST_OUTPUT
    np.testing.assert_array_equal(count_right(NUMBERS, array([0], [0], [0]), outputs), [0, 0, 0])


def test_equal_answers_and_probabilities() -> None:
    assert find_equal(SETS, array([1, -1], [1, 1]), array([9, -9], [1, -1])).tolist() == [True, False]
    assert find_equal(NUMBERS, array([0], [0]), array([0.019], [0.03])).tolist() == [True, False]
    np.testing.assert_allclose(find_probabilities(array([0, 2, -1000])), [[0.5, 0.8807971, 0]], atol=1e-6)


def test_patches_without_a_class_count_nowhere() -> None:
    labels = np.array([[0, 1, -1, 1], [-1, -1, -1, -1]])
    outputs = np.eye(2, dtype=np.float32)[[[0, 1, 0, 0], [0, 0, 1, 1]]]
    np.testing.assert_allclose(count_right(PATCHES, labels, outputs), [2 / 3, 1])
    assert find_equal(PATCHES, outputs, outputs[::-1]).tolist() == [False, False]
