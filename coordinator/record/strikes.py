"""Strikes of a record's devices, and the quarantines that follow from them."""

from typing import NamedTuple

from sqlalchemy import case, func, select, update
from sqlalchemy.engine import Connection

from coordinator.record.database import Database
from coordinator.record.rows import insert, seal
from coordinator.record.tables import QUARANTINES, STRIKES, QuarantineRecord, StrikeRecord, now


class StrikeCount(NamedTuple):
    """The strikes of one device."""

    ever: int
    unspent: int  # since its last quarantine


class RecordedStrikes:
    """Strikes and quarantines of all runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, run: str, round_number: int, device: str, reason: str) -> int:
        """Store a strike, at most one per round. Returns the device's strikes since its last quarantine."""
        mine = (STRIKES.c.run == run, STRIKES.c.device == device)
        with self._database.transaction() as connection:
            if not connection.execute(select(STRIKES.c.id).where(*mine, STRIKES.c.round == round_number)).first():
                insert(connection, STRIKES, [StrikeRecord(round_number, device, reason, now(), False)], run=run)
                seal(connection, STRIKES, *mine)  # the seal covers the id, too
            return len(connection.execute(select(STRIKES.c.id).where(*mine, STRIKES.c.spent.is_(False))).all())

    def read_all(self, run: str) -> list[StrikeRecord]:
        """Return all strikes, the oldest first."""
        query = select(STRIKES).where(STRIKES.c.run == run).order_by(STRIKES.c.id)
        return self._database.read(StrikeRecord, STRIKES, query)

    def count(self, run: str) -> dict[str, StrikeCount]:
        """Return the strikes by device, counted by the database."""
        unspent = func.sum(case((STRIKES.c.spent.is_(False), 1), else_=0))
        query = select(STRIKES.c.device, func.count(), unspent).where(STRIKES.c.run == run).group_by(STRIKES.c.device)
        return {device: StrikeCount(ever, unspent) for device, ever, unspent in self._database.fetch(query)}

    def add_quarantine(self, run: str, device: str, round_number: int, until_round: int | None, reason: str) -> None:
        """Store a quarantine; the device's strikes are counted from 0 again."""
        with self._database.transaction() as connection:
            quarantine = QuarantineRecord(device, round_number, until_round, reason, now(), None)
            insert(connection, QUARANTINES, [quarantine], run=run)
            seal(connection, QUARANTINES, QUARANTINES.c.run == run, QUARANTINES.c.device == device)
            _spend_strikes(connection, run, device)

    def read_quarantines(self, run: str) -> list[QuarantineRecord]:
        """Return all quarantines, including ended ones."""
        query = select(QUARANTINES).where(QUARANTINES.c.run == run).order_by(QUARANTINES.c.id)
        return self._database.read(QuarantineRecord, QUARANTINES, query)

    def read_current_quarantines(self, run: str, round_number: int) -> dict[str, QuarantineRecord]:
        """Return the quarantines that hold in a round, by device."""
        return {record.device: record for record in self.read_quarantines(run) if record.holds(round_number)}

    def release(self, run: str, device: str) -> bool:
        """End a device's quarantines and reset its strikes; False if it had neither."""
        held = (QUARANTINES.c.run == run, QUARANTINES.c.device == device, QUARANTINES.c.released_at.is_(None))
        with self._database.transaction() as connection:
            ended = connection.execute(update(QUARANTINES).where(*held).values(released_at=now()))
            seal(connection, QUARANTINES, *held[:2])
            return ended.rowcount + _spend_strikes(connection, run, device) > 0


def _spend_strikes(connection: Connection, run: str, device: str) -> int:
    mine = (STRIKES.c.run == run, STRIKES.c.device == device, STRIKES.c.spent.is_(False))
    spent = connection.execute(update(STRIKES).where(*mine).values(spent=True)).rowcount
    seal(connection, STRIKES, *mine[:2])
    return spent
