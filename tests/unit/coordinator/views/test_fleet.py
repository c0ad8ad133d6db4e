"""The read model of a fleet: devices by site and state, from the record, the small files and a deployment."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.record.record import Record, open_record
from coordinator.rounds.service.status import MemberStatus, ServiceStatus
from coordinator.security.registry import Certificate, JoinedDevice
from coordinator.views.fleet import FleetView, make_fleet, read_fleet_record
from tests.support.fleets import other_runs
from tests.support.records import FLEET_RUN, fleet_run, name_of, write_status

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """A run of 20 devices whose fourth round is open: the second half is at work, pi-9 and pi-19 have left, pi-3 is in
    quarantine. Before it 16 other runs."""
    with closing(fleet_run(tmp_path_factory.mktemp("fleet") / "runs", 20, refusals=0)) as made:
        other_runs(made, 16)
        yield made


@pytest.fixture
def folder(store: Record) -> Path:
    assert store.database.folder
    write_status(store.database.folder / FLEET_RUN)
    return store.database.folder


def view(store: Record, folder: Path, *joined: JoinedDevice, service: ServiceStatus | None = None) -> FleetView:
    return make_fleet(read_fleet_record(store), folder, service, {device.name: device for device in joined})


def states(fleet: FleetView) -> dict[str, str]:
    return {device.device: device.state for device in fleet.devices}


def make_joined(name: str, *, issued_days: float, ends_days: float, revoked_at: float | None = None) -> JoinedDevice:
    """A device with a certificate that was issued some days ago, and ends in some days."""
    now_s = time.time()
    certificate = Certificate("1f", now_s - issued_days * DAY_S, now_s + ends_days * DAY_S)
    return JoinedDevice(name, now_s, [certificate], now_s, revoked_at)


def test_each_device_has_the_state_that_matters_most(store: Record, folder: Path) -> None:
    found = states(view(store, folder))
    assert found[name_of(3)] == "quarantined"
    assert found[name_of(4)] == "idle"
    assert found[name_of(9)] == "away"
    assert found[name_of(12)] == "training"
    assert len(found) == 20


def test_devices_are_grouped_by_site_and_sorted_by_number(store: Record, folder: Path) -> None:
    sites = view(store, folder).by_site()
    assert list(sites) == ["north", "south"]
    assert [device.device for device in sites["south"]][:3] == ["pi-1", "pi-3", "pi-5"]


def test_label_of_the_operator_decides_the_site(store: Record, folder: Path) -> None:
    store.devices.set_label("pi-1", "site", "berlin")
    try:
        assert [device.device for device in view(store, folder).by_site()["berlin"]] == ["pi-1"]
    finally:
        store.devices.set_label("pi-1", "site", None)


def test_device_that_nobody_serves_is_away(store: Record, folder: Path) -> None:
    """The files of a killed coordinator say that it is online."""
    (folder / FLEET_RUN / "status.json").unlink()
    try:
        assert set(states(view(store, folder)).values()) == {"away", "quarantined"}
    finally:
        write_status(folder / FLEET_RUN, [name_of(number) for number in range(10, 20)], 4)


def test_certificate_that_ends_marks_a_device_and_a_revoked_one_is_left_out(store: Record, folder: Path) -> None:
    """Certificates of 90 days have 10 days left, or 40, or none."""
    fleet = view(
        store,
        folder,
        make_joined("pi-4", issued_days=80, ends_days=10),
        make_joined("pi-6", issued_days=50, ends_days=40),
        make_joined("new", issued_days=95, ends_days=-5),
        make_joined("pi-8", issued_days=1, ends_days=89, revoked_at=1.0),
    )
    found = states(fleet)
    assert (found["pi-4"], found["pi-6"], found["new"]) == ("certificate ending", "idle", "certificate ending")
    assert "pi-8" not in found


def test_members_of_a_service_belong_to_the_fleet_without_any_run(tmp_path: Path) -> None:
    members = [MemberStatus(device=name, labels={"site": "north"}, online=name == "a", run=None) for name in "ab"]
    service = ServiceStatus(federation="home", broker="b:1", running=[], members=members)
    with open_record(tmp_path) as empty:
        fleet = view(empty, tmp_path, service=service)
    assert states(fleet) == {"a": "idle", "b": "away"}
    assert fleet.runs == []


def test_runs_under_way_and_the_queue_are_told_apart(store: Record, folder: Path) -> None:
    fleet = view(store, folder)
    assert [working.run.progress.run for working in fleet.runs] == [FLEET_RUN]
    assert fleet.runs[0].working == 10
    assert len(fleet.record.queue) == 2
    assert len(fleet.record.failed) == 2
    assert fleet.record.counts["finished"] == 10


def test_positions_of_many_runs_are_those_of_each(store: Record) -> None:
    positions = store.rounds.read_positions()
    for record in store.runs.read_all():
        if record.status != "queued":
            expected = (store.rounds.find_last(record.id), store.rounds.read_mean_accuracy(record.id))
            assert positions[record.id] == expected
