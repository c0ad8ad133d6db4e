"""What a device says of itself: measured on the file tree of a board, through a real broker, shown as text and JSON."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.security.broker import Broker, start_broker
from edge_client.owner.profile import ProfileTarget, SelfReport, measure_self, table
from fedvit.errors import OverBudget
from fedvit.policy import Policy, TrainPolicy
from fedvit.resources import ProductRate, Speed
from fedvit.transport.address import Address
from tests.support.boards import orin_nano, pi_4, write_tree
from tests.support.speeds import some_speed

NOBODY = Address.parse("127.0.0.1:1")
POLICY = Policy(train=TrainPolicy(memory=512_000_000, round_deadline=600.0, temperature_limit=85.0))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = start_broker("mosquitto", tmp_path_factory.mktemp("broker"), port=0)
    yield broker
    broker.stop()


def fast(threads: int) -> Speed:
    return some_speed(threads)


def dead(threads: int) -> Speed:
    raise OverBudget("FV0008", "the process was ended by SIGILL")


def place(address: Address, state: Path | None, policy: Policy | None = None, threads: int = 1) -> ProfileTarget:
    return ProfileTarget(
        state=state,
        address=address,
        client_id="pi-1",
        probe_topic="fl1/home/d/pi/up/probe",
        threads=threads,
        policy=policy or Policy(),
    )


def rows(report: SelfReport) -> dict[str, str]:
    return {line[:13].strip(): line[13:].strip() for line in table(report).splitlines()}


def test_products_of_all_kinds_are_shown(tmp_path: Path, broker: Broker) -> None:
    integers = ProductRate("integers", 1, 200, 768, 768, 9e10)
    halves = ProductRate("halves", 1, 200, 768, 768, 4e10)

    def both(threads: int) -> Speed:
        speed = some_speed(threads)
        return msgspec.structs.replace(speed, products=(*speed.products, integers, halves))

    report = measure_self(place(broker.address, tmp_path), both, lambda what: None)
    shown = rows(report)["compute speed"]
    assert shown.startswith("up to 25 GFLOP/s in products of floats, 90 GFLOP/s of integers, 40 GFLOP/s of float16, ")


def test_a_board_with_all_its_sensors(tmp_path: Path, broker: Broker) -> None:
    said: list[str] = []
    report = measure_self(
        place(broker.address, tmp_path / "state", POLICY, threads=4),
        fast,
        said.append,
        root=orin_nano(tmp_path / "root"),
    )
    assert report.host.board == "NVIDIA Jetson Orin Nano Developer Kit"
    assert report.speed == some_speed(4)
    assert report.round_trip_s is not None
    assert report.round_trip_s > 0
    assert report.disk is not None
    assert report.idle_power_w == pytest.approx(5.023488, rel=0.02)
    assert (report.power_source, report.busy_power_w) == ("ina3221 VDD_IN", None), "computing took no time"
    assert (report.temperature_c, report.slowed_now, report.slowed_since_start) == (52.5, (), ())
    assert report.not_measured == {}
    assert [what.split()[0] for what in said] == ["temperature,", "compute", "disk", "connection"]

    shown = rows(report)
    assert shown["processor"].endswith("4 threads for training")
    assert shown["clock"] == "6 cores at 1.11 GHz, 1.19 GHz allowed of 1.51 GHz, governor schedutil"
    assert shown["compute speed"].startswith("up to 25 GFLOP/s in products of floats, measured now, stored in ")
    assert shown["temperature"] == "52.5 C (cpu-thermal 51.1, gpu-thermal 52.5, tj-thermal 52.5)"
    assert shown["throttled"] == "no"
    assert shown["idle power"] == f"{report.idle_power_w:.2f} W (ina3221 VDD_IN)"
    assert shown["broker"].endswith("round trip")
    assert shown["budgets"] == "memory 512 MB, time of a round 10 min, temperature 85 C"
    assert "not measured" not in shown["disk"] + shown["free disk"]


def test_a_board_without_sensors_engine_and_broker(tmp_path: Path) -> None:
    """Everything that is missing says so, with the reason where there is one; nothing is 0."""
    root = write_tree(tmp_path / "root", {"proc/device-tree/model": "Orange Pi Zero\0"})
    report = measure_self(place(NOBODY, None), dead, lambda _: None, root=root)
    nothing = (report.speed, report.disk, report.round_trip_s, report.temperature_c, report.slowed_now)
    assert {*nothing, report.idle_power_w, report.free_disk_bytes, report.slowed_since_start} == {None}
    assert report.not_measured.keys() == {"power", "compute speed", "disk", "broker"}
    shown = rows(report)
    assert shown["compute speed"] == "not measured: the process was ended by SIGILL"
    assert shown["disk"] == "not measured: neither --data nor --state is given"
    assert shown["broker"] == "127.0.0.1:1, not measured: 127.0.0.1:1: connection refused"
    assert shown["temperature"] == shown["throttled"] == "not measured"
    assert shown["memory"] == "not measured, not measured available, swap not measured"
    assert shown["idle power"] == "not measured: no sensor of a kind that is known here"
    assert shown["budgets"] == "none"


def test_what_happened_since_the_start_is_shown(tmp_path: Path) -> None:
    root = pi_4(tmp_path, throttled="0x50000")
    shown = rows(measure_self(place(NOBODY, None), dead, lambda _: None, root=root))
    assert (shown["throttled"], shown["since start"]) == ("no", "throttled, under-voltage")


def test_machines_read_the_same(tmp_path: Path) -> None:
    """JSON with None as null, and back."""
    report = measure_self(place(NOBODY, None, POLICY), fast, lambda _: None, root=pi_4(tmp_path))
    raw = msgspec.json.encode(report)
    assert msgspec.json.decode(raw, type=SelfReport) == report
    assert msgspec.json.decode(raw)["idle_power_w"] is None
    assert msgspec.json.decode(raw)["temperature_c"] == 55.017
