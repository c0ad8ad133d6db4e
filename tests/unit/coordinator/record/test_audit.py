"""The audit: a chain of digests that shows every change, insertion and removal."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import delete, insert, update

from coordinator.cli import cli
from coordinator.record import audit
from coordinator.record.audit import Actor, acting_as, check_entries, current_actor
from coordinator.record.record import Record, open_record
from coordinator.record.tables import AUDIT
from coordinator.rounds.service.run_requests import cancel, pause
from fedvit.errors import ConfigError, Damaged
from tests.support.codes import has_code


@pytest.fixture
def long_record(store: Record) -> Record:
    for number in range(5):
        with acting_as(Actor(f"user-{number}", "API 192.0.2.1")):
            store.audit.add("pause", f"run-{number}", "why\0 \udcff")
    return store


def change(store: Record, statement: Any) -> None:
    with store.database.transaction() as connection:
        connection.execute(statement)


def test_acts_are_stored_with_who_did_them(store: Record) -> None:
    pause(store, "r")
    with acting_as(Actor("ci", "API 192.0.2.1")):
        cancel(store, Path("nowhere"), "r")
    entries = store.audit.read()
    assert [(entry.id, entry.act, entry.subject) for entry in entries] == [(1, "pause", "r"), (2, "cancel", "r")]
    assert [entry.who for entry in entries] == [current_actor().who, "ci"]
    assert check_entries(entries) == entries[-1].digest
    assert store.audit.read(1) == entries[1:]
    store.runs.remove("r")
    assert len(store.audit.read()) == 2, "a removed run keeps its audit"


def test_refused_act_leaves_no_entry(store: Record) -> None:
    def act() -> None:
        with store.database.together():
            store.audit.add("pause", "r")
            store.runs.read("none")

    with pytest.raises(ConfigError, check=has_code("FV1601")):
        act()
    assert store.audit.read() == []


@pytest.mark.parametrize(
    "statement",
    [
        update(AUDIT).where(AUDIT.c.id == 3).values(who="somebody"),
        update(AUDIT).where(AUDIT.c.id == 5).values(at="2020-01-01"),
        update(AUDIT).where(AUDIT.c.id == 2).values(digest="blake3:0"),
        delete(AUDIT).where(AUDIT.c.id == 3),
        delete(AUDIT).where(AUDIT.c.id == 1),
        delete(AUDIT).where(AUDIT.c.id < 5),
        insert(AUDIT).values(id=6, at="", who="", origin="", act="", subject="", details="", former="", digest=""),
    ],
)
def test_change_is_found(long_record: Record, statement: Any) -> None:
    assert check_entries(long_record.audit.read())
    change(long_record, statement)
    with pytest.raises(Damaged, check=has_code("FV1641")):
        check_entries(long_record.audit.read())


def test_removal_of_the_newest_entries_is_found_by_a_digest_that_was_noted(long_record: Record) -> None:
    noted = check_entries(long_record.audit.read())
    change(long_record, delete(AUDIT).where(AUDIT.c.id == 5))
    check_entries(long_record.audit.read())
    with pytest.raises(Damaged, check=has_code("FV1641")):
        check_entries(long_record.audit.read(), noted)


def test_oldest_entries_are_removed_by_rule(store: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "KEPT", 4)
    monkeypatch.setattr(audit, "SLACK", 2)
    for number in range(23):
        store.audit.add("pause", f"run-{number}")
        check_entries(store.audit.read())
    entries = store.audit.read()
    assert len(entries) <= 7
    assert entries[-1].subject == "run-22"
    assert any(entry.act == audit.TRIM for entry in entries)


def test_command_shows_and_checks(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with open_record(runs) as store:
        store.runs.create("r", {})
    runner = CliRunner()
    assert runner.invoke(cli, ["pause", "r", "--runs", str(runs)]).exit_code == 0
    shown = runner.invoke(cli, ["audit", "--runs", str(runs)])
    assert "pause" in shown.stdout
    checked = runner.invoke(cli, ["audit", "--check", "--runs", str(runs)])
    assert checked.stdout.startswith("1 entry intact; newest digest: blake3:")
