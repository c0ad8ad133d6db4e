"""The temperature of a device, and whether its processor is throttled. Absent is None, never 0.

A source of throttling information is a class here and a line in BRAKES.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from msgspec import Struct

from profiles.probes.kernel import ROOT, read_int, read_text, run

# --- temperature --------------------------------------------------------------------------------------


class Zone(Struct, frozen=True):
    """One temperature sensor."""

    name: str
    celsius: float


_PROCESSOR = re.compile(r"cpu|pkg|soc|tj|gpu|ao-therm|coretemp|k10temp|zenpower|bcm2835", re.IGNORECASE)
_NO_PROCESSOR = re.compile(r"pmic|wifi|iwl|ath\d|bat|nvme|fan|charg", re.IGNORECASE)
"""A Jetson's PMIC-Die always says 50 or 100; the others are not what training heats."""
_HWMON = ("coretemp", "k10temp", "zenpower")
"""Drivers of x86 processors that make no thermal zone."""


class Thermometer:
    """The sensors of a device, found once and read again and again."""

    def __init__(self, root: Path = ROOT) -> None:
        zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
        named = [(read_text(zone / "type") or zone.name, zone / "temp") for zone in zones]
        for monitor in sorted((root / "sys/class/hwmon").glob("hwmon*")):
            if (name := read_text(monitor / "name")) in _HWMON:
                named.append((str(name), monitor / "temp1_input"))
        usable = [(name, path) for name, path in named if not _NO_PROCESSOR.search(name)]
        # where sensors of the processor are known, others (an ACPI zone that never changes) do not count
        self._files = [(name, path) for name, path in usable if _PROCESSOR.search(name)] or usable

    def zones(self) -> tuple[Zone, ...]:
        """Every sensor that answers now."""
        read = [(name, read_int(path)) for name, path in self._files]
        return tuple(Zone(name, value / 1000) for name, value in read if value is not None)

    def celsius(self) -> float | None:
        """The hottest sensor of the processor."""
        return max((zone.celsius for zone in self.zones()), default=None)


# --- slowing down -------------------------------------------------------------------------------------


class Slowing(NamedTuple):
    """Causes of throttling, now and since the device was started."""

    now: frozenset[str]
    since_start: frozenset[str]


class Brake(ABC):
    """A source of throttling information."""

    @classmethod
    @abstractmethod
    def find(cls, root: Path) -> Self | None:
        """None where the device has no such thing."""

    @abstractmethod
    def read(self) -> Slowing | None:
        """None when it does not answer."""


class RaspberryFirmware(Brake):
    """`vcgencmd get_throttled`. Bits 0 to 3 are now, 16 to 19 since the start.

    Under-voltage counts: an under-volted 3B+ was seen to run at 600 MHz while it reported 1400.
    Source: the firmware's documentation; github.com/ThomasKaiser/sbc-bench on under-voltage.
    """

    BITS = ("under-voltage", "frequency capped", "throttled", "soft temperature limit")

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def find(cls, root: Path) -> Self | None:
        brake = cls(root)
        return brake if brake.read() else None

    def read(self) -> Slowing | None:
        found = re.fullmatch(r"throttled=0x([0-9a-fA-F]+)", run(self._root, "vcgencmd", "get_throttled") or "")
        if found is None:
            return None
        bits = int(found[1], 16)
        now = frozenset(name for bit, name in enumerate(self.BITS) if bits >> bit & 1)
        return Slowing(now, frozenset(name for bit, name in enumerate(self.BITS) if bits >> (16 + bit) & 1))


class CoolingDevices(Brake):
    """The kernel's cooling devices that act on clocks; fans and displays cool without slowing anything down."""

    _CLOCKS = re.compile(r"cpufreq|processor|devfreq|powerclamp|throttle", re.IGNORECASE)

    def __init__(self, devices: list[tuple[str, Path]]) -> None:
        self._devices = devices

    @classmethod
    def find(cls, root: Path) -> Self | None:
        folders = sorted((root / "sys/class/thermal").glob("cooling_device*"))
        named = [(read_text(folder / "type") or "", folder / "cur_state") for folder in folders]
        devices = [(name, path) for name, path in named if cls._CLOCKS.search(name)]
        return cls(devices) if devices else None

    def read(self) -> Slowing | None:
        states = [(name, read_int(path)) for name, path in self._devices]
        if all(state is None for _, state in states):
            return None
        return Slowing(frozenset(f"{name} cools" for name, state in states if state and state > 0), frozenset())


class IntelCounters(Brake):
    """An Intel processor's counts of throttling since the start; a higher count is a new mark."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    @classmethod
    def find(cls, root: Path) -> Self | None:
        pattern = "cpu[0-9]*/thermal_throttle/*_throttle_count"
        files = sorted((root / "sys/devices/system/cpu").glob(pattern))
        return cls(files) if files else None

    def read(self) -> Slowing | None:
        counts = [count for file in self._files if (count := read_int(file)) is not None]
        if not counts:
            return None
        marks = {f"throttled {max(counts)} times"} if max(counts) else set()
        return Slowing(frozenset(), frozenset(marks))


BRAKES: tuple[type[Brake], ...] = (RaspberryFirmware, CoolingDevices, IntelCounters)


class Brakes:
    """All brakes of a device together."""

    def __init__(self, root: Path = ROOT) -> None:
        self._found = [brake for kind in BRAKES if (brake := kind.find(root))]

    def read(self) -> Slowing | None:
        """None where nothing can be known."""
        read = [slowing for brake in self._found if (slowing := brake.read())]
        if not read:
            return None
        return Slowing(
            frozenset().union(*(slowing.now for slowing in read)),
            frozenset().union(*(slowing.since_start for slowing in read)),
        )


# --- clocks -------------------------------------------------------------------------------------------


class Clock(Struct, frozen=True):
    """Cores with the same limits. `now_hz` is the highest of them, as the driver reports it."""

    cores: int
    governor: str | None
    now_hz: float | None
    allowed_hz: float | None  # by the power mode, the user or the cooling
    max_hz: float | None


def clocks(root: Path = ROOT) -> tuple[Clock, ...]:
    """The kinds of cores that cpufreq knows; empty where it knows none."""
    kinds: dict[tuple[str | None, float | None, float | None], list[float | None]] = {}
    for folder in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq")):
        now, allowed, most = _frequencies(folder)
        kinds.setdefault((read_text(folder / "scaling_governor"), allowed, most), []).append(now)
    return tuple(
        Clock(len(now), governor, max((one for one in now if one is not None), default=None), allowed, most)
        for (governor, allowed, most), now in kinds.items()
    )


def _frequencies(folder: Path) -> Iterator[float | None]:
    for name in ("scaling_cur_freq", "scaling_max_freq", "cpuinfo_max_freq"):
        value = read_int(folder / name)
        yield None if value is None else value * 1000.0
