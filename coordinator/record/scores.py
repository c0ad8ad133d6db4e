"""The best round of a run, and the rule of [stop] that ends it.

Both follow from what the record has of each round, so that a resumed run stops where it would have stopped.
"""

from collections.abc import Mapping

from coordinator.config.stop import StopConfig
from coordinator.record.record import Record
from coordinator.record.tables import RoundRecord
from fedvit.errors import ConfigError
from fedvit.quantities import format_count

BEST = "best"
"""Folder of a run with the results of its best round."""
NEXT_EPSILON = "dp_epsilon_next"
"""Figure of a round: epsilon of devices' updates after one more round like it."""


class RoundScores:
    """The scores of a run's rounds so far, in their order: `close` and then `evaluate` for each."""

    def __init__(self, stop: StopConfig) -> None:
        self.reason: str | None = None
        """Reason why the run stops after the newest round; None: it goes on."""
        self.best = 0
        """The evaluated round with the highest mean accuracy, the earliest of equal ones; 0: none yet."""
        self._stop = stop
        self._seconds = 0.0
        self._highest = -1.0
        self._worse = 0  # evaluations since the best round

    def close(self, number: int, figures: Mapping[str, float]) -> None:
        """Add a round whose training has closed."""
        stop, self.reason = self._stop, None
        self._seconds += figures.get("devices_s", 0.0) + figures.get("server_s", 0.0)
        if stop.seconds is not None and self._seconds >= stop.seconds:
            self.reason = f"{self._seconds:.0f} s of training, the limit is {stop.seconds:g} s, in round {number}"
        following = figures.get(NEXT_EPSILON)
        if stop.epsilon is not None and following is not None and following > stop.epsilon:
            self.reason = f"one more round after round {number} would exceed epsilon {stop.epsilon:g}"

    def evaluate(self, number: int, accuracy: float | None) -> None:
        """Add the mean accuracy of the newest round; None: it was not evaluated."""
        if accuracy is None:
            return
        stop = self._stop
        if accuracy > self._highest:
            self.best, self._highest, self._worse = number, accuracy, 0
        else:
            self._worse += 1
        if stop.accuracy is not None and accuracy >= stop.accuracy:
            self.reason = f"accuracy {accuracy:.4g} reached in round {number}"
        elif stop.patience is not None and self._worse >= stop.patience:
            self.reason = (
                f"accuracy {self._highest:.4g} of round {self.best} not exceeded in "
                f"{format_count(self._worse, 'evaluation')}, up to round {number}"
            )


def find_best(store: Record, run: str) -> int:
    """Return the best round of a run so far; 0: none is evaluated."""
    scores = RoundScores(StopConfig())
    for entry in store.rounds.read_totals(run):
        scores.evaluate(entry.round, entry.totals.accuracy_mean)
    return scores.best


def find_kept_best(store: Record, run: str) -> RoundRecord | None:
    """Return the best round of a run if its tensors are kept; None if they are not."""
    stop = store.runs.read(run).config.get("stop", {})
    keeps_best = StopConfig(accuracy=stop.get("accuracy"), patience=stop.get("patience")).keeps_best
    return store.rounds.read(run, find_best(store, run)) if keeps_best else None


def find_round(store: Record, run: str, asked: str | int | None) -> RoundRecord:
    """Return a round whose tensors are kept: `best`, `last` or a number; None: the best if it is kept, else the last.

    Raises ConfigError if there is no such run, it closed no round, or the round is not kept.
    """
    store.runs.read(run)
    last = store.rounds.read_newest_closed(run)
    if last is None or last.state is None:
        raise ConfigError("FV1623", f"run {run!r} has closed no round: there are no tensors yet")
    best = find_kept_best(store, run)
    if best is not None and best.state is None:
        best = None  # the record was restored, or [stop] is new
    if asked == "last" or asked == last.round or (asked is None and best is None):
        return last
    if best and asked in (None, "best", best.round):
        return best
    kept = f"round {last.round}, its last" + (f", and round {best.round}, its best" if best else "")
    if asked == "best":
        why = "its best round: set accuracy or patience in [stop], and evaluate" if not best else "it"
    else:
        why = f"the tensors of round {asked}"
    raise ConfigError("FV1645", f"run {run!r} does not keep {why}; it keeps {kept}")


def find_start(store: Record, earlier: str, asked: str | int) -> RoundRecord:
    """Return the round with whose tensors a run starts.

    Raises ConfigError, naming start_from, if the earlier run closed no round or does not keep this one.
    """
    store.runs.read(earlier)  # raises if there is no such run
    try:
        return find_round(store, earlier, asked)
    except ConfigError as error:
        why = "that run closed no round" if error.code == "FV1623" else str(error)
        raise ConfigError("FV1115", f"start_from = {earlier!r}: {why}") from error
