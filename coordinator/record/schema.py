"""The version of a record's tables."""

from importlib.metadata import version

from sqlalchemy import inspect, select
from sqlalchemy.engine import URL, Connection

from coordinator.record.tables import SCHEMA, VERSION
from fedvit.errors import ConfigError

FIRST = "0001"
"""The oldest schema that can be brought up to date."""


def version_of(connection: Connection) -> str | None:
    """Return the version of the database's schema; None for a new database, or one without a version."""
    if not inspect(connection).has_table(VERSION.name):
        return None
    return connection.execute(select(VERSION.c.version_num)).scalar()


def is_newer(schema: str | None) -> bool:
    """Return whether a newer version of this software made the tables."""
    return schema is not None and schema.isdigit() and schema > SCHEMA


def is_older(schema: str | None) -> bool:
    """Return whether the tables can be brought up to date."""
    return schema is not None and schema.isdigit() and FIRST <= schema < SCHEMA


def other_version(url: URL, schema: str | None) -> ConfigError:
    """Make the error of a database whose tables this software cannot use as they are."""
    own = version("fedvit")
    if is_newer(schema):
        return ConfigError(
            "FV1618",
            f"database {url} was written by a newer version of this software: it has schema {schema}, "
            f"and fedvit {own} knows those up to {SCHEMA}: update fedvit, or use another folder",
        )
    if is_older(schema):
        return ConfigError(
            "FV1620",
            f"database {url} was written by an older version of this software: it has schema {schema}, and fedvit "
            f"{own} reads {SCHEMA}: coordinator runs brings it up to date, while no older coordinator uses it",
        )
    return ConfigError(
        "FV1619",
        f"database {url} has an unknown version: its schema is {schema or 'not numbered'}, and fedvit {own} knows "
        f"{FIRST} to {SCHEMA}. It is unchanged: open it with the version that wrote it, or use another folder",
    )
