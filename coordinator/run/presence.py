"""Which devices are here: hellos, last wills, and two devices that claim one name."""

import math
import time
from dataclasses import dataclass

from fedvit.wire.messages import DeviceState, Hello

LONGEST_REST_S = 86400.0
"""A device that declines is asked again after a day, whatever it said."""

CRASH_REST_S = 60.0
LONGEST_CRASH_REST_S = 3600.0
HELLO_ASKED_EVERY_S = 5.0
"""A device that speaks, and is taken to be offline, is asked to say hello at most so often."""


@dataclass
class Device:
    """What is known of a device that said hello."""

    name: str
    hello: Hello
    online: bool = True
    left_at: float | None = None  # monotonic; None: it is here, or was sent away
    rests_until: float = -math.inf  # it declined: not asked before, on this process's monotonic clock
    rests_because: str = ""
    crashes: int = 0  # tasks in a row that ended since its process did, again and again
    asked_at: float = -math.inf  # when it was asked for a hello, since it was taken to be offline and spoke

    def rests(self) -> bool:
        return time.monotonic() < self.rests_until


class Presence:
    """All devices that were accepted since this process began."""

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}

    def __getitem__(self, name: str) -> Device:
        return self._devices[name]

    def __contains__(self, name: str) -> bool:
        return name in self._devices

    def names(self) -> set[str]:
        """Of all that said hello to this process."""
        return set(self._devices)

    def online(self) -> list[str]:
        return sorted(name for name, device in self._devices.items() if device.online)

    def count_online(self) -> int:
        return sum(device.online for device in self._devices.values())

    def available(self) -> list[str]:
        """Devices that can be asked: online, and not resting."""
        return [name for name in self.online() if not self._devices[name].rests()]

    def resting(self) -> list[Device]:
        """Devices that are online, but are not asked for a while."""
        return [self._devices[name] for name in self.online() if self._devices[name].rests()]

    def rest(self, name: str, reason: str, seconds: float) -> None:
        """The device declined: it is not asked for so long."""
        if name in self._devices:
            bounded_s = min(seconds, LONGEST_REST_S) if math.isfinite(seconds) else LONGEST_REST_S
            self._devices[name].rests_until = time.monotonic() + bounded_s
            self._devices[name].rests_because = reason

    def crashed(self, name: str, reason: str) -> float:
        """Its process ended at a task too often: the device is asked again after a rest, which doubles every time.

        Returns the rest in seconds.
        """
        device = self._devices[name]
        device.crashes += 1
        rest_s = min(LONGEST_CRASH_REST_S, CRASH_REST_S * 2.0 ** (device.crashes - 1))
        self.rest(name, reason, rest_s)
        return rest_s

    def finished(self, name: str) -> None:
        """The device brought a result."""
        if name in self._devices:
            self._devices[name].crashes = 0

    def is_online(self, name: str) -> bool:
        return name in self._devices and self._devices[name].online

    def is_thought_offline(self, name: str) -> bool:
        """Whether a device that just spoke is known, but not to be here: then its hello is asked for, now and then."""
        known = self._devices.get(name)
        if known is None or known.online or time.monotonic() < known.asked_at + HELLO_ASKED_EVERY_S:
            return False
        known.asked_at = time.monotonic()
        return True

    def may_return(self, grace_s: float) -> list[str]:
        """Devices that went offline so recently that they may well come back."""
        since = time.monotonic() - grace_s
        return [name for name, device in self._devices.items() if device.left_at is not None and device.left_at > since]

    def rival(self, name: str, hello: Hello) -> Device | None:
        """The device that already has this name and is alive, if it is another process."""
        known = self._devices.get(name)
        return known if known and known.online and known.hello.instance != hello.instance else None

    def arrived(self, name: str, hello: Hello) -> None:
        known = self._devices.get(name)
        self._devices[name] = Device(name, hello)
        if known and known.crashes:
            self._devices[name].crashes = known.crashes
            self._devices[name].rests_until, self._devices[name].rests_because = known.rests_until, known.rests_because
        if known and known.hello.instance == hello.instance:  # it only says hello again: what it said holds
            self._devices[name].rests_until = known.rests_until
            self._devices[name].rests_because = known.rests_because

    def state_changed(self, name: str, state: DeviceState) -> bool:
        """A last will or a farewell; False when it is not from the process that is known by this name, or is about a
        connection before the one over which the device said hello last."""
        known = self._devices.get(name)
        if known is None or known.hello.instance != state.instance or known.online == state.online:
            return False
        if state.connection < known.hello.connection:
            return False
        known.online = state.online
        known.left_at = None if state.online else time.monotonic()
        return True

    def dismiss(self, name: str) -> None:
        """The device was told that it cannot take part: it is not asked again until it says hello."""
        self._devices[name].online = False
        self._devices[name].left_at = None

    def all_offline(self) -> None:
        """Our own link broke: nobody is known to be there until it says hello again."""
        for device in self._devices.values():
            if device.online:
                device.online, device.left_at = False, time.monotonic()
