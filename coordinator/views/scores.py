"""Scores of evaluations in tables of rounds: AUC, macro F1, mean average precision; of a regression MAE and R2."""

from collections.abc import Iterable, Iterator, Sequence

from coordinator.run_view import RoundView
from fedvit.answer_scores import SCORE_NAMES
from profiles.report.tables import Column


def score_columns(rounds: Sequence[RoundView]) -> list[Column]:
    """Make a column for each score that one of the rounds has."""
    known = [name for name in SCORE_NAMES if any(name in entry.scores for entry in rounds)]
    return [Column(name, SCORE_NAMES[name], _Read(name)) for name in known]


def find_newest_scores(rounds: Iterable[RoundView]) -> Iterator[tuple[str, float]]:
    """Yield the scores of the newest round that has some, in the order of SCORE_NAMES."""
    newest = next((entry.scores for entry in reversed([*rounds]) if entry.scores), {})
    yield from ((name, newest[name]) for name in SCORE_NAMES if name in newest)


class _Read:
    """Reads a score of a round."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, entry: RoundView) -> float | None:
        return entry.scores.get(self._name)
