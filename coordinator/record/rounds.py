"""The rounds of a record's runs, with their totals and figures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import JSON, ColumnElement, cast, func, select, true, type_coerce, update

from coordinator.record.closing import sum_up_evaluation, sum_up_training, this_round
from coordinator.record.database import Database
from coordinator.record.rows import insert, seal, without_infinite
from coordinator.record.tables import ROUNDS, ResultRecord, RoundRecord, RoundTotals, SavedState, now


class ClosedRound(NamedTuple):
    """The totals and figures of a closed round."""

    round: int
    totals: RoundTotals
    figures: dict[str, float]


class RunPosition(NamedTuple):
    """The position of a run, for lists of many runs."""

    last: int  # number of the newest round
    accuracy: float | None  # mean over devices in the newest evaluation


class RoundWork(NamedTuple):
    """The tasks and results of a round that closes, where the caller has them; None: those in the record."""

    asked: Sequence[str] | None = None  # devices with a task
    results: Sequence[ResultRecord] | None = None  # those that its server step used


RECORDED = RoundWork()


class RecordedRounds:
    """Rounds of all runs: open, closed and evaluated ones."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, run: str, number: int, cohort: list[str], needed: int | None = None, at: str | None = None) -> None:
        """Open a round, now or at a time (ISO 8601, UTC); or give an open round another cohort."""
        this = this_round(run, number)
        with self._database.transaction() as connection:
            if connection.execute(select(ROUNDS.c.round).where(this)).first():
                connection.execute(update(ROUNDS).where(this).values(cohort=cohort, needed=needed))
                seal(connection, ROUNDS, this)
            else:
                insert(connection, ROUNDS, [RoundRecord(run, number, cohort, at or now(), needed=needed)])

    def close(
        self,
        run: str,
        number: int,
        state: SavedState | None,
        figures: dict[str, float],
        work: RoundWork = RECORDED,
        at: str | None = None,
    ) -> None:
        """Close the training of a round, now or `at` a time: store state and figures, and compute its totals.

        `state`: None if it is lost.
        """
        values = {"closed_at": at or now(), "state": msgspec.to_builtins(state), "figures": figures}
        with self._database.transaction() as connection:
            connection.execute(update(ROUNDS).where(this_round(run, number)).values(**values))
            sum_up_training(connection, run, number, work.asked, work.results)

    def close_evaluation(self, run: str, number: int, results: Sequence[ResultRecord] | None = None) -> None:
        """Close the evaluation of a round, with these results; by default those in the record."""
        with self._database.transaction() as connection:
            connection.execute(update(ROUNDS).where(this_round(run, number)).values(evaluated=True))
            sum_up_evaluation(connection, run, number, results)

    def read_all(self, run: str) -> list[RoundRecord]:
        """Return all rounds with their details; the cost grows with the run."""
        return self._database.read(
            RoundRecord, ROUNDS, select(ROUNDS).where(ROUNDS.c.run == run).order_by(ROUNDS.c.round)
        )

    def read(self, run: str, number: int) -> RoundRecord | None:
        """Return one round; None if it was never opened."""
        return next(iter(self._database.read(RoundRecord, ROUNDS, select(ROUNDS).where(this_round(run, number)))), None)

    def read_newest_closed(self, run: str, before: int | None = None) -> RoundRecord | None:
        """Return the newest closed round, or the newest before round `before`; None if there is none."""
        query = select(ROUNDS).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None))
        if before is not None:
            query = query.where(ROUNDS.c.round < before)
        newest = self._database.read(RoundRecord, ROUNDS, query.order_by(ROUNDS.c.round.desc()).limit(1))
        return next(iter(newest), None)

    def read_open(self, run: str) -> list[RoundRecord]:
        """Return the open rounds: at most one, unless an older copy of the record was restored."""
        query = select(ROUNDS).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_(None))
        return self._database.read(RoundRecord, ROUNDS, query.order_by(ROUNDS.c.round))

    def find_last(self, run: str) -> int:
        """Return the number of the newest round, 0 if there is none."""
        return self._database.fetch_value(select(func.max(ROUNDS.c.round)).where(ROUNDS.c.run == run)) or 0

    def list_closed(self, run: str) -> list[int]:
        """Return the numbers of the closed rounds, ascending."""
        query = select(ROUNDS.c.round).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None))
        return [row.round for row in self._database.fetch(query.order_by(ROUNDS.c.round))]

    def read_totals(self, run: str) -> list[ClosedRound]:
        """Return the totals of all closed rounds, in order."""
        columns = select(ROUNDS.c.round, ROUNDS.c.totals, ROUNDS.c.figures)
        query = columns.where(ROUNDS.c.run == run, ROUNDS.c.totals.is_not(None)).order_by(ROUNDS.c.round)
        with self._database.transaction() as connection:
            return [_make_closed_round(row) for row in connection.execute(query)]

    def read_newest_totals(self, run: str, *, evaluated: bool = False) -> ClosedRound | None:
        """Return the totals of the newest closed round, or of the newest evaluated one; None if there is none."""
        query = select(ROUNDS.c.round, ROUNDS.c.totals, ROUNDS.c.figures)
        query = query.where(ROUNDS.c.run == run, ROUNDS.c.totals.is_not(None))
        if evaluated:
            query = query.where(ROUNDS.c.accuracy.is_not(None))
        with self._database.transaction() as connection:
            row = connection.execute(query.order_by(ROUNDS.c.round.desc()).limit(1)).first()
            return _make_closed_round(row) if row else None

    def read_accuracy(self, run: str, since: int = 0) -> dict[int, dict[str, float]]:
        """Return accuracies by round and device, of evaluated rounds from `since` on that still have details."""
        query = select(ROUNDS.c.round, ROUNDS.c.accuracy).where(
            ROUNDS.c.run == run, ROUNDS.c.round >= since, ROUNDS.c.accuracy.is_not(None)
        )
        return {row.round: row.accuracy for row in self._database.fetch(query.order_by(ROUNDS.c.round))}

    def read_mean_accuracy(self, run: str) -> float | None:
        """Return the mean accuracy of the newest evaluation; None if there is none."""
        query = select(ROUNDS.c.totals).where(ROUNDS.c.run == run, ROUNDS.c.evaluated.is_(True))
        with self._database.transaction() as connection:
            newest = connection.execute(query.order_by(ROUNDS.c.round.desc())).scalars()
            means = (totals["accuracy_mean"] for totals in newest if totals)
            return next((mean for mean in means if mean is not None), None)

    def read_positions(self, runs: Sequence[str] | None = None) -> dict[str, RunPosition]:
        """Return the position of every run that has a round, or of these, in a few queries for all of them."""
        is_asked = true() if runs is None else ROUNDS.c.run.in_(runs)
        last = select(ROUNDS.c.run, func.max(ROUNDS.c.round).label("last"))
        newest = last.where(is_asked).group_by(ROUNDS.c.run).subquery()
        is_near = (ROUNDS.c.run == newest.c.run) & (ROUNDS.c.round >= newest.c.last - 1)
        query = select(ROUNDS.c.run, newest.c.last, ROUNDS.c.totals).join(newest, is_near).order_by(ROUNDS.c.round)
        positions: dict[str, RunPosition] = {}
        for run, last, totals in self._database.fetch(query):
            before = positions.get(run)
            mean = (totals or {}).get("accuracy_mean")
            positions[run] = RunPosition(last, before.accuracy if mean is None and before else mean)
        evaluated = select(ROUNDS.c.run).where(is_asked, ROUNDS.c.evaluated.is_(True)).distinct()
        for (run,) in self._database.fetch(evaluated):
            if positions[run].accuracy is None:  # it is rarely evaluated: its accuracy is further back
                positions[run] = positions[run]._replace(accuracy=self.read_mean_accuracy(run))
        return positions

    def list_openings(self, run: str, newest: int) -> list[str]:
        """Return when the newest rounds were opened (ISO 8601, UTC), the oldest of them first."""
        query = select(ROUNDS.c.opened_at).where(ROUNDS.c.run == run).order_by(ROUNDS.c.round.desc()).limit(newest)
        return [row.opened_at for row in self._database.fetch(query)][::-1]

    def count_figures(self, run: str, names: Sequence[str]) -> dict[tuple[float | None, ...], int]:
        """Return the number of closed rounds by the values of these figures; None: the round lacks the figure."""
        finite = without_infinite(ROUNDS.c.figures)
        figures: ColumnElement[Any] = type_coerce(finite, JSON) if self._database.file else cast(finite, JSON)
        values = [figures[name].as_float().label(name) for name in names]
        query = select(*values, func.count()).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None))
        return {tuple(row[:-1]): row[-1] for row in self._database.fetch(query.group_by(*values))}


def _make_closed_round(row: Any) -> ClosedRound:
    return ClosedRound(row.round, msgspec.convert(row.totals, RoundTotals), row.figures or {})
