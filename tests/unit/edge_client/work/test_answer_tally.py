"""Counts of an evaluation on a device, by task."""

import msgspec
import numpy as np
import pytest

from edge_client.work.answer_tally import (
    AnswerTally,
    NumberTally,
    PatchTally,
    ScoreTally,
    SetTally,
    find_log_odds,
    make_tally,
)
from fedvit.answers import scale_labels
from fedvit.label_forms import LabelForm
from fedvit.program import Batch, Evaluate, Program
from fedvit.wire.messages import MAX_MESSAGE_BYTES, MAX_SCORED_CLASSES, SCORE_BINS, ClassCount

SETS, NUMBERS = LabelForm(task="multi_label"), LabelForm(task="regression", low=0.0, high=10.0)


def with_form(form: LabelForm | None, *, scores: bool = False) -> Program:
    return Program(
        method="fedavg",
        model="vit",
        classes=("a",) if form is NUMBERS else ("a", "b", "c"),
        groups={},
        tensors={},
        graphs={},
        train=(),
        evaluate=Evaluate(graph="predict", counts_scores=scores),
        batch=Batch(batch_size=2, labels=form),
    )


def test_the_program_says_what_is_counted() -> None:
    assert type(make_tally(with_form(None))) is AnswerTally
    assert type(make_tally(with_form(None, scores=True))) is ScoreTally
    assert type(make_tally(with_form(SETS))) is SetTally
    assert type(make_tally(with_form(NUMBERS))) is NumberTally
    assert type(make_tally(with_form(LabelForm(task="segmentation")))) is PatchTally


def test_scores_are_counted_for_images_of_a_class_and_for_others() -> None:
    tally = ScoreTally(3)
    tally.add(np.array([0, 2]), np.array([[9.0, -9, -9], [0.0, 0.0, 20.0]], np.float32))
    first, second, third = tally.by_class()
    middle = SCORE_BINS // 2
    assert (first.images, second.images, third.images) == (1, 0, 1)
    assert first.scores == ((0, 0, 1), (SCORE_BINS - 1, 1, 0))
    assert second.scores == ((0, 0, 2),)
    assert third.scores == ((0, 0, 1), (SCORE_BINS - 1, 1, 0))
    even = ScoreTally(2)
    even.add(np.array([0]), np.zeros((1, 2), np.float32))
    assert even.by_class()[0].scores == ((middle, 1, 0),)  # a probability of one half begins the upper bins


def test_log_odds_are_those_of_a_softmax() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    powers = np.exp(logits.astype(np.float64))
    shares = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(find_log_odds(logits), np.log(shares / (1 - shares)), rtol=1e-6)
    assert np.isfinite(find_log_odds(np.array([[1000.0, -1000.0]], np.float32))).all()


def test_sets_are_counted_by_class() -> None:
    tally = SetTally(3, SETS)
    labels = np.array([[1, 1, 0], [1, 0, 0]], np.float32)
    tally.add(labels, np.array([[1, -1, -1], [-1, -1, 1]], np.float32))
    assert tally.correct == pytest.approx(2 / 3)
    assert [(count.correct, count.images) for count in tally.by_class()] == [(1, 2), (0, 1), (0, 0)]
    assert all(sum(entry[1] + entry[2] for entry in count.scores) == 2 for count in tally.by_class())


def test_numbers_are_summed_in_their_own_unit() -> None:
    tally = NumberTally(NUMBERS)
    labels, outputs = (scale_labels(NUMBERS, np.array(numbers)) for numbers in ([[2.0], [8.0]], [[3.0], [6.0]]))
    tally.add(labels, outputs)
    assert tally.correct == pytest.approx(0.9 + 0.8)
    assert tally.errors == pytest.approx({"absolute_error": 3.0, "squared_error": 5.0})
    assert tally.labels == pytest.approx({"number": 0.0, "squared_number": 18.0})
    assert tally.by_class() == ()


def test_outputs_that_are_no_numbers_leave_counts_finite() -> None:
    numbers, scores = NumberTally(NUMBERS), ScoreTally(2)
    numbers.add(np.zeros((1, 1), np.float32), np.full((1, 1), np.nan, np.float32))
    scores.add(np.array([0]), np.full((1, 2), np.nan, np.float32))
    assert np.isfinite([*numbers.errors.values(), numbers.correct]).all()
    assert sum(entry[1] for entry in scores.by_class()[0].scores) == 1


def test_the_largest_counts_fit_into_a_message() -> None:
    """All wrong answers, and scores in all bins, of as many classes as may be scored."""
    classes = MAX_SCORED_CLASSES
    counts = [
        ClassCount(
            label,
            60_000,
            60_000,
            tuple((other, 250) for other in range(classes) if other != label),
            tuple((place, 60_000, 60_000) for place in range(SCORE_BINS)),
        )
        for label in range(classes)
    ]
    assert len(msgspec.msgpack.encode(counts)) < 0.95 * MAX_MESSAGE_BYTES


def test_patches_are_counted_by_class_and_by_what_was_answered() -> None:
    tally = PatchTally(3)
    tally.add(np.array([[0, 1, -1], [2, 2, 0]]), np.eye(3)[[[0, 2, 1], [2, 0, 0]]])
    assert tally.correct == pytest.approx(1 / 2 + 2 / 3)
    assert tally.labels == {"patches": 5.0}
    assert tally.by_class() == (
        ClassCount(0, 2, 2), ClassCount(1, 0, 1, ((2, 1),)), ClassCount(2, 1, 2, ((0, 1),)),
    )  # fmt: skip
