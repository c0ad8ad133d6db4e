"""Scores from counts of several devices are those of all images together."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score, jaccard_score, r2_score, roc_auc_score

from edge_client.work.answer_tally import NumberTally, PatchTally, ScoreTally, SetTally
from fedvit.answer_scores import EvaluationCounts, score_answers
from fedvit.answers import scale_labels
from fedvit.label_forms import LabelForm
from fedvit.wire.messages import ClassCount

IMAGES, CLASSES = 600, 4
SETS = LabelForm(task="multi_label")


def draw_logits(is_class: np.ndarray) -> np.ndarray:
    draw = np.random.default_rng(1)
    return (2.0 * draw.standard_normal(is_class.shape) + 2.0 * is_class - 1.0).astype(np.float32)


def test_sets_of_two_devices_are_scored_together() -> None:
    """Scores in bins of half a unit are as good as the scores themselves, to a percent."""
    labels = (np.random.default_rng(0).random((IMAGES, CLASSES)) < 0.3).astype(np.float32)
    logits, parts = draw_logits(labels), []
    for some in (slice(0, 200), slice(200, IMAGES)):
        tally = SetTally(CLASSES, SETS)
        tally.add(labels[some], logits[some])
        parts.append(EvaluationCounts(len(labels[some]), {"correct": tally.correct}, tally.by_class()))
    scores = score_answers(parts)
    assert scores["auc"] == pytest.approx(roc_auc_score(labels, logits, average="macro"), abs=0.01)
    assert scores["mean_ap"] == pytest.approx(average_precision_score(labels, logits, average="macro"), abs=0.02)
    assert scores["macro_f1"] == pytest.approx(f1_score(labels, logits > 0, average="macro"))


def test_classes_are_scored_one_against_the_rest() -> None:
    labels = np.random.default_rng(0).integers(0, CLASSES, IMAGES)
    logits = draw_logits(labels[:, None] == np.arange(CLASSES))
    tally = ScoreTally(CLASSES)
    tally.add(labels, logits)
    powers = np.exp(logits.astype(np.float64))
    want = roc_auc_score(labels, powers / powers.sum(axis=1, keepdims=True), multi_class="ovr", average="macro")
    scores = score_answers([EvaluationCounts(IMAGES, {"correct": tally.correct}, tally.by_class())])
    assert scores.keys() == {"auc"}
    assert scores["auc"] == pytest.approx(want, abs=0.01)


@pytest.mark.parametrize("low", [-5.0, 999_999_990.0])
def test_numbers_have_an_error_and_a_share_of_their_variance(low: float) -> None:
    form, draw = LabelForm(task="regression", low=low, high=low + 10.0), np.random.default_rng(2)
    numbers = draw.uniform(low, low + 10.0, (IMAGES, 1))
    answers = numbers + draw.standard_normal((IMAGES, 1))
    parts = []
    for some in (slice(0, 100), slice(100, IMAGES)):
        tally = NumberTally(form)
        tally.add(scale_labels(form, numbers[some]), scale_labels(form, answers[some]))
        sums = {"correct": tally.correct, **tally.errors, **tally.labels}
        parts.append(EvaluationCounts(len(numbers[some]), sums, ()))
    scores = score_answers(parts)
    assert scores["mae"] == pytest.approx(np.abs(answers - numbers).mean(), rel=1e-5)
    assert scores["r2"] == pytest.approx(r2_score(numbers, answers), rel=1e-5)
    silent = [part._replace(metrics={"correct": 1.0, "absolute_error": 2.0, "squared_error": 1.0}) for part in parts]
    assert score_answers(silent).keys() == {"mae"}  # devices that do not tell the sums of their labels


def test_no_images_have_no_scores() -> None:
    assert score_answers([]) == {}


def test_a_device_that_keeps_its_counts_changes_no_scores_of_others() -> None:
    counts = (ClassCount(0, 2, 2, (), ((3, 0, 1), (20, 2, 1))), ClassCount(1, 1, 2, ((0, 1),), ((3, 1, 2), (20, 1, 0))))
    counted, kept = EvaluationCounts(4, {"correct": 3.0}, counts), EvaluationCounts(4, {"correct": 3.0}, ())
    assert score_answers([counted, kept]) == score_answers([counted]) == {"auc": 0.75}


def test_patches_of_two_devices_have_the_iou_of_all_patches() -> None:
    """A class that is answered and never true has an IoU of 0."""
    draw, parts = np.random.default_rng(4), []
    labels = draw.integers(-1, CLASSES - 1, (IMAGES, 9))
    answers = np.where(draw.random(labels.shape) < 0.7, labels, draw.integers(0, CLASSES, labels.shape))
    answers = np.maximum(answers, 0)
    for some in (slice(0, 250), slice(250, IMAGES)):
        tally = PatchTally(CLASSES)
        tally.add_answers(labels[some], answers[some])
        metrics = {"correct": tally.correct, **tally.labels}
        parts.append(EvaluationCounts(len(labels[some]), metrics, tally.by_class()))
    has_class = labels >= 0
    want = jaccard_score(labels[has_class], answers[has_class], average="macro")
    assert score_answers(parts) == {"miou": pytest.approx(want)}
    silent = [part._replace(by_class=()) for part in parts]
    assert score_answers(silent) == {}
