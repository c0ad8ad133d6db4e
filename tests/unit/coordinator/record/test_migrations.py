"""Records of this version, of newer and of unknown ones."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from click.testing import CliRunner
from sqlalchemy import create_engine

from coordinator.cli import cli
from coordinator.record.migrations import alembic_config
from coordinator.record.record import open_record
from coordinator.record.tables import SCHEMA, TABLES
from fedvit.errors import ConfigError

UNNUMBERED = "CREATE TABLE runs (id TEXT PRIMARY KEY, started REAL); INSERT INTO runs VALUES ('r', 1.5);"


def test_migrations_make_the_tables(tmp_path: Path) -> None:
    open_record(tmp_path).close()
    engine = create_engine(f"sqlite:///{tmp_path / 'fedvit.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), TABLES) == []
        assert ScriptDirectory.from_config(alembic_config(connection)).get_current_head() == SCHEMA
    engine.dispose()


@pytest.mark.parametrize("schema", ["0999", "0000", "0003b", "beta", None])
def test_record_of_another_version_is_named_and_left_alone(tmp_path: Path, schema: str | None) -> None:
    """The record is not called damaged: the error names its schema and the known ones."""
    file = tmp_path / "fedvit.db"
    if schema is not None:
        open_record(tmp_path).close()
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("PRAGMA journal_mode = DELETE")
        if schema is None:
            database.executescript(UNNUMBERED)
        else:
            database.execute("UPDATE alembic_version SET version_num = ?", (schema,))
    with closing(sqlite3.connect(file)) as database:
        before = list(database.iterdump())
    for command in ("runs", "gc"):
        refused = CliRunner().invoke(cli, [command, "--runs", str(tmp_path)], standalone_mode=False).exception
        assert type(refused) is ConfigError, refused
        assert (schema or "not numbered") in str(refused)
        assert SCHEMA in str(refused)
    with closing(sqlite3.connect(file)) as database:
        assert list(database.iterdump()) == before
