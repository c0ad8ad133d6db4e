"""`coordinator devices --runs`: what the newest run knows of each device."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.commands.devices import devices
from coordinator.record.record import open_record
from coordinator.record.tables import Announced, SavedState
from coordinator.security.folder import Deployment, Settings
from coordinator.security.registry import Certificate
from coordinator.views.dashboard.devices_page import read_details, rows
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result
from tests.support.records import add_result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Devices a, with a battery, and b, whose version is not known; both have joined."""
    deployment = Deployment.create(
        tmp_path / "deployment",
        Settings(federation="f", listen="127.0.0.1", port=1, enrolment_port=2, hosts=("localhost",)),
    )
    with deployment.change() as registry:
        for number, name in enumerate("ab"):
            registry.put_device(name, Certificate(f"{number}f", 0.0, 4e9), 0.0)
    with open_record(tmp_path / "runs") as store:
        store.runs.create("r", {})
        store.rounds.open("r", 1, ["a", "b"])
        for name, use in (("a", ResourceUse(battery_percent=81, charging=True)), ("b", ResourceUse())):
            add_result(store, name, Result("r", 1, "train", 5, {"loss": 1.0}, use))
        store.rounds.close("r", 1, SavedState({}, None, {}), {})
        store.devices.set_announced("r", {"a": Announced("0.9.1", ("features", "class_counts"))})
    return tmp_path


def test_devices_have_version_and_battery(folder: Path) -> None:
    words = ["--deployment", str(folder / "deployment"), "--runs", str(folder / "runs")]
    shown = json.loads(CliRunner().invoke(devices, [*words, "--json"], catch_exceptions=False).stdout)
    known = [(entry["device"], entry["software"], entry["battery_percent"], entry["charging"]) for entry in shown]
    assert known == [("a", "0.9.1", 81, True), ("b", None, None, None)]
    table = CliRunner().invoke(devices, words, catch_exceptions=False, env={"COLUMNS": "200"}).stdout.splitlines()
    assert "version" in table[0]
    assert [word for word in ("0.9.1", "81 %, charging") if word in table[2]] == ["0.9.1", "81 %, charging"]
    assert "%" not in table[3]
    assert [line for line in table if "does not allow" in line] == ["a does not allow features"]
    assert [entry["denies"] for entry in shown] == [["features", "class_counts"], []]


def test_fleet_page_has_the_battery(folder: Path) -> None:
    with open_record(folder / "runs") as store:
        first, second = rows("r", read_details(store, "r"), [], None, set())
    assert (first["battery"], first["charging"], second["battery"], second["charging"]) == (81, "yes", None, "")
