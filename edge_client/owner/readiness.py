"""Whether this device starts a task now: it may be too hot, low on battery, or in use by its owner.

A device that is not ready declines, and is asked again later. A running task is monitored by the guard.
"""

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedvit.errors import ConfigError
from profiles.probes.battery import Battery, battery
from profiles.probes.thermal import Thermometer

HOT_AGAIN_S = 120.0
BUSY_AGAIN_S = 60.0
BATTERY_AGAIN_S = 900.0


class NotNow(NamedTuple):
    """Why a device declines, and the time after which it may be asked again."""

    reason: str
    again_s: float


class Hours(NamedTuple):
    """A part of each day by the device's own clock; it may span midnight."""

    first: datetime.time
    end: datetime.time

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Raises ConfigError.

        >>> Hours.parse("22:00-06:30").end
        datetime.time(6, 30)
        """
        found = re.fullmatch(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", text.strip())
        try:
            if found is None:
                raise ValueError
            numbers = [int(number) for number in found.groups()]
            hours = cls(datetime.time(numbers[0], numbers[1]), datetime.time(numbers[2], numbers[3]))
        except ValueError:
            raise ConfigError(f"quiet hours {text!r} must be written HH:MM-HH:MM, as in 22:00-06:30") from None
        if hours.first == hours.end:
            raise ConfigError(f"quiet hours {text!r}: start and end are equal")
        return hours

    def left_s(self, now: datetime.datetime) -> float:
        """Seconds until they end; 0 outside of them."""
        time = now.time()
        inside = self.first <= time < self.end if self.first < self.end else time >= self.first or time < self.end
        if not inside:
            return 0.0
        end = datetime.datetime.combine(now.date(), self.end, now.tzinfo)
        if end <= now:
            end += datetime.timedelta(days=1)
        return (end - now).total_seconds()


def _hottest() -> float | None:
    return Thermometer().celsius()


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """The conditions for starting a task. None: no condition. A value that cannot be measured never declines a task."""

    most_celsius: float | None = None
    least_battery: int | None = None  # percent, while no charger is connected
    busy_file: Path | None = None  # while it exists the device is in use by its owner
    quiet_hours: Hours | None = None
    celsius: Callable[[], float | None] = _hottest
    battery: Callable[[], Battery | None] = battery
    clock: Callable[[], datetime.datetime] = datetime.datetime.now

    def not_now(self) -> NotNow | None:
        """Why a task cannot start now; None if it can."""
        if self.busy_file is not None and self.busy_file.exists():
            return NotNow(f"busy: {self.busy_file} exists", BUSY_AGAIN_S)
        if self.quiet_hours and (left_s := self.quiet_hours.left_s(self.clock())):
            return NotNow(f"quiet hours until {self.quiet_hours.end:%H:%M}", left_s)
        if self.most_celsius is not None:
            celsius = self.celsius()
            if celsius is not None and celsius > self.most_celsius:
                return NotNow(f"hot: {celsius:.0f} C, tasks start at or below {self.most_celsius:.0f} C", HOT_AGAIN_S)
        if self.least_battery is not None:
            state = self.battery()
            if state is not None and not state.charging and state.percent < self.least_battery:
                return NotNow(f"low battery: {state.percent} %, tasks start at {self.least_battery} %", BATTERY_AGAIN_S)
        return None
