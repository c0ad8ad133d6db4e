"""A task's energy, heat and slowing down, while files change as a kernel's do."""

import time
from pathlib import Path

import pytest

from profiles.probes.meter import Meter, Metered, Sensors
from tests.support.boards import orin_nano, pi_4, rapl, vcgencmd, write_tree, x86
from tests.support.waiting import WAIT_S


def test_nothing_is_measured_where_nothing_can_be(tmp_path: Path) -> None:
    with Meter(Sensors.find(tmp_path)) as meter:
        pass
    assert meter.finish() == Metered(None, None, None, None)
    assert meter.celsius is None


def test_energy_of_a_counter_is_its_difference(tmp_path: Path) -> None:
    """From 10 J to 12.5 J, with a wrap in between: 262.14 kJ fit into the counter."""
    meter = Meter(Sensors.find(rapl(tmp_path, 262_143_000_000)), every_s=3600)
    with meter:
        rapl(tmp_path, 2_171_150)  # 328 850 uJ up to the wrap, and 2 171 150
    assert meter.finish()[:2] == (pytest.approx(2.5), "rapl package")


def test_power_is_integrated_over_the_time_that_passed(tmp_path: Path) -> None:
    """5.023488 W all the time: between what was certainly spent inside and certainly spent outside."""
    sensors = Sensors.find(orin_nano(tmp_path))
    outside = time.monotonic()
    with Meter(sensors, every_s=0.01) as meter:
        inside = time.monotonic()
        time.sleep(0.1)
        inside = time.monotonic() - inside
    energy_j, source, _, _ = meter.finish()
    outside = time.monotonic() - outside
    assert source == "ina3221 VDD_IN"
    assert energy_j is not None
    assert 5.02 * inside <= energy_j <= 5.03 * outside


def test_the_highest_temperature_is_kept_and_the_newest_known(tmp_path: Path) -> None:
    root = pi_4(tmp_path)
    with Meter(Sensors.find(root), every_s=0.005) as meter:
        for celsius in (83, 60):
            write_tree(root, {"sys/class/thermal/thermal_zone0/temp": f"{celsius}000\n"})
            until = time.monotonic() + WAIT_S
            while meter.celsius != celsius and time.monotonic() < until:
                time.sleep(0.002)
    assert meter.celsius == 60.0
    assert meter.finish().temperature_c == 83.0
    assert meter.finish().energy_j is None
    assert meter.finish().throttled is False


def test_throttling_that_came_and_went_between_two_looks_left_its_mark(tmp_path: Path) -> None:
    root = pi_4(tmp_path)
    with Meter(Sensors.find(root), every_s=3600) as meter:
        vcgencmd(root, "0x40000", None)
    assert meter.finish().throttled is True


def test_marks_from_before_the_task_do_not_count(tmp_path: Path) -> None:
    with Meter(Sensors.find(pi_4(tmp_path, throttled="0x50000")), every_s=3600) as meter:
        pass
    assert meter.finish().throttled is False


def test_a_pc_that_throttled_once_more(tmp_path: Path) -> None:
    count = "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    root = write_tree(x86(tmp_path), {count: "7\n"})
    with Meter(Sensors.find(root), every_s=3600) as meter:
        write_tree(root, {count: "8\n"})
    assert meter.finish().throttled is True
    assert meter.finish().temperature_c == 61.0
