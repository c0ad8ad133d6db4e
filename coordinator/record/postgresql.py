"""Connections to a record in PostgreSQL."""

from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from fedvit.errors import ConfigError, DatabaseGone, DiskFull, StorageFailed

LEASE_S = 8
"""The server ends a transaction without a statement, and the connection of a leader or a standby without a query, after
this time: a process that was stopped, or whose host was cut off, holds no lock for longer."""
_ARGUMENTS = {"connect_timeout": 10, "keepalives_idle": 5, "keepalives_interval": 5, "tcp_user_timeout": 15_000}
"""Settings of a connection, which notices within about 20 s that the server is gone. The last is in milliseconds."""
_FULL, _STOPPED = "53100", "25P03"
"""The second: a transaction was ended, since this process was stopped meanwhile."""


def address_of(text: str, where: str) -> URL:
    """Parse the address of a PostgreSQL database. Raises ConfigError for another text."""
    try:
        address = make_url(text)
    except (ArgumentError, ValueError):  # the latter for a port that is no number
        address = None
    if address is None or address.get_backend_name() != "postgresql" or not address.database:
        raise ConfigError("FV1602", f"{where}: expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return address.set(drivername="postgresql+psycopg")


def engine_of(address: URL, *, arguments: dict[str, Any] | None = None, **settings: Any) -> Engine:
    """Make an engine. `arguments`: of each connection. Raises ConfigError if the driver is not installed."""
    try:
        engine = create_engine(address, connect_args={**_ARGUMENTS, **(arguments or {})}, **settings)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "FV1609", f"a record in PostgreSQL needs the package {error.name}: pip install 'fedvit[postgresql]'"
        ) from error
    event.listen(engine, "connect", _limit_transactions)
    return engine


def _limit_transactions(connection: Any, _record: Any) -> None:
    before, connection.autocommit = connection.autocommit, True  # otherwise the setting ends with this transaction
    connection.execute(f"set idle_in_transaction_session_timeout = '{LEASE_S}s'")
    connection.autocommit = before


def failure_of(error: SQLAlchemyError, address: URL) -> StorageFailed | None:
    """Return the error of a database that does not answer, or has no space; None for another one."""
    cause = getattr(error, "orig", None) or error
    state = getattr(cause, "sqlstate", None)
    if not isinstance(error, OperationalError) and state != _STOPPED:
        return None
    gone = DiskFull if state == _FULL else DatabaseGone
    return gone(gone.general_code, f"database {address}: {' '.join(str(cause).split())}")
