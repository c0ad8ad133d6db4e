"""The cohort of a simulation on torch: it trains and tests when it is asked."""

from collections.abc import Iterable

from coordinator.config import RunConfig
from coordinator.rounds.display import Display, View
from coordinator.rounds.open_round import Missing, OpenRound
from coordinator.rounds.ports import Roster, Trainer
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.tasks import Work
from fleet.engines.devices import DeviceEvaluation, DeviceResult, SimulatedDevices


class TorchTrainer(Roster, Trainer):
    """The devices of a run, of which each is asked in this process. `trained` and `tested` are the newest answers."""

    is_repeatable = False  # the same work gives the same numbers

    def __init__(self, config: RunConfig, devices: SimulatedDevices, quarantine: Quarantine, display: Display) -> None:
        self.trained: list[DeviceResult] = []
        self.tested: list[DeviceEvaluation] = []
        self.config = config
        self.devices = devices
        self.quarantine = quarantine
        self._display = display
        self.report = display.line
        self._number = 0

    def online(self) -> list[str]:
        return self.admit(self.devices.names())

    def admit(self, devices: Iterable[str]) -> list[str]:
        return self.quarantine.admitted(devices, self._number)

    def begin(self, number: int, *, is_new: bool) -> None:
        self._number = number

    def plan(self, devices: Iterable[str]) -> dict[str, Work]:
        return {device: self.devices.plan(device, self._number, self.devices.program) for device in devices}

    def offer(self, opened: OpenRound, devices: Iterable[str]) -> None:
        cohort, of_rounds = list(devices), f"round {opened.number}/{self.config.rounds}"
        self.show(f"{of_rounds}: {len(cohort)} devices {'train' if opened.kind == 'train' else 'test'}")
        if opened.kind == "train":
            self.trained = self.devices.train(opened.number, {device: opened.work[device] for device in cohort})
            for device in [one.device for one in self.trained if one.failure]:
                opened.fail(device, Missing.FAILED)
        else:
            self.tested = self.devices.test(opened.number, cohort)
        for device in opened.waiting_for():
            opened.accept(device)

    def show(self, text: str) -> None:
        """Show the current step."""
        if self._display.due():
            self._display.show(View(text))
