"""Measures a task beside time and memory: energy, temperature, and throttling."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from profiles.probes.kernel import ROOT
from profiles.probes.power import PowerSensor, Reading, find_power
from profiles.probes.thermal import Brakes, Slowing, Thermometer

SAMPLE_EVERY_S = 1.0


@dataclass(frozen=True)
class Sensors:
    """The sensors of a device, found once."""

    thermometer: Thermometer
    brakes: Brakes
    power: PowerSensor | None
    no_power: str | None  # why there is no power sensor
    root: Path = ROOT  # of the kernel's files, where a battery is found

    @classmethod
    def find(cls, root: Path = ROOT) -> Self:
        power, why = find_power(root)
        return cls(Thermometer(root), Brakes(root), power, why, root)


class Metered(NamedTuple):
    """None: not measured."""

    energy_j: float | None
    energy_source: str | None
    temperature_c: float | None  # the highest
    throttled: bool | None


class Meter:
    """Reads the sensors once a second between `__enter__` and `__exit__`.

    Power is integrated over the samples; of counters the differences are added up. `celsius` is the newest
    temperature.
    """

    def __init__(self, sensors: Sensors, every_s: float = SAMPLE_EVERY_S) -> None:
        self._sensors = sensors
        self._every_s = every_s
        self.celsius: float | None = None
        self._highest_c: float | None = None
        self._energy_j: float | None = None
        self._last: tuple[float, Reading] | None = None
        self._first_slowing: Slowing | None = None
        self._throttled: bool | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="meter", daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._sample()

    def finish(self) -> Metered:
        """Until now, with a last look at the sensors."""
        self._sample()
        source = self._sensors.power.source if self._sensors.power and self._energy_j is not None else None
        return Metered(self._energy_j, source, self._highest_c, self._throttled)

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            self._sample_power()
            self._sample_heat()

    def _sample_power(self) -> None:
        power, now = self._sensors.power, time.monotonic()
        if power is None or (reading := power.read()) is None:
            return
        if self._last is not None:
            then, before = self._last
            self._energy_j = (self._energy_j or 0.0) + power.joules(before, reading, now - then)
        self._last = (now, reading)

    def _sample_heat(self) -> None:
        self.celsius = self._sensors.thermometer.celsius()
        if self.celsius is not None:
            self._highest_c = max(self.celsius, self._highest_c or self.celsius)
        slowing = self._sensors.brakes.read()
        if slowing is None:
            return
        self._first_slowing = self._first_slowing or slowing
        new = slowing.since_start - self._first_slowing.since_start
        self._throttled = bool(self._throttled or slowing.now or new)
