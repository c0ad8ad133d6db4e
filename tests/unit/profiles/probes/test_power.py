"""Power and energy, on the file trees of named boards."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from profiles.probes.power import PowerSensor, find_power
from tests.support.boards import agx_orin, jetson_nano, orin_nano, pi_4, pi_5, rapl, write_tree
from tests.support.children import run_child


def sensor_of(root: Path) -> PowerSensor:
    sensor, why_not = find_power(root)
    assert sensor is not None, why_not
    return sensor


@pytest.mark.parametrize(
    ("board", "source", "watts"),
    [
        # VDD_IN alone, 5.064 V x 0.992 A: the other rails are part of it
        (orin_nano, "ina3221 VDD_IN", 5.023488),
        # 20 V x 0.15 A + 20 V x 0.04 A + 5 V x 0.7 A, of two monitors; NC is not connected
        (agx_orin, "ina3221 sum of rails", 7.3),
        (jetson_nano, "ina3221 POM_5V_IN", 2.314),
        # 3.7 x .00390372 + 3.3 x .07026696 + 1.8 x .1600452 + 1.1 x .0243975 + .72 x .906
        # = .014443764 + .231880968 + .28808136 + .02683725 + .65232 = 1.213563342 W; x 1.1451 + .5879, as published
        (pi_5, "pmic_read_adc", 1.977551383),
    ],
)
def test_a_board_says_what_it_takes(tmp_path: Path, board: Callable[[Path], Path], source: str, watts: float) -> None:
    """10 s in which nothing changes."""
    sensor = sensor_of(board(tmp_path))
    assert sensor.source == source
    reading = sensor.read()
    assert reading is not None
    assert sensor.joules(reading, reading, 10) == pytest.approx(10 * watts)


def test_a_rail_that_does_not_answer_makes_no_zero(tmp_path: Path) -> None:
    sensor = sensor_of(orin_nano(tmp_path))
    write_tree(tmp_path, {"sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/curr1_input": ""})
    assert sensor.read() is None


def test_power_between_two_readings_is_a_straight_line(tmp_path: Path) -> None:
    """2 W and 4 W, 3 s apart: 9 J."""
    assert sensor_of(jetson_nano(tmp_path)).joules((2.0,), (4.0,), 3) == pytest.approx(9)


def test_a_pi_4_has_no_sensor(tmp_path: Path) -> None:
    """Its firmware does not know the command of the Pi 5."""
    sensor, why_not = find_power(pi_4(tmp_path))
    assert sensor is None
    assert why_not == "no sensor of a kind that is known here"


def test_a_pc_counts_the_energy_of_its_packages(tmp_path: Path) -> None:
    """Two packages, 2 J and 3 J more. Cores are part of a package; the time does not matter."""
    sensor = sensor_of(rapl(tmp_path, 10_000_000, 20_000_000))
    assert sensor.source == "rapl package"
    before = sensor.read()
    rapl(tmp_path, 12_000_000, 23_000_000)
    after = sensor.read()
    assert before is not None
    assert after is not None
    assert sensor.joules(before, after, 99) == pytest.approx(5)


def test_a_counter_that_wrapped(tmp_path: Path) -> None:
    """From 900 uJ up to 1000 and from 0 to 50: 150 uJ."""
    sensor = sensor_of(rapl(tmp_path, 900, range_uj=1000))
    assert sensor.joules((900.0,), (50.0,), 1) == pytest.approx(150e-6)


def test_the_whole_platform_is_preferred(tmp_path: Path) -> None:
    sensor = sensor_of(rapl(tmp_path, 10_000_000, psys_uj=70_000_000))
    assert (sensor.source, sensor.read()) == ("rapl psys", (70_000_000.0,))


def test_counters_that_only_root_may_read_are_named() -> None:
    """As every Linux since 5.10 has them; asked by a process that is not root."""
    with tempfile.TemporaryDirectory() as folder:
        root = rapl(Path(folder), 10_000_000)
        counter = root / "sys/class/powercap/intel-rapl:0/energy_uj"
        counter.chmod(0o000)
        root.chmod(0o755)
        code = """
import os, sys
from pathlib import Path
from profiles.probes.power import find_power
if os.getuid() == 0:
    os.setuid(65534)
print(find_power(Path(sys.argv[1])))
"""
        done = run_child([sys.executable, "-c", code, str(root)], env={**os.environ})
    assert "(None," in done.stdout, done.stderr
    assert str(counter) in done.stdout
    assert "Permission denied" in done.stdout
    assert "docs/devices.md" in done.stdout
