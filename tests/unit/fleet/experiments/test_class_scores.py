"""Scores of a device beside scikit-learn's, over drawn answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, recall_score

from edge_client.work.answer_tally import AnswerTally
from fedvit.wire.messages import MAX_CONFUSED_CLASSES, ClassCount
from fleet.experiments.class_scores import score_classes


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=40))
def test_scores_are_those_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    """Class 5 is answered and never true; other classes may be missing."""
    labels, answers = (np.array(column) for column in zip(*pairs, strict=True))
    tally = AnswerTally(6)
    tally.add_answers(labels, answers)
    scores = score_classes(tally.by_class())
    assert scores is not None
    assert scores.macro_f1 == pytest.approx(f1_score(labels, answers, average="macro", zero_division=0))
    recall = recall_score(labels, answers, average="macro", labels=np.unique(labels), zero_division=0)
    assert scores.balanced == pytest.approx(recall)


def test_without_wrong_answers_there_is_no_f1() -> None:
    tally = AnswerTally(MAX_CONFUSED_CLASSES + 1)
    tally.add_answers(np.array([0, 1, 1]), np.array([0, 1, 2]))
    scores = score_classes(tally.by_class())
    assert scores is not None
    assert (scores.balanced, scores.macro_f1) == (0.75, None)


def test_a_device_without_counts_has_no_scores() -> None:
    assert score_classes([]) is None
    assert score_classes([ClassCount(0, 0, 0)]) is None
