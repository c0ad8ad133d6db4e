"""Leaders and standbys at a real PostgreSQL server: who leads, and what a former leader can still write."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator.record.database import Database as RecordDatabase
from coordinator.record.database import use_database
from coordinator.record.leadership import Leadership, ServiceHost
from coordinator.record.record import Record
from coordinator.security.broker.process import claim_port
from fedvit.errors import ConfigError, DatabaseGone, LeadershipLost
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result
from tests.support.codes import has_code
from tests.support.postgresql import Postgresql
from tests.support.waiting import wait_until

RUN = {"method": "fedavg"}


class Database:
    """One schema of a server, and the leaderships that a test makes for it."""

    def __init__(self, server: Postgresql) -> None:
        self.url = server.schema()
        self.made: list[Leadership] = []
        self.store = self.opened()
        self.store.runs.create("r", RUN)

    def opened(self) -> Record:
        return Record(RecordDatabase(self.url))

    def leadership(self) -> Leadership:
        self.made.append(made := Leadership(self.url))
        return made

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(sql.encode()).fetchall()

    def holders(self) -> list[int]:
        """Server processes with the lock of a leader."""
        return [
            pid
            for (pid,) in self.query(
                "select pid from pg_locks where locktype = 'advisory' and classid::bigint = 7329118 "
                "and objid::bigint = hashtext(current_schema())::bigint & 4294967295"
            )
        ]

    def end_holder(self) -> None:
        """As the server does after LEASE_S with the connection of a leader that was stopped."""
        [pid] = self.holders()
        self.query(f"select pg_terminate_backend({pid})")
        wait_until(lambda: pid not in self.holders())

    def close(self) -> None:
        for made in self.made:
            made.close()
        self.store.close()


@pytest.fixture
def database(postgresql: Postgresql) -> Iterator[Database]:
    made = Database(postgresql)
    yield made
    made.close()


@pytest.fixture
def succeeded(database: Database) -> Callable[[], tuple[Leadership, Leadership]]:
    """A leader, and the one that took over from it."""

    def make() -> tuple[Leadership, Leadership]:
        first, second = database.leadership(), database.leadership()
        assert first.try_to_lead()
        first._closed.set()  # it is stopped: it confirms nothing, and does not return
        first._thread.join()
        database.end_holder()
        assert second.try_to_lead()
        return first, second

    return make


def test_leadership_is_held_by_one_until_it_is_closed(database: Database) -> None:
    first, second = database.leadership(), database.leadership()
    assert first.try_to_lead()
    assert not second.try_to_lead()
    host = first._host
    assert database.store.database.services() == [ServiceHost(host, True), ServiceHost(host, False)]
    first.close()
    wait_until(second.try_to_lead)
    assert second.term > first.term > 2**17
    assert second.is_current()
    assert database.store.database.services() == [ServiceHost(host, True)]


def test_records_in_one_database_have_a_leader_each(database: Database, postgresql: Postgresql) -> None:
    assert database.leadership().try_to_lead()
    other = Leadership(postgresql.schema())
    assert other.try_to_lead()
    other.close()


def test_record_refuses_to_be_written_by_a_former_leader(
    database: Database, succeeded: Callable[[], tuple[Leadership, Leadership]]
) -> None:
    first, second = succeeded()
    late, now = database.opened(), database.opened()
    late.database.lead_in(first.term)
    now.database.lead_in(second.term)
    with pytest.raises(LeadershipLost, match=rf"led in term {first.term}, and .* leads since term {second.term}"):
        late.runs.update("r", status="failed")
    assert late.runs.read("r").status == "waiting", "it may read"
    with pytest.raises(LeadershipLost):
        late.rounds.open("r", 1, ["a"])
    with pytest.raises(LeadershipLost):
        late.database.check_leads()
    assert database.store.rounds.find_last("r") == 0
    now.rounds.open("r", 1, ["a"])
    evaluated = ("a", Result("r", 1, "evaluate", 10, {"correct": 9.0}, ResourceUse()), None)
    now.tasks.add_results([evaluated])
    with pytest.raises(LeadershipLost):
        late.tasks.add_results([evaluated])  # although nothing is left to write: it would be acknowledged twice
    now.database.check_leads()
    now.runs.update("r", status="running")
    assert database.store.runs.read("r").status == "running"
    late.close()
    now.close()


def test_new_leader_ends_a_transaction_of_the_former(database: Database) -> None:
    """Which may have stopped in the middle of it; the new leader finds nothing of it."""
    first, second = database.leadership(), database.leadership()
    assert first.try_to_lead()
    store = database.opened()
    store.database.lead_in(first.term)

    def be_stopped() -> None:
        with store.database.together():
            store.runs.update("r", status="running")
            first.close()
            wait_until(second.try_to_lead)
            store.runs.update("r", status="failed")

    with pytest.raises(DatabaseGone):
        be_stopped()
    assert second.term > first.term
    assert store.runs.read("r").status == "waiting"
    store.close()


def test_leader_learns_that_another_took_over(database: Database) -> None:
    first, second = database.leadership(), database.leadership()
    assert first.try_to_lead()
    database.query("update leadership set term = term + 5, host = 'web-2' returning 1")

    def lost() -> bool:
        try:
            first.check()
        except LeadershipLost as error:
            return "web-2 leads since term" in str(error)
        return False

    wait_until(lost)
    assert not first.is_current()
    first.close()
    wait_until(second.try_to_lead)
    assert second.term == first.term + 6


def test_leader_whose_connection_ended_leads_on_if_nobody_took_over(database: Database) -> None:
    leadership = database.leadership()
    assert leadership.try_to_lead()
    before = database.holders()
    database.end_holder()
    wait_until(database.holders)
    assert database.holders() != before
    leadership.check()
    wait_until(leadership.is_current)


def test_standby_waits_for_a_database_that_went_away() -> None:
    server = Postgresql()
    database = Database(server)
    leader, standby = database.leadership(), database.leadership()
    assert leader.try_to_lead()
    assert not standby.try_to_lead()
    said: list[str] = []
    stop = threading.Event()
    waiting = threading.Thread(target=lambda: standby.wait(stop, said.append, lambda: None))
    waiting.start()
    server.stop()
    wait_until(lambda: said)
    leader.close()
    server.start()
    waiting.join(60)
    assert standby.term > leader.term
    assert len(said) == 1
    assert said[0].startswith("database postgresql")
    assert said[0].endswith("; trying again")
    database.close()
    server.close()


def test_leadership_of_a_database_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(DatabaseGone, check=has_code("FV0014")):
        Leadership(f"postgresql://u:p@127.0.0.1:{claim_port('127.0.0.1', 0)}/d").try_to_lead()


def test_leadership_of_a_newer_record_is_refused(database: Database) -> None:
    database.query("update alembic_version set version_num = '9999' returning 1")
    with pytest.raises(ConfigError, check=has_code("FV1618")):
        database.leadership().try_to_lead()


def test_address_that_is_known_is_not_opened_again(database: Database, tmp_path: Path) -> None:
    """A standby of a newer version must not migrate the tables of the service that leads."""
    use_database(tmp_path, database.url)
    database.query("update alembic_version set version_num = '0004' returning 1")
    use_database(tmp_path, database.url)
    assert database.query("select version_num from alembic_version") == [("0004",)]


def test_transaction_that_the_server_ended_makes_a_run_pause(database: Database) -> None:
    """Since the process was stopped meanwhile: the run must not fail for it."""
    store = database.store

    def be_stopped() -> None:
        with store.database.together():
            store.runs.update("r", status="running")
            connection = store.database._joined.connection
            pid = connection.exec_driver_sql("select pg_backend_pid()").scalar()
            connection.exec_driver_sql("set idle_in_transaction_session_timeout = 1")
            wait_until(lambda: not database.query(f"select 1 from pg_stat_activity where pid = {pid}"))
            store.runs.update("r", status="failed")

    with pytest.raises(DatabaseGone, check=has_code("FV0014")):
        be_stopped()
    assert store.runs.read("r").status == "waiting"
