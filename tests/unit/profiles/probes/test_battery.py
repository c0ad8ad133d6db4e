"""How full a battery is; files as the kernel's power supplies have them."""

from pathlib import Path

import pytest

from profiles.probes.battery import Battery, battery
from tests.support.boards import pi_5, write_tree

SUPPLY = "sys/class/power_supply"


def laptop(root: Path, status: str = "Discharging", online: int = 0) -> Path:
    return write_tree(
        root,
        {
            f"{SUPPLY}/BAT0/type": "Battery\n",
            f"{SUPPLY}/BAT0/capacity": "57\n",
            f"{SUPPLY}/BAT0/status": f"{status}\n",
            f"{SUPPLY}/AC/type": "Mains\n",
            f"{SUPPLY}/AC/online": f"{online}\n",
        },
    )


def test_a_board_on_a_plug_has_none(tmp_path: Path) -> None:
    assert battery(pi_5(tmp_path)) is None


@pytest.mark.parametrize(
    ("status", "online", "charging"),
    [("Discharging", 0, False), ("Charging", 1, True), ("Full", 0, True), ("Not charging", 1, True)],
)
def test_a_laptop(tmp_path: Path, status: str, online: int, charging: bool) -> None:
    assert battery(laptop(tmp_path, status, online)) == Battery(57, charging)


def test_that_of_a_mouse_does_not_count(tmp_path: Path) -> None:
    mouse = {"type": "Battery\n", "scope": "Device\n", "capacity": "3\n", "status": "Discharging\n"}
    write_tree(laptop(tmp_path), {f"{SUPPLY}/hidpp_battery_0/{name}": text for name, text in mouse.items()})
    assert battery(tmp_path) == Battery(57, False)
