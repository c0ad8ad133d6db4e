"""The keeper of models: what devices are told, and what their reports change."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.record.record import Record, open_record
from coordinator.rounds.models import keeper
from coordinator.rounds.models.keeper import ModelKeeper
from coordinator.rounds.models.requests import promote, promote_canary, roll_back
from fedvit.wire.messages import ModelReport, Models
from tests.support.models import BETTER, FIRST, StatesOnly, compare_on, list_wanted


class Hall:
    """A record, a keeper, and devices that obey."""

    def __init__(self, folder: Path) -> None:
        self.store: Record = open_record(folder)
        self.devices: dict[str, StatesOnly] = {}
        self.told: list[tuple[str, Models]] = []
        self.said: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Another process keeps the models."""
        self.told.clear()
        self.keeper = ModelKeeper(self.store, self._send, lambda: 7, self.said.append)

    def join(self, *names: str, instance: str = "i1") -> None:
        for name in names:
            self.devices.setdefault(name, StatesOnly())
            self.keeper.welcome(name, instance)

    def _send(self, device: str, message: Models) -> None:
        self.told.append((device, message))

    def settle(self) -> None:
        """Let devices answer until nobody is told anything more."""
        self.keeper.look()
        while self.told:
            device, message = self.told.pop(0)
            self.keeper.take(device, self.devices[device].obey(message))
            self.keeper.look()

    def compare(self, name: str, compared: dict[str, object], **rules: object) -> None:
        for device in compared:
            self.devices[device].states[name] = "challenger"
        compare_on(self.store, name, compared, **rules)  # type: ignore[arg-type]

    def serving(self) -> list[str]:
        return [device.report("i1").serving for device in self.devices.values()]


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path / "runs")
    yield made
    made.store.close()


def test_fleet_without_models_is_told_nothing(hall: Hall) -> None:
    hall.join("a", "b")
    hall.settle()
    assert hall.told == []


def test_devices_are_told_after_their_welcome_and_when_it_changes(hall: Hall) -> None:
    hall.join("a", "b")
    hall.compare("r-1", {"a": FIRST, "b": FIRST}, after=0)
    hall.keeper.look()
    assert hall.told == [(name, Models("i1", 7, {"r-1": "champion"})) for name in ("a", "b")]
    hall.settle()
    assert hall.serving() == ["r-1", "r-1"]
    assert hall.keeper.is_settled()
    hall.keeper.look()
    assert hall.told == [], "nothing changed"
    hall.begin()
    hall.join("a")
    assert hall.told == [("a", Models("i1", 7, {"r-1": "champion"}))], "after each welcome"


def test_canary_is_promoted_everywhere_after_its_time(hall: Hall) -> None:
    hall.join("a", "b")
    hall.compare("r-1", {"a": FIRST, "b": FIRST}, after=0)
    hall.settle()
    hall.compare("r-2", {"a": BETTER, "b": BETTER}, canary="site=berlin", after=1e-6)
    hall.settle()
    assert hall.serving() == ["r-2", "r-2"]
    assert [row.actual for row in hall.store.models.read_devices("r-1")] == ["former", "former"]
    assert any("canary on 1 of 1 devices" in line for line in hall.said)


def test_canary_waits_for_a_device_that_uses_it(hall: Hall) -> None:
    hall.join("b")
    hall.devices["a"] = StatesOnly()
    hall.compare("r-1", {"a": FIRST, "b": FIRST}, canary="site=berlin", after=1e-6)
    hall.settle()
    assert hall.store.models.read("r-1").stage == "canary"
    hall.join("a")
    hall.settle()
    assert hall.serving() == ["r-1", "r-1"]


def test_device_whose_challenger_was_replaced_meanwhile_keeps_its_champion(hall: Hall) -> None:
    hall.join("a", "b")
    hall.compare("r-1", {"a": FIRST, "b": FIRST}, after=0)
    hall.settle()
    hall.compare("r-2", {"a": BETTER, "b": BETTER}, canary="site=berlin", after="1s")
    hall.devices["b"].states.pop("r-2")
    hall.keeper.take("b", hall.devices["b"].report("i1"))
    promote_canary(hall.store, "r-2", "its time is over")
    hall.settle()
    assert hall.serving() == ["r-2", "r-1"]
    assert list_wanted(hall.store, "b") == {"r-1": "champion", "r-2": None}


