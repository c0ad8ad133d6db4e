"""`coordinator label`: labels in the record, which replace those of a device."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.commands.label import label
from coordinator.record.record import open_record
from coordinator.rounds.service.labelling import set_labels
from fedvit.errors import ConfigError
from tests.support.runs import Stage


def test_labels_are_set_listed_and_removed(tmp_path: Path) -> None:
    open_record(tmp_path).close()

    def labels(*words: str) -> object:
        done = CliRunner().invoke(label, ["pi-3", *words, "--runs", str(tmp_path), "--json"], catch_exceptions=False)
        return json.loads(done.stdout)["labels"]

    assert labels() == {}
    assert labels("site=berlin", "board=rpi5") == {"site": "berlin", "board": "rpi5"}
    assert labels("site=munich", "--remove", "board") == {"site": "munich"}
    assert labels() == {"site": "munich"}


def test_labels_of_several_devices_are_set_together(tmp_path: Path) -> None:
    open_record(tmp_path).close()
    flags = ["--runs", str(tmp_path), "--json"]
    both = CliRunner().invoke(label, ["a", "b", "a", "site=berlin", *flags], catch_exceptions=False)
    assert json.loads(both.stdout) == [{"device": device, "labels": {"site": "berlin"}} for device in "ab"]
    with open_record(tmp_path) as store:
        assert [(entry.act, entry.subject) for entry in store.audit.read()] == [("label", "a"), ("label", "b")]
        set_labels(store, ["a"], ["board=rpi5"])
        with pytest.raises(ConfigError):
            set_labels(store, ["a", "b"], [], ["board"])
        assert store.devices.read_labels("a")["a"]["board"] == "rpi5"


@pytest.mark.parametrize(
    ("labels", "removed", "named"),
    [
        (["site"], [], "label 'site' cannot be used: expected KEY=VALUE"),
        ([], ["site"], "label 'site' of pi-3 was not set here"),
        ([f"l{number}=1" for number in range(17)], [], "pi-3 would have 17 labels, a device can have 16"),
        (["a=1"], ["a"], "label 'a' of pi-3 was not set here"),
    ],
)
def test_labels_that_cannot_be_set_are_named(tmp_path: Path, labels: list[str], removed: list[str], named: str) -> None:
    with open_record(tmp_path) as store:
        with pytest.raises(ConfigError, match=named):
            set_labels(store, ["pi-3"], labels, removed)
        assert store.devices.read_labels() == {}


def test_run_selects_devices_by_labels_that_the_operator_set(stage: Stage) -> None:
    device = stage.fake("a", labels={"site": "berlin"})
    other = stage.fake("b", labels={"site": "munich"})
    with open_record(stage.out) as store:
        set_labels(store, ["a"], ["site=munich"])
        set_labels(store, ["b"], ["site=berlin"])
    stage.start(devices_where="site=munich", devices=1)
    assert stage.finish() == "finished"
    assert (device.tasks(), other.tasks()) == ([1], [])
