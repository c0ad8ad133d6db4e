"""Presence of devices: hellos, last wills, and two devices with the same name."""

import math
import time
from collections import Counter
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field
from typing import NamedTuple

from fedvit.wire.messages import DeviceState, Hello

LONGEST_BACKOFF_S = 86400.0
"""A device that declines is asked again after a day at the latest, whatever it requested."""

CRASH_BACKOFF_S = 60.0
LONGEST_CRASH_BACKOFF_S = 3600.0
HELLO_REQUEST_INTERVAL_S = 5.0
"""Shortest interval between two requests for the hello of a device that is believed offline but sends messages."""
HELLOS_PER_S = 500.0
LEAST_SPREAD_S = 1.0
LONGEST_SPREAD_S = 60.0


def hello_spread_s(devices: int) -> float:
    """The time over which a fleet of this size sends its hellos, or returns to its broker.

    >>> hello_spread_s(10), hello_spread_s(10_000)
    (1.0, 20.0)
    """
    return min(LONGEST_SPREAD_S, max(LEAST_SPREAD_S, devices / HELLOS_PER_S))


@dataclass
class DeviceBackoff:
    """The time for which a device is not asked, because it declined or crashed."""

    until: float = -math.inf  # monotonic
    reason: str = ""
    crashes: int = 0  # tasks in a row that were given up because its process ended repeatedly

    def is_on(self) -> bool:
        return time.monotonic() < self.until

    def begin(self, reason: str, seconds: float) -> None:
        """Do not ask the device for this time, which may be infinite: it is bounded."""
        bounded_s = min(seconds, LONGEST_BACKOFF_S) if math.isfinite(seconds) else LONGEST_BACKOFF_S
        self.until, self.reason = time.monotonic() + bounded_s, reason

    def count_crash(self, reason: str) -> float:
        """Begin a backoff that doubles with every crash in a row; return its seconds."""
        self.crashes += 1
        backoff_s = min(LONGEST_CRASH_BACKOFF_S, CRASH_BACKOFF_S * 2.0 ** (self.crashes - 1))
        self.begin(reason, backoff_s)
        return backoff_s


@dataclass
class PresentDevice:
    """The state of a device that has sent a hello."""

    name: str
    hello: Hello
    left_at: float | None = None  # monotonic; None: it is online, or was sent away
    backoff: DeviceBackoff = field(default_factory=DeviceBackoff)
    hello_requested_at: float = -math.inf  # monotonic; last request for its hello


class Rival(NamedTuple):
    """A second process with the name of a device that is online."""

    reason: str  # to refuse it
    news: str  # a line for the operator, at the first refusal of this name; else empty


class Presence:
    """All devices that were admitted since this process began."""

    def __init__(self) -> None:
        self._with_rivals: set[str] = set()  # names that a second process claimed
        self._devices: dict[str, PresentDevice] = {}
        self._online: set[str] = set()
        self._classes: Counter[str] = Counter()  # how many devices that are online have each class
        self.changes = 0
        """Counts arrivals and departures."""

    def __iter__(self) -> Iterator[PresentDevice]:
        """Iterate over a copy, in any thread."""
        return iter(list(self._devices.values()))

    def __getitem__(self, name: str) -> PresentDevice:
        return self._devices[name]

    def __contains__(self, name: str) -> bool:
        return name in self._devices

    def online(self) -> list[str]:
        return sorted(self._online)

    def __len__(self) -> int:
        return len(self._devices)

    def count_online(self) -> int:
        return len(self._online)

    def classes(self) -> KeysView[str]:
        """Classes of the devices that are online."""
        return self._classes.keys()

    def available(self) -> list[str]:
        """Devices that can be asked: online, and not in a backoff."""
        return [name for name in self.online() if not self._devices[name].backoff.is_on()]

    def backing_off(self) -> list[PresentDevice]:
        """Devices that are online but in a backoff."""
        return [self._devices[name] for name in self.online() if self._devices[name].backoff.is_on()]

    def is_online(self, name: str) -> bool:
        return name in self._online

    def should_request_hello(self, name: str) -> bool:
        """Return whether to request the hello of a device that just sent a message: it counts as offline, and was not
        asked recently."""
        known = self._devices.get(name)
        if (
            known is None
            or name in self._online
            or time.monotonic() < known.hello_requested_at + HELLO_REQUEST_INTERVAL_S
        ):
            return False
        known.hello_requested_at = time.monotonic()
        return True

    def seen_since(self, at: float) -> dict[str, float]:
        """Return when devices were last seen, in monotonic time: now if they are online; not those that left before
        `at`."""
        now = time.monotonic()
        left = {device.name: device.left_at for device in self if device.left_at and device.left_at >= at}
        return left | dict.fromkeys(self._online, now)

    def may_return(self, grace_s: float) -> list[str]:
        """Devices that went offline within the grace period, and may return."""
        since = time.monotonic() - grace_s
        return [name for name, device in self._devices.items() if device.left_at is not None and device.left_at > since]

    def find_rival(self, name: str, hello: Hello) -> Rival | None:
        """Return the reason to refuse a device while another process with its name is online; None if there is none."""
        known = self._devices.get(name)
        if known is None or name not in self._online or known.hello.instance == hello.instance:
            return None
        host, new = known.hello.profile.host, hello.profile.host
        reason = f"a device with id {name!r} is online already (on {host}); choose another with --id"
        news = f"a second device with id {name!r} (on {new!r}) was refused: the first one is online (on {host!r})"
        is_known = name in self._with_rivals
        self._with_rivals.add(name)
        return Rival(reason, "" if is_known else news)

    def arrived(self, name: str, hello: Hello) -> None:
        known = self._devices.get(name)
        self._leave(name)
        device = self._devices[name] = PresentDevice(name, hello)
        self._online.add(name)
        self._classes.update(hello.classes)
        self.changes += 1
        if known and (known.backoff.crashes or known.hello.instance == hello.instance):  # it still holds
            device.backoff = known.backoff

    def state_changed(self, name: str, state: DeviceState) -> bool:
        """Handle a last will or a farewell; False if it is from another process, or about an older connection than that
        of the last hello."""
        known = self._devices.get(name)
        if known is None or state.online or known.hello.instance != state.instance or name not in self._online:
            return False
        if state.connection < known.hello.connection:
            return False
        self.changes += 1
        self._leave(name)
        known.left_at = time.monotonic()
        return True

    def dismiss(self, name: str) -> None:
        """The device was refused: it counts as offline until its next hello."""
        self.changes += 1
        self._leave(name)
        self._devices[name].left_at = None

    def all_offline(self) -> None:
        """Our own link broke: every device counts as offline until its next hello."""
        self.changes += 1
        for name in self._online:
            self._devices[name].left_at = time.monotonic()
        self._online.clear()
        self._classes.clear()

    def _leave(self, name: str) -> None:
        if name in self._online:
            self._online.remove(name)
            self._classes -= Counter(self._devices[name].hello.classes)