def test_canary_that_a_device_stopped_is_rolled_back_everywhere(hall: Hall) -> None:
    hall.join("a", "b")
    hall.compare("r-1", {"a": FIRST, "b": FIRST}, after=0)
    hall.settle()
    hall.compare("r-2", {"a": BETTER, "b": BETTER}, canary="site=berlin")
    hall.settle()
    assert hall.serving() == ["r-2", "r-1"]
    hall.devices["a"].states["r-2"] = "former"
    hall.keeper.take("a", hall.devices["a"].report("i1", failed="r-2", reason="it ended 3 times"))
    hall.settle()
    assert hall.serving() == ["r-1", "r-1"]
    assert hall.store.models.read("r-2").stage == "retired"
    assert "a: it ended 3 times" in hall.said[-1]


def test_champion_that_one_device_stopped_is_rolled_back_there_alone(hall: Hall) -> None:
    hall.join("a", "b")
    hall.compare("r-1", {"a": FIRST, "b": FIRST}, after=0)
    hall.settle()
    hall.compare("r-2", {"a": BETTER, "b": BETTER}, after=0)
    hall.settle()
    report = hall.devices["b"].report("i1", failed="r-2", reason="its confidence fell")
    hall.keeper.take("b", report)
    hall.keeper.take("b", report)  # it repeats itself until it hears of it
    hall.settle()
    assert hall.serving() == ["r-2", "r-1"]
    hall.keeper.take("b", hall.devices["b"].report("i1", failed="r-2", reason="its confidence fell"))
    promote(hall.store, "r-1")
    hall.settle()
    assert hall.serving() == ["r-1", "r-1"]


def test_device_that_did_not_obey_is_told_again(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk was full, for example. A device that obeyed is not told again."""
    hall.join("a", "b")
    hall.compare("r-1", {"a": FIRST, "b": FIRST}, after=0)
    hall.keeper.look()
    [_, (device, message)] = hall.told
    hall.keeper.take(device, hall.devices[device].obey(message))
    hall.told.clear()
    hall.keeper.take("a", hall.devices["a"].report("i1"))
    hall.keeper.look()
    assert hall.told == [], "not at once"
    monkeypatch.setattr(keeper, "AGAIN_S", 0.0)
    hall.keeper.look()
    assert [name for name, _ in hall.told] == ["a"]


def test_canary_whose_confidence_fell_is_rolled_back(hall: Hall) -> None:
    hall.join("a", "b")
    hall.compare("r-1", {"a": FIRST, "b": FIRST}, after=0)
    hall.settle()
    hall.keeper.take("a", hall.devices["a"].report("i1", answered=200, confidence=180.0))
    hall.compare("r-2", {"a": BETTER, "b": BETTER}, canary="site=berlin", after="90d")
    hall.settle()
    hall.begin()  # sums are stored at most every few seconds by one process
    hall.join("a", "b")
    hall.settle()
    hall.keeper.take("a", hall.devices["a"].report("i1", answered=100, confidence=60.0))
    hall.settle()
    assert hall.serving() == ["r-1", "r-1"]
    assert "mean confidence 0.600 over 100 pictures, 0.900 with r-1" in hall.said[-1]


def test_report_of_an_earlier_process_or_of_unknown_models_changes_nothing(hall: Hall) -> None:
    hall.join("a")
    hall.compare("r-1", {"a": FIRST}, after=0)
    hall.keeper.take("a", ModelReport("i0", {"r-1": "champion"}, "r-1"))
    hall.keeper.take("stranger", ModelReport("i1", {"r-1": "champion"}, "r-1"))
    hall.keeper.take("a", ModelReport("i1", {"r-1": "challenger", "other-9": "champion"}, "other-9"))
    assert [(row.model, row.actual) for row in hall.store.models.read_devices()] == [("r-1", "challenger")]


def test_retired_model_is_named_until_the_device_has_removed_it(hall: Hall) -> None:
    hall.join("a")
    hall.compare("r-1", {"a": FIRST}, after=0)
    hall.settle()
    hall.compare("r-2", {"a": BETTER}, after=0)
    hall.settle()
    roll_back(hall.store, "r-2")
    hall.keeper.look()
    assert hall.told[-1][1].states == {"r-1": "champion", "r-2": "retired"}
    hall.settle()
    assert list_wanted(hall.store, "a") == {"r-1": "champion", "r-2": "retired"}
    hall.begin()
    hall.join("a")
    assert hall.told[-1][1].states == {"r-1": "champion"}
