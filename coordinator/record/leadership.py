"""Leadership: of the services that share a record in PostgreSQL one leads, and the others stand by.

The leader holds an advisory lock on a connection of its own, which the server ends after LEASE_S without a query: then
the lock is free although the leader's process was stopped, or its host cut off. Each leader has a term, a number
that grows with every takeover. It stands in a table; each transaction of a leader that writes checks it there, and
holds its row. A new leader ends transactions of the former, and an earlier leader writes nothing more.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, event, func, select, text
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.dml import UpdateBase

from coordinator.record.postgresql import LEASE_S, address_of, engine_of, failure_of
from coordinator.record.schema import is_newer, other_version, version_of
from fedvit.errors import ConfigError, LeadershipLost, StorageFailed

log = logging.getLogger(__name__)

CURRENT_S = 6.0
"""A leader that the database has not confirmed for this time sends nothing more: less than LEASE_S."""
RENEW_S = 1.0
LOOK_S = 0.2
"""Time between a standby's attempts to get the lock."""
NEEDED_VERSION = 14
"""Oldest release of PostgreSQL that ends idle connections."""

LEADERSHIP = Table(
    "leadership",
    MetaData(),
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("term", BigInteger, nullable=False),
    Column("host", String, nullable=False),  # of the newest leader
)
"""One row; only in PostgreSQL."""

_LEADER, _STANDBY = 7_329_118, 7_329_119
"""First halves of the keys of locks; the second is the schema's, since a database may have several records."""
_SCHEMA = func.hashtext(func.current_schema())

# the clock, so that the terms of a database that was made anew are later than those that devices know
_NEXT_TERM = text("""
    insert into leadership as known (id, term, host) values (1, extract(epoch from clock_timestamp())::bigint, :host)
    on conflict (id) do update set term = greatest(known.term + 1, excluded.term), host = excluded.host
    returning term
""")
# of a former leader that was stopped, or whose host is gone; the server itself does not end all of them
_END_WRITES = text("""
    select pg_terminate_backend(pid) from pg_locks
    where locktype = 'relation' and mode = 'RowShareLock' and relation = 'leadership'::regclass
        and database = (select oid from pg_database where datname = current_database()) and pid <> pg_backend_pid()
""")
_SERVICES = text(f"""
    select activity.application_name, locks.classid::bigint = {_LEADER}
    from pg_locks locks join pg_stat_activity activity using (pid)
    where locks.locktype = 'advisory' and locks.granted
        and locks.database = (select oid from pg_database where datname = current_database())
        and locks.classid::bigint in ({_LEADER}, {_STANDBY})
        and locks.objid::bigint = hashtext(current_schema())::bigint & 4294967295
    order by 2 desc, 1
""")


class ServiceHost(NamedTuple):
    """A service that is connected to the database now."""

    host: str
    leads: bool


def services_of(connection: Connection) -> list[ServiceHost]:
    """Return the leader, then the standbys."""
    return [ServiceHost(host, leads) for host, leads in connection.execute(_SERVICES)]


def fence(engine: Engine, term: int) -> None:
    """Let each transaction of an engine that writes check the term before its first write: it raises LeadershipLost."""

    def on_begin(connection: Connection) -> None:
        connection.info["fenced"] = False

    def on_execute(connection: Connection, statement: Any, *_: Any) -> None:
        if isinstance(statement, UpdateBase) and not connection.info["fenced"]:
            check_term(connection, term)
            connection.info["fenced"] = True

    event.listen(engine, "begin", on_begin)
    event.listen(engine, "before_execute", on_execute)


def check_term(connection: Connection, term: int) -> None:
    """Raise LeadershipLost if the term is over; if it is not, it lasts to the end of this transaction."""
    row = select(LEADERSHIP.c.term).where(LEADERSHIP.c.term == term).with_for_update(read=True)
    if connection.execute(row).first() is None:
        raise _make_lost_error(connection, connection.engine.url, term)


def _make_lost_error(connection: Connection, address: URL, term: int) -> LeadershipLost:
    found = connection.execute(select(LEADERSHIP.c.host, LEADERSHIP.c.term)).first()
    other = f"{found.host} leads since term {found.term}" if found else "its table of leaders was removed"
    return LeadershipLost(
        "FV1607",
        f"database {address}: this service led in term {term}, and {other}; nothing was written. "
        "Start it again as a standby, by the same command with --standby",
    )


