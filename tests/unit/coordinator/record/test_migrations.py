"""Records of older versions, and of newer ones."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.command import upgrade
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from click.testing import CliRunner
from sqlalchemy import create_engine

from coordinator.cli import cli
from coordinator.record.copies import is_whole, newest_copy
from coordinator.record.migrations import alembic_config
from coordinator.record.store import Store
from coordinator.record.tables import SCHEMA, TABLES, Asked
from coordinator.run_view import read_run
from coordinator.views.report.document import read_report
from fedvit.errors import ConfigError, Damaged
from tests.support.runs import Stage, by_round

pytestmark = pytest.mark.usefixtures("known")

OLD = (Path(__file__).parent / "record-0.1.0.sql").read_text()
"""What version 0.1.0 wrote, as its own code wrote it: two closed rounds and an open one, of devices a and b."""


def written(file: Path, sql: str = OLD) -> Path:
    with closing(sqlite3.connect(file)) as database:
        database.executescript(sql)
    return file


def schema(file: Path) -> list[Any]:
    with closing(sqlite3.connect(file)) as database:
        return database.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()


def test_a_record_of_version_0_1_0_opens(tmp_path: Path) -> None:
    """With all that it said; its totals are made. The second result of b counted in round 3, which is open."""
    written(tmp_path / "fedvit.db")
    store = Store.in_folder(tmp_path)
    run = store.run("old")
    assert (run.status, run.classes, run.corrections) == ("running", ("ant", "bee"), {"a": {"memory": 1.5}})
    assert [(entry.round, entry.closed_at is None, entry.evaluated) for entry in store.rounds("old")] == [
        (1, False, True), (2, False, True), (3, True, False),
    ]  # fmt: skip
    assert [(entry.device, entry.round) for entry in store.used_in("old", 3)] == [("b", 2), ("a", 3)]
    assert store.asked("old") == {"a": Asked(2, 2), "b": Asked(2, 2)}
    assert [(task.round, task.device) for task in store.unanswered("old")] == [(3, "b")]
    assert set(store.expected("old")) == {(number, name) for number in (1, 2, 3) for name in "ab"}
    summary = read_run(store, "old")
    first, second, third = summary.rounds
    assert (first.accepted, first.accuracy, first.bytes_down) == (2, {"a": 0.7, "b": 0.2}, 2_000_000)
    assert (second.accepted, second.accuracy_mean, second.train_loss) == (1, pytest.approx(0.5), 0.5)
    assert (third.accepted, third.accuracy_mean) == (2, None)
    a, b = summary.devices
    assert (a.rounds, a.accuracy, a.step_s, a.budget_kept) == (3, 0.8, pytest.approx(0.01), 5)
    assert (b.rounds, b.budget_broken, b.broke) == (2, 1, {"memory": 1})
    assert read_report(store, "old").devices[0].rounds[0].expected is not None
    store.close()
    again = Store.in_folder(tmp_path)
    assert read_run(again, "old") == summary, "opened again it is as it was"
    again.close()


def test_a_record_of_version_0_1_0_is_shown(tmp_path: Path) -> None:
    written(tmp_path / "fedvit.db")
    shown = CliRunner().invoke(cli, ["show", "old", "--runs", str(tmp_path), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["mean_accuracy"] == pytest.approx(0.5)
    assert "old" in CliRunner().invoke(cli, ["runs", "--runs", str(tmp_path)]).output


def test_run_of_version_0_1_0_is_resumed(stage: Stage, tmp_path: Path) -> None:
    """Its record has the tables and rows of then; the run ends as one that nobody interrupted."""
    stage.fake("a", by_round)
    stage.start(rounds=3)
    stage.drive(lambda: bool(stage.store.closed_rounds("r")))
    stage.stop()
    shutil.rmtree(stage.out / "record.copies")
    shutil.rmtree(stage.out / "r" / "notes")
    new, old = stage.out / "fedvit.db", tmp_path / "old.db"
    engine = create_engine(f"sqlite:///{old}")
    with engine.begin() as connection:
        upgrade(alembic_config(connection), "0001")
    engine.dispose()
    with closing(sqlite3.connect(old)) as database, database:
        database.execute("ATTACH ? AS new", (str(new),))
        for table in ("runs", "rounds", "results", "tasks", "refusals"):
            there = [row[1] for row in database.execute(f"PRAGMA main.table_info({table})")]
            held = ", ".join(f'"{name}"' for name in there if name != "expected")
            database.execute(f"INSERT INTO main.{table} ({held}) SELECT {held} FROM new.{table}")
        database.execute("DROP TABLE main.alembic_version")
    for file in stage.out.glob("fedvit.db*"):
        file.unlink()
    shutil.copy(old, new)
    stage.start(rounds=3, resume=True)
    assert stage.finish() == "finished"
    assert stage.store.closed_rounds("r") == [1, 2, 3]
    assert [entry.accepted for entry in read_run(stage.store, "r").rounds] == [1, 1, 1]


def test_tables_are_the_same_whether_they_are_new_or_were_changed(tmp_path: Path) -> None:
    written(tmp_path / "fedvit.db")
    Store.in_folder(tmp_path).close()
    engine = create_engine(f"sqlite:///{tmp_path / 'fedvit.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), TABLES) == []
        assert ScriptDirectory.from_config(alembic_config(connection)).get_current_head() == SCHEMA
    engine.dispose()


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = written(tmp_path / "fedvit.db", OLD.replace('"bytes_up": 4', '"bytes_up": 4]', 1))
    before = schema(file)
    with pytest.raises(Damaged, match=r"fedvit\.db is damaged"):
        Store.in_folder(tmp_path)
    assert schema(file) == before


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Store.in_folder(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "fedvit.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0999'")
    before = schema(tmp_path / "fedvit.db")
    with pytest.raises(ConfigError, match=r"fedvit\.db was written by a newer version.*schema 0999.*update fedvit"):
        Store.in_folder(tmp_path)
    assert schema(tmp_path / "fedvit.db") == before


@pytest.mark.parametrize("kind", ["before the first", "another number", "no number", "unnumbered"])
def test_record_of_an_unknown_version_is_named_and_left_alone(tmp_path: Path, kind: str) -> None:
    """It is not damaged: the error names its version and those that this software knows."""
    file = tmp_path / "fedvit.db"
    if kind in ("before the first", "unnumbered"):
        written(file, "CREATE TABLE runs (id TEXT PRIMARY KEY, started REAL); INSERT INTO runs VALUES ('r', 1.5);")
    else:
        Store.in_folder(tmp_path).close()
    number = {"before the first": "0000", "another number": "0003b", "no number": "beta"}.get(kind)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("PRAGMA journal_mode = DELETE")
        if number:
            database.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL)")
            database.execute("DELETE FROM alembic_version")
            database.execute("INSERT INTO alembic_version VALUES (?)", (number,))
    with closing(sqlite3.connect(file)) as database:
        before = list(database.iterdump())
    for command in ("runs", "gc"):
        refused = CliRunner().invoke(cli, [command, "--runs", str(tmp_path)], standalone_mode=False).exception
        assert type(refused) is ConfigError, refused
        assert (number or "not numbered") in str(refused)
        assert SCHEMA in str(refused)
    with closing(sqlite3.connect(file)) as database:
        assert list(database.iterdump()) == before


def test_a_copy_of_an_older_version_can_be_put_back(tmp_path: Path) -> None:
    """The record is damaged, and the newest copy was made before the tables were changed."""
    (tmp_path / "record.copies").mkdir()
    copy = written(tmp_path / "record.copies" / "copy-2.db")
    assert is_whole(copy)
    (tmp_path / "fedvit.db").write_bytes(b"")
    assert newest_copy(tmp_path / "fedvit.db") == copy
    with pytest.raises(Damaged, match=r"newest good copy is .*copy-2\.db"):
        Store.in_folder(tmp_path)
    shutil.copy(copy, tmp_path / "fedvit.db")
    store = Store.in_folder(tmp_path)
    assert store.closed_rounds("old") == [1, 2]
    store.close()
