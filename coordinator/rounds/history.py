"""Earlier rounds of a run, read from the record of all runs."""

from coordinator.record.record import Record
from coordinator.record.rounds import ClosedRound
from coordinator.record.tables import RoundRecord
from coordinator.rounds.ports import RunHistory
from fedvit.hints import command


class RecordHistory(RunHistory):
    """The rounds of a run in the record."""

    def __init__(self, run: str, store: Record) -> None:
        self._run = run
        self._store = store

    def first_round(self) -> int:
        first_open = min((record.round for record in self._store.rounds.read_open(self._run)), default=None)
        return first_open - 1 if first_open else self._store.rounds.find_last(self._run)

    def open_round(self) -> int:
        newest = self._store.rounds.read_newest_closed(self._run)
        return newest.round + 1 if newest else 1

    def find(self, number: int) -> RoundRecord | None:
        return self._store.rounds.read(self._run, number)

    def read_past(self, first: int) -> list[ClosedRound]:
        return [past for past in self._store.rounds.read_totals(self._run) if past.round < first]

    def show_command(self) -> str:
        return command("coordinator", "show", self._run, runs=self._store.database.folder)
