"""The repository of runs."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from coordinator.record.record import Record
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.records import CONFIG, DIGEST, reopen


def test_a_run_comes_back(store: Record) -> None:
    fresh = store.runs.read("r")
    assert (fresh.status, fresh.classes, fresh.program, fresh.reason) == ("waiting", (), None, None)
    assert fresh.corrections == {}
    store.runs.update("r", classes=["ant", "bee"], status="running", corrections={"a": {"memory": 1.5}})
    store.runs.update("r", program=DIGEST)
    store.runs.update("r", status="failed", reason="disk full: näh \u2026")
    record = reopen(store).runs.read("r")
    assert record.config == CONFIG
    assert type(record.config["cohort"]) is float, "1.0 is a share, 1 would be a number"
    assert type(record.config["devices"]) is int
    assert (record.id, record.status, record.classes) == ("r", "failed", ("ant", "bee"))
    assert (record.program, record.reason) == (DIGEST, "disk full: näh \u2026")
    assert record.corrections == {"a": {"memory": 1.5}}
    assert datetime.fromisoformat(record.created_at).utcoffset() is not None


def test_runs_are_listed_newest_first(store: Record) -> None:
    for name in ("b", "a", "c"):
        store.runs.create(name, {})
    listed = store.runs.read_all()
    assert [record.created_at for record in listed] == sorted((record.created_at for record in listed), reverse=True)
    assert {record.id for record in listed} == {"r", "a", "b", "c"}


def test_a_run_whose_name_no_database_can_hold_has_not_ended(store: Record) -> None:
    assert not store.runs.has_ended("r\0")


def test_an_unknown_run_is_named(store: Record) -> None:
    with pytest.raises(ConfigError):
        store.runs.read("nope")


def test_a_run_cannot_be_made_twice(store: Record) -> None:
    """Nor by two processes that have both found its name unused; the second writes nothing."""

    def add_noted(add: Callable[[str, dict[str, Any]], None]) -> None:
        with store.database.together():
            store.audit.add("submit", "r")
            add("r", {})

    for add in (store.runs.create, store.runs.submit):
        with pytest.raises(ConfigError, check=has_code("FV1613", "'r' exists already")):
            add_noted(add)
    assert store.audit.read() == []
    assert store.runs.read("r").config == CONFIG
