"""The charge of a device's battery. No battery is None, never 0, as most boards have a power supply."""

from pathlib import Path

from msgspec import Struct

from profiles.probes.kernel import ROOT, read_int, read_text


class Battery(Struct, frozen=True):
    """All batteries of a device together."""

    percent: int  # of the emptiest
    charging: bool  # or full, or a charger is connected


def battery(root: Path = ROOT) -> Battery | None:
    """Read the kernel's power supplies; those of a mouse or a pen (scope Device) do not count.

    Source: the kernel's documentation, ABI/testing/sysfs-class-power.
    """
    supplies = sorted((root / "sys/class/power_supply").glob("*"))
    own = [supply for supply in supplies if read_text(supply / "scope") != "Device"]
    batteries = [supply for supply in own if read_text(supply / "type") == "Battery"]
    percents = [percent for supply in batteries if (percent := read_int(supply / "capacity")) is not None]
    if not percents:
        return None
    charging = any(read_text(supply / "status") in ("Charging", "Full") for supply in batteries)
    plugged = any(read_int(supply / "online") == 1 for supply in own if supply not in batteries)
    return Battery(min(percents), charging or plugged)
