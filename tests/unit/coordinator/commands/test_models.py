"""`coordinator models`: what it lists, and what it changes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.record.record import Record, open_record
from fedvit.errors import ConfigError
from tests.support.models import BETTER, FIRST, WORSE, compare_on, list_wanted


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    with open_record(tmp_path) as made:
        compare_on(made, "r-1", {"a": FIRST, "b": FIRST}, after=0)
        compare_on(made, "r-2", {"a": BETTER, "b": BETTER}, canary="site=berlin")
        compare_on(made, "s-3", {"a": WORSE}, after=0)
        yield made


def call(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(cli, ["models", *words, "--runs", str(folder)], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.output


def test_list_names_states_devices_and_scores(store: Record, tmp_path: Path) -> None:
    listed: list[dict[str, Any]] = json.loads(call(tmp_path, "--json"))
    assert [(model["model"], model["stage"]) for model in listed] == [
        ("s-3", "challenger"), ("r-2", "canary"), ("r-1", "champion"),
    ]  # fmt: skip
    canary = listed[1]
    assert (canary["run"], canary["round"], canary["method"], canary["pending"]) == ("r", 2, "fedavg", 1)
    assert (canary["score"]["accuracy"], canary["score"]["images"]) == (0.9, 200)
    assert 0 < canary["score"]["low"] < canary["score"]["high"]
    assert [(device["device"], device["wanted"]) for device in canary["devices"]] == [("a", "canary"), ("b", None)]
    assert [act["act"] for act in canary["history"]] == ["compared", "canary"]
    shown = call(tmp_path)
    assert "r-2" in shown
    assert "canary" in shown


def test_changes_are_in_the_record_and_the_audit(store: Record, tmp_path: Path) -> None:
    assert call(tmp_path, "promote", "s-3", "--where", "site=berlin") == "model s-3 becomes champion on 1 device\n"
    assert list_wanted(store, "a")["s-3"] == "champion"
    assert json.loads(call(tmp_path, "rollback", "s-3", "--json"))["stage"] == "retired"
    assert call(tmp_path, "retire", "r-2") == "model r-2 is retired on 1 device\n"
    acts = [(entry.act, entry.subject) for entry in store.audit.read()][-3:]
    assert acts == [("promote model", "s-3"), ("roll back model", "s-3"), ("retire model", "r-2")]


def test_empty_folder_and_unknown_model_are_named(tmp_path: Path) -> None:
    open_record(tmp_path).close()
    assert "no model" in call(tmp_path)
    with pytest.raises(ConfigError) as refused:
        call(tmp_path, "promote", "nothing-1")
    assert "nothing-1" in str(refused.value)
