"""The power of a device, from the sensor that it has. A kind of sensor is a class here and a line in SENSORS.

No sensor is None, never 0: a Raspberry Pi 4, 3 or Zero has none.
"""

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from profiles.probes.kernel import ROOT, read_int, read_text, run

Reading = tuple[float, ...]
"""A reading of a sensor; the meaning of the numbers depends on the sensor."""


class PowerSensor(ABC):
    """A kind of power sensor."""

    source: str  # the sensor and the rail, for people

    @classmethod
    @abstractmethod
    def find(cls, root: Path) -> Self | None:
        """None where the device has no such sensor. Raises PermissionError where it has one that may not be read."""

    @abstractmethod
    def read(self) -> Reading | None:
        """None when it does not answer."""

    @abstractmethod
    def joules(self, before: Reading, after: Reading, seconds: float) -> float:
        """The energy between two readings that are `seconds` apart."""


class _Watts(PowerSensor):
    """Sensors that say the power of a moment: between two readings it is taken as a straight line."""

    def joules(self, before: Reading, after: Reading, seconds: float) -> float:
        return (sum(before) + sum(after)) / 2 * seconds


class JetsonRails(_Watts):
    """The INA3221 monitors of a Jetson, by their rail of the whole board, else by the sum of all rails.

    Two layouts: hwmon (JetPack 5 and later: mV and mA, label in inN_label) and iio (JetPack 4: mW, rail_name_N).
    Source: the kernel's hwmon and iio drivers; rail names as in NVIDIA's Jetson Linux developer guide.
    """

    TOTAL = ("VDD_IN", "POM_5V_IN")
    IGNORED = ("NC", "sum of shunt voltages")

    def __init__(self, rails: dict[str, list[tuple[Path, ...]]]) -> None:
        total = next((name for name in self.TOTAL if name in rails), None)
        self._rails = rails[total] if total else [files for same in rails.values() for files in same]
        self.source = f"ina3221 {total or 'sum of rails'}"

    @classmethod
    def find(cls, root: Path) -> Self | None:
        drivers = root / "sys/bus/i2c/drivers"
        rails: dict[str, list[tuple[Path, ...]]] = {}
        for label in sorted(drivers.glob("ina3221*/*/hwmon/hwmon*/in*_label")):
            number = label.name.removeprefix("in").removesuffix("_label")
            files = (label.parent / f"in{number}_input", label.parent / f"curr{number}_input")
            cls._add(rails, read_text(label), files)
        for label in sorted(drivers.glob("ina3221*/*/iio:device*/rail_name_*")):
            number = label.name.removeprefix("rail_name_")
            cls._add(rails, read_text(label), (label.parent / f"in_power{number}_input",))
        return cls(rails) if rails else None

    @classmethod
    def _add(cls, rails: dict[str, list[tuple[Path, ...]]], name: str | None, files: tuple[Path, ...]) -> None:
        if name and name not in cls.IGNORED and all(file.is_file() for file in files):
            rails.setdefault(name, []).append(files)

    def read(self) -> Reading | None:
        watts: list[float] = []
        for files in self._rails:
            numbers = [number for file in files if (number := read_int(file)) is not None]
            if len(numbers) < len(files):
                return None
            # mV times mA are microwatts; alone it is milliwatts
            watts.append(numbers[0] * numbers[1] / 1e6 if len(numbers) == 2 else numbers[0] / 1e3)
        return tuple(watts)


class RaspberryPmic(_Watts):
    """The power management chip of a Raspberry Pi 5, by `vcgencmd pmic_read_adc`: volts and amperes of each rail.

    It does not see what USB and PCIe consume; SCALE and OFFSET_W fit its sum to a meter at the plug.
    Source of the fit: a published comparison of the Pi 5's own figures with a USB power meter.
    """

    SCALE, OFFSET_W = 1.1451, 0.5879

    source = "pmic_read_adc"

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def find(cls, root: Path) -> Self | None:
        sensor = cls(root)
        return sensor if sensor.read() else None

    def read(self) -> Reading | None:
        reading = run(self._root, "vcgencmd", "pmic_read_adc") or ""
        rails: dict[str, dict[str, float]] = {}
        for rail, kind, value in re.findall(r"(\S+)_([AV])\s+(?:current|volt)\(\d+\)=([\d.]+)[AV]", reading):
            rails.setdefault(rail, {})[kind] = float(value)
        watts = [found["A"] * found["V"] for found in rails.values() if len(found) == 2]
        return (sum(watts) * self.SCALE + self.OFFSET_W,) if watts else None


class Rapl(PowerSensor):
    """The energy counters of x86 processors: the whole platform where there is one, else all processor packages.

    A package is the processor alone, without memory, disk and power supply. Counters wrap.
    Source: the kernel's documentation of powercap; since Linux 5.10 only root may read them (CVE-2020-8694).
    """

    def __init__(self, domains: list[tuple[str, Path]]) -> None:
        platform = [(name, folder) for name, folder in domains if name == "psys"]
        used = platform or [(name, folder) for name, folder in domains if name.startswith("package")]
        self._counters = [folder / "energy_uj" for _, folder in used]
        self._ranges = [read_int(folder / "max_energy_range_uj") or 0 for _, folder in used]
        self.source = f"rapl {'psys' if platform else 'package'}"

    @classmethod
    def find(cls, root: Path) -> Self | None:
        folders = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        domains = [(read_text(folder / "name") or "", folder) for folder in folders if folder.name.count(":") == 1]
        sensor = cls(domains)
        if not sensor._counters:
            return None
        for counter in sensor._counters:
            counter.read_text()  # raises PermissionError
        return sensor

    def read(self) -> Reading | None:
        values = [read_int(counter) for counter in self._counters]
        return tuple(value for value in values if value is not None) if None not in values else None

    def joules(self, before: Reading, after: Reading, seconds: float) -> float:
        differences = (
            now - then if now >= then else now - then + most
            for then, now, most in zip(before, after, self._ranges, strict=True)
        )
        return sum(differences) / 1e6


SENSORS: tuple[type[PowerSensor], ...] = (JetsonRails, RaspberryPmic, Rapl)
"""The first that is there is used."""


def find_power(root: Path = ROOT) -> tuple[PowerSensor | None, str | None]:
    """The sensor of this device, or the reason why there is none."""
    for kind in SENSORS:
        try:
            if sensor := kind.find(root):
                return sensor, None
        except OSError as error:
            return None, f"{error.filename} may not be read ({error.strerror}); docs/devices.md says how to allow it"
    return None, "no sensor of a kind that is known here"