class Leadership:
    """The part of one process. After `try_to_lead` has returned True a thread confirms it once a second."""

    def __init__(self, url: str) -> None:
        self.term = 0  # 0: it does not lead
        address = address_of(url, "record")
        self._address = address
        self._host = socket.gethostname()[:63]
        self._engine = engine_of(
            address, arguments={"application_name": self._host}, poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )
        self._connection: Connection | None = None
        self._confirmed_at = -math.inf
        self._error: LeadershipLost | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leadership", daemon=True)

    def try_to_lead(self) -> bool:
        """Lead if no other process does. Raises DatabaseGone, or ConfigError if the database cannot be used."""
        with self._connect() as connection:
            began = _now_s()
            if not _holds_lock(connection):
                return False
            LEADERSHIP.create(connection, checkfirst=True)
            connection.execute(_END_WRITES)
            self.term = connection.execute(_NEXT_TERM, {"host": self._host}).scalar_one()
            connection.execute(select(func.pg_advisory_unlock_shared(_STANDBY, _SCHEMA)))
            self._confirmed_at = began
        log.info("leads", extra={"term": self.term})
        self._thread.start()
        return True

    def wait(self, stop: threading.Event, operator_log: Callable[[str], None], on_turn: Callable[[], None]) -> bool:
        """Stand by until this process leads; False if it was stopped before. `on_turn` is called several times a
        second. Raises ConfigError if the database cannot be used."""
        trouble = ""
        while not stop.wait(LOOK_S):
            on_turn()
            try:
                if self.try_to_lead():
                    return True
                if trouble:
                    operator_log("the database answers again: standing by")
                trouble = ""
            except StorageFailed as error:
                if not trouble:
                    operator_log(f"{error}; trying again")
                trouble = str(error)
        return False

    def list_services(self) -> list[ServiceHost]:
        """Return the services that are connected to the database, the leader first. From any thread. Raises
        StorageFailed."""
        try:
            with self._engine.connect() as connection:  # another one than that of `wait`, which holds the locks
                return services_of(connection)
        except SQLAlchemyError as error:
            raise self._failure(error) from error

    def is_current(self) -> bool:
        """Return True if no other process can have taken over yet. From any thread."""
        return self._error is None and _now_s() - self._confirmed_at < CURRENT_S

    def check(self) -> None:
        """Raise LeadershipLost if another process has taken over."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let another process lead."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(RENEW_S)
        self._disconnect()
        self._engine.dispose()

    # --- the connection -----------------------------------------------------------------------------------

    def _renew(self) -> None:
        while self._error is None and not self._closed.wait(RENEW_S):
            began = _now_s()
            try:
                with self._connect() as connection:
                    held = connection.execute(select(LEADERSHIP.c.term)).scalar() == self.term
                    if not held:
                        self._error = _make_lost_error(connection, self._address, self.term)
                    elif _holds_lock(connection):  # not if the server has not ended our last connection yet
                        self._confirmed_at = began
            except (StorageFailed, SQLAlchemyError) as error:
                log.warning("leadership not confirmed", extra={"reason": str(error)})

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        """The connection, made anew after an error. Raises DatabaseGone, ConfigError."""
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
                self._prepare(self._connection)
            yield self._connection
        except DBAPIError as error:
            self._disconnect()
            raise self._failure(error) from error
        except BaseException:
            self._disconnect()
            raise

    def _failure(self, error: SQLAlchemyError) -> StorageFailed:
        what = getattr(error, "orig", None) or error
        return failure_of(error, self._address) or StorageFailed("FV1606", f"database {self._address}: {what}")

    def _prepare(self, connection: Connection) -> None:
        release = connection.dialect.server_version_info or (0,)
        if release < (NEEDED_VERSION,):
            raise ConfigError(
                "FV1608",
                f"database {self._address} is PostgreSQL {release[0]}, and a service needs {NEEDED_VERSION} or newer: "
                "update the server, or leave out --record",
            )
        if is_newer(schema := version_of(connection)):
            raise other_version(self._address, schema)
        connection.exec_driver_sql(f"set idle_session_timeout = '{LEASE_S}s'")
        if not self.term:
            connection.execute(select(func.pg_advisory_lock_shared(_STANDBY, _SCHEMA)))

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.invalidate()  # closes it at once
                connection.close()


def _holds_lock(connection: Connection) -> bool:
    """Take the leader's lock, which this connection may hold already; return False if another one holds it."""
    return bool(connection.scalar(select(func.pg_try_advisory_lock(_LEADER, _SCHEMA))))


def _now_s() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
