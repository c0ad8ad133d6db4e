"""The roster of a run on devices: the state of each device's connection, and who is excluded."""

from collections.abc import Iterable

from coordinator.rounds.ports import Roster
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.state import RunState


class DeviceRoster(Roster):
    """A roster of devices behind a broker."""

    def __init__(self, state: RunState, quarantine: Quarantine) -> None:
        self._state = state
        self._quarantine = quarantine

    def has_online(self) -> bool:
        return bool(self._state.presence.count_online())

    def online(self) -> list[str]:
        return self.admit(self._state.presence.online())

    def available(self) -> list[str]:
        return self.admit(self._state.presence.available())

    def at_work(self) -> list[str]:
        return [task.device for task in self._state.tasks]

    def admit(self, devices: Iterable[str]) -> list[str]:
        allowed = [device for device in devices if device not in self._state.revoked]
        return self._quarantine.admitted(allowed, self._state.number)

    def has_seen(self, device: str) -> bool:
        return device in self._state.presence

    def is_online(self, device: str) -> bool:
        return self._state.presence.is_online(device)

    def is_complete(self, patience_s: float) -> bool:
        return not self._state.presence.may_return(patience_s)

    def may_answer_later(self) -> bool:
        return bool(self._state.presence.backing_off())
