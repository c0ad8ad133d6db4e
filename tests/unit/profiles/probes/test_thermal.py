"""Heat and slowing down, on the file trees of named boards."""

from pathlib import Path

import pytest

from profiles.probes.thermal import BRAKES, Brakes, Clock, Thermometer, Zone, clocks
from tests.support.boards import agx_orin, jetson_nano, orin_nano, pi_4, pi_5, vcgencmd, write_command, write_tree, x86


def test_the_processor_of_a_pi(tmp_path: Path) -> None:
    thermometer = Thermometer(pi_4(tmp_path))
    assert thermometer.zones() == (Zone("cpu-thermal", 55.017),)
    assert thermometer.celsius() == 55.017


def test_a_thermometer_reads_anew(tmp_path: Path) -> None:
    thermometer = Thermometer(pi_4(tmp_path))
    write_tree(tmp_path, {"sys/class/thermal/thermal_zone0/temp": "81000\n"})
    assert thermometer.celsius() == 81.0


def test_the_hottest_of_a_jetson_without_what_does_not_answer(tmp_path: Path) -> None:
    """cv0-thermal is there, but its unit is off."""
    thermometer = Thermometer(orin_nano(tmp_path))
    assert [zone.name for zone in thermometer.zones()] == ["cpu-thermal", "gpu-thermal", "tj-thermal"]
    assert thermometer.celsius() == 52.5


def test_a_sensor_that_always_says_100_does_not_count(tmp_path: Path) -> None:
    """A Jetson Nano's PMIC-Die; its fan's estimate neither. The always-on zone is the hottest that counts."""
    assert Thermometer(jetson_nano(tmp_path)).celsius() == 41.5


def test_the_package_of_a_pc_counts_and_its_radio_does_not(tmp_path: Path) -> None:
    assert Thermometer(x86(tmp_path)).zones() == (Zone("x86_pkg_temp", 61.0),)


def test_a_processor_with_a_driver_of_its_own(tmp_path: Path) -> None:
    """AMD's make no thermal zone; a disk's sensor is not the processor's."""
    files = {
        "sys/class/hwmon/hwmon0/name": "nvme\n", "sys/class/hwmon/hwmon0/temp1_input": "70850\n",
        "sys/class/hwmon/hwmon1/name": "k10temp\n", "sys/class/hwmon/hwmon1/temp1_input": "44125\n",
    }  # fmt: skip
    assert Thermometer(write_tree(tmp_path, files)).celsius() == 44.125


def test_where_no_sensor_is_known_by_name_all_count(tmp_path: Path) -> None:
    files = {"sys/class/thermal/thermal_zone0/type": "acpitz\n", "sys/class/thermal/thermal_zone0/temp": "40000\n"}
    assert Thermometer(write_tree(tmp_path, files)).celsius() == 40.0


def test_nothing_to_read_is_none(tmp_path: Path) -> None:
    assert Thermometer(tmp_path).zones() == ()
    assert Thermometer(tmp_path).celsius() is None
    assert Brakes(tmp_path).read() is None
    assert clocks(tmp_path) == ()
    assert [kind.find(tmp_path) for kind in BRAKES] == [None] * len(BRAKES)


# --- slowing down -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "now", "since_start"),
    [
        ("0x0", set(), set()),
        ("0x1", {"under-voltage"}, set()),
        ("0x2", {"frequency capped"}, set()),
        ("0x4", {"throttled"}, set()),
        ("0x8", {"soft temperature limit"}, set()),
        ("0x20000", set(), {"frequency capped"}),  # bit 17, which some scripts take for 18
        ("0x40000", set(), {"throttled"}),
        ("0x50005", {"under-voltage", "throttled"}, {"under-voltage", "throttled"}),
        ("0xe0008", {"soft temperature limit"}, {"frequency capped", "throttled", "soft temperature limit"}),
    ],
)
def test_the_bits_of_a_raspberrys_firmware(tmp_path: Path, word: str, now: set[str], since_start: set[str]) -> None:
    slowing = Brakes(pi_5(tmp_path, throttled=word)).read()
    assert slowing is not None
    assert (set(slowing.now), set(slowing.since_start)) == (now, since_start)


def test_a_fan_slows_nothing_down(tmp_path: Path) -> None:
    """It runs at 2 on the Pi 5 and at 1 on the Orin."""
    for number, board in enumerate((pi_5, orin_nano)):
        slowing = Brakes(board(tmp_path / str(number))).read()
        assert slowing is not None
        assert not slowing.now


def test_a_cooling_device_that_acts_on_clocks_does(tmp_path: Path) -> None:
    root = orin_nano(tmp_path)
    brakes = Brakes(root)
    write_tree(root, {"sys/class/thermal/cooling_device1/cur_state": "3\n"})
    slowing = brakes.read()
    assert slowing is not None
    assert slowing.now == {"thermal-cpufreq-0 cools"}


def test_a_pc_counts_how_often_it_throttled(tmp_path: Path) -> None:
    """Idle: the power clamp says -1, and an offset that is set is no slowing down."""
    root = x86(tmp_path)
    brakes = Brakes(root)
    slowing = brakes.read()
    assert slowing is not None
    assert (slowing.now, slowing.since_start) == (frozenset(), frozenset())
    write_tree(root, {"sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_count": "12\n"})
    slowing = brakes.read()
    assert slowing is not None
    assert slowing.since_start == {"throttled 12 times"}


@pytest.mark.parametrize("script", ["exit 1", "echo 'VCHI initialization failed'", "sleep 60", "echo throttled=0x"])
def test_a_firmware_that_does_not_answer_is_not_measured(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has the command, but not the device behind it."""
    monkeypatch.setattr("profiles.probes.kernel.COMMAND_S", 0.3)
    write_command(tmp_path, "vcgencmd", f"exec {script}" if script.startswith("sleep") else script)
    assert Brakes(tmp_path).read() is None


def test_the_older_place_of_the_command(tmp_path: Path) -> None:
    vcgencmd(tmp_path, "0x4", None)
    (tmp_path / "opt/vc/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/vcgencmd").rename(tmp_path / "opt/vc/bin/vcgencmd")
    slowing = Brakes(tmp_path).read()
    assert slowing is not None
    assert slowing.now == {"throttled"}


# --- clocks -------------------------------------------------------------------------------------------


def test_clocks_by_kind_of_core(tmp_path: Path) -> None:
    assert clocks(pi_4(tmp_path / "pi")) == (Clock(4, "ondemand", 1.8e9, 1.8e9, 1.8e9),)
    [orin] = clocks(orin_nano(tmp_path / "orin"))
    assert (orin.allowed_hz, orin.max_hz) == (1.1904e9, 1.5104e9)
    assert clocks(agx_orin(tmp_path / "agx")) == ()
