"""The words of a board's certificate."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from edge_client.health.doctor_context import Finding
from edge_client.owner.certify import (
    BoardCertificate,
    HeatFigures,
    MemoryFigures,
    ProgramFigures,
    SurvivalFigures,
    anonymise,
    list_faults,
)
from edge_client.owner.certify_page import describe_signature, make_document, make_page, make_row, read_document
from edge_client.owner.profile import SelfReport
from fedvit.errors import ConfigError
from fedvit.resources import Budget, ResourceUse
from profiles.probes.host import host
from tests.support.codes import has_code

PROFILE = SelfReport(
    software="0.1.0",
    host=replace(host(), name="anns-pi", board="Raspberry Pi 5", processor="Cortex-A76", os="Debian 12"),
    threads=4,
    base_rss_bytes=50_000_000,
    speed=None,
    speed_origin="not measured: too slow",
    free_disk_bytes=None,
    disk=None,
    broker="mqtts://anns-server:8883",
    round_trip_s=0.1,
    temperature_c=None,
    zones=(),
    slowed_now=None,
    slowed_since_start=None,
    clocks=(),
    idle_power_w=None,
    busy_power_w=None,
    power_source=None,
    budget=Budget(),
    temperature_limit_c=None,
    not_measured={"broker": "anns-server does not answer", "power": "no sensor"},
)
MEMORY = MemoryFigures(limit_bytes=256_000_000, peak_bytes=150_000_000, fits=True, refused=True)
SURVIVAL = SurvivalFigures(kills=3, rounds=6, resumed=True, same=True)
USE = ResourceUse(step_s=0.05, steps=20, peak_rss_bytes=150_000_000)
PROGRAMS = (
    ProgramFigures(name="float", loss=2.3, right=True, use=USE),
    ProgramFigures(name="int8", loss=2.3, right=True, use=USE),
)
CERTIFICATE = BoardCertificate(
    made="2026-01-02T03:04:05+00:00",
    faults=(),
    doctor=(Finding(check="clock", level="warning", what="it is 2020"),),
    profile=anonymise(PROFILE),
    programs=PROGRAMS,
    memory=MEMORY,
    heat=HeatFigures(
        seconds=600.0,
        celsius=((0.0, 41.0), (300.0, 63.5), (600.0, 62.0)),
        use=ResourceUse(steps=100, energy_j=250.0, energy_source="pmic_read_adc", throttled=False, sustained=1.04),
    ),
    survival=SURVIVAL,
)


def test_row_has_what_was_measured() -> None:
    row = make_row(make_document(CERTIFICATE, None))
    assert row == (
        "| Raspberry Pi 5 | Cortex-A76 | Debian 12 | 50 ms / 50 ms / - | 150 MB | 2.500 J a step (pmic_read_adc) "
        "| 41 to 64 C | 3 kills, same bits | no |"
    )


def test_sensors_that_are_missing_are_said() -> None:
    without = replace(CERTIFICATE, heat=replace(CERTIFICATE.heat, celsius=(), use=ResourceUse(steps=100)))
    assert make_row(make_document(without, None)).count("no sensor") == 2
    assert "throttling is not measured" in make_page(make_document(without, None))


def test_page_tells_nothing_of_the_owner() -> None:
    page = make_page(make_document(CERTIFICATE, None))
    assert "anns" not in page
    assert "anns" not in str(CERTIFICATE)
    assert "| 300 | 63.5 |" in page
    assert "not throttled, the last steps took 1.04 of the first" in page
    assert "unsigned: this device has not joined" in page


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"doctor": (Finding(check="engine", level="error", what="it dies"),)}, "engine: it dies"),
        ({"programs": (replace(PROGRAMS[0], right=False),)}, "float: the loss is 2.3000, which is wrong"),
        ({"memory": replace(MEMORY, fits=False)}, "memory: a step does not fit into 256 MB"),
        ({"memory": replace(MEMORY, refused=False)}, "memory: a task exceeded its limit"),
        ({"survival": replace(SURVIVAL, rounds=4, resumed=False)}, "kill -9: the rounds were not resumed, 4 of 6"),
        ({"survival": replace(SURVIVAL, same=False)}, "kill -9: the tensors are not those"),
    ],
)
def test_each_fault_is_listed(changes: dict[str, object], fault: str) -> None:
    one = replace(CERTIFICATE, **changes)
    [said] = list_faults(one.doctor, one.programs, one.memory, one.survival)
    assert said.startswith(fault)
    assert f"- {said}" in make_page(make_document(replace(one, faults=(said,)), None))
    assert not [*list_faults(CERTIFICATE.doctor, PROGRAMS, MEMORY, SURVIVAL)]


def test_other_files_are_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "missing.json"):
        with pytest.raises(ConfigError, check=has_code("FV0002", name)):
            read_document(tmp_path / name)
    assert "unsigned" in describe_signature(make_document(CERTIFICATE, None))
