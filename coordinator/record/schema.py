"""The version of a record's tables."""

from importlib.metadata import version

from sqlalchemy import inspect, select
from sqlalchemy.engine import URL, Connection

from coordinator.record.tables import SCHEMA, VERSION
from fedvit.errors import ConfigError


def version_of(connection: Connection) -> str | None:
    """Version of the database's schema; None for a new database, or one of version 0.1.0."""
    if not inspect(connection).has_table(VERSION.name):
        return None
    return connection.execute(select(VERSION.c.version_num)).scalar()


def is_newer(schema: str | None) -> bool:
    """Whether a newer version of this software made the tables."""
    return schema is not None and schema > SCHEMA


def other_version(url: URL, schema: str | None) -> ConfigError:
    """The error of a database that another version of this software wrote."""
    if is_newer(schema):
        return ConfigError(
            f"database {url} was written by a newer version of this software: it has schema {schema}, "
            f"and fedvit {version('fedvit')} knows those up to {SCHEMA}: update fedvit, or use another folder"
        )
    return ConfigError(
        f"database {url} was written by an older version of this software: it has schema "
        f"{schema or 'of 0.1.0'}, and fedvit {version('fedvit')} reads {SCHEMA}: coordinator runs brings it up to "
        "date, while no older coordinator uses it"
    )
