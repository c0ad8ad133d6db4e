"""The run that each device of a service belongs to: the first that selects it and has not refused it."""

from collections.abc import Callable
from typing import NamedTuple

from coordinator.config import why_not_asked
from coordinator.rounds.presence import Presence
from fedvit.transport.base import Received, Transport
from fedvit.wire.messages import DeviceState, Hello, encode
from fedvit.wire.topics import Topics

NO_WORK = "no run has work for it now"


class RunLink(Transport):
    """The link of one run, which selects devices by their labels."""

    run: str
    devices_where: str


class RoutedDevice(NamedTuple):
    """A device that has sent a hello to this process."""

    device: str
    labels: dict[str, str]
    online: bool
    run: str | None


class Assignment:
    """The state of one device, apart from its presence."""

    def __init__(self, hello: Hello, event: Received) -> None:
        self.hello = hello
        self.event = event  # the message with the hello
        self.owner: RunLink | None = None
        self.refused: dict[str, str] = {}  # run -> reason of its refusal


class Assignments:
    """The devices by name, and the runs in the order in which devices are offered to them.

    `send_idle(device, hello, why)` sends a device the reasons why no run wants it.
    """

    def __init__(self, topics: Topics, presence: Presence, send_idle: Callable[[str, Hello, str], None]) -> None:
        self.runs: list[RunLink] = []
        self.devices: dict[str, Assignment] = {}
        self._topics = topics
        self._presence = presence
        self._send_idle = send_idle

    def list_devices(self) -> list[RoutedDevice]:
        return [
            RoutedDevice(
                name, entry.hello.labels, self._presence.is_online(name), entry.owner.run if entry.owner else None
            )
            for name, entry in sorted(self.devices.items())
        ]

    def add_run(self, transport: RunLink) -> None:
        self.runs.append(transport)
        self._offer_all()

    def remove_run(self, transport: RunLink) -> None:
        self.runs.remove(transport)
        for entry in self.devices.values():
            entry.refused.pop(transport.run, None)
            if entry.owner is transport:
                entry.owner = None
        self._offer_all()

    def reject(self, transport: RunLink, device: str, reason: str) -> None:
        """Offer a device that a run refused finally to the others."""
        entry = self.devices.get(device)
        if entry and entry.owner is transport:
            entry.owner = None
            entry.refused[transport.run] = reason
            self._offer(device)

    def assign(self, device: str, hello: Hello, event: Received) -> None:
        """Assign a device that has sent a hello: to its run of before, if that still selects it."""
        before = self.devices.get(device)
        entry = self.devices[device] = Assignment(hello, event)
        if before and before.owner and self._why_not(before.owner, entry) is None:
            entry.owner = before.owner
            entry.owner.inbox.put(event)
            return
        if before and before.owner:  # its labels have changed
            left = encode(DeviceState(hello.instance, online=False))
            before.owner.inbox.put(Received(self._topics.device_state(device), left))
        self._offer(device)

    def _offer_all(self) -> None:
        for device, entry in self.devices.items():
            if entry.owner is None and self._presence.is_online(device):
                self._offer(device)

    def _offer(self, device: str) -> None:
        """Assign a device to the first run that selects it; otherwise tell it the reasons."""
        entry, reasons = self.devices[device], []
        for transport in self.runs:
            why = self._why_not(transport, entry)
            if why is None:
                entry.owner = transport
                transport.inbox.put(entry.event)
                return
            reasons.append(f"run {transport.run}: {why}")
        self._send_idle(device, entry.hello, "; ".join(reasons)[:1000] or NO_WORK)

    def _why_not(self, transport: RunLink, entry: Assignment) -> str | None:
        if transport not in self.runs:
            return "it has ended"
        return entry.refused.get(transport.run) or why_not_asked(transport.devices_where, entry.hello.labels)
