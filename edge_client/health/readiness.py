"""The decision whether a device starts a task now: it may be too hot, low on battery, or in use by its owner.

A device that is not ready declines, and is asked again later. The guard monitors a running task.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from edge_client.storage.pause import OwnerPause
from fedvit.policy import Policy
from profiles.probes.battery import Battery, battery
from profiles.probes.thermal import Thermometer

HOT_AGAIN_S = 120.0
BUSY_AGAIN_S = 60.0
BATTERY_AGAIN_S = 900.0


class NotNow(NamedTuple):
    """The reason why a device declines, and the time after which it may be asked again."""

    reason: str
    again_s: float
    is_forbidden: bool = False  # by the owner's hours: the ledger notes it


def read_celsius() -> float | None:
    """Return the temperature of the hottest sensor."""
    return Thermometer().celsius()


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """The owner's conditions for starting a task. A value that cannot be measured never declines a task."""

    policy: Policy
    celsius: Callable[[], float | None] = read_celsius
    battery: Callable[[], Battery | None] = battery
    clock: Callable[[], datetime.datetime] = datetime.datetime.now
    pause: OwnerPause | None = None  # None: its owner cannot pause it

    def is_paused(self) -> bool:
        """Return True while the owner has paused the device."""
        return self.pause is not None and self.pause.is_on()

    def not_now(self) -> NotNow | None:
        """Return the reason why a task cannot start now; None if it can."""
        policy = self.policy.train
        if self.is_paused():
            return NotNow("paused by its owner", BUSY_AGAIN_S)
        if policy.busy_file is not None and policy.busy_file.exists():
            return NotNow(f"busy: {policy.busy_file} exists", BUSY_AGAIN_S)
        now = self.clock()
        if policy.quiet_hours and (left_s := policy.quiet_hours.remaining_s(now)):
            return NotNow(f"quiet hours until {policy.quiet_hours.end:%H:%M}", left_s, is_forbidden=True)
        if policy.hours and (left_s := policy.hours.others.remaining_s(now)):
            return NotNow(f"it trains at {policy.hours}", left_s, is_forbidden=True)
        if (limit_c := policy.max_temperature) is not None:
            celsius = self.celsius()
            if celsius is not None and celsius > limit_c:
                return NotNow(f"hot: {celsius:.0f} C, tasks start at or below {limit_c:.0f} C", HOT_AGAIN_S)
        if (percent := policy.min_battery) is not None:
            state = self.battery()
            if state is not None and not state.charging and state.percent < percent:
                return NotNow(f"low battery: {state.percent} %, tasks start at {percent} %", BATTERY_AGAIN_S)
        return None
