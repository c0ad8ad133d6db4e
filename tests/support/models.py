"""Models in records made by hand, and devices that only keep states."""

from typing import Any

import msgspec

from coordinator.config import PromoteConfig
from coordinator.record.record import Record
from coordinator.record.tables import DeviceModelRecord, ModelRecord
from coordinator.rounds.models.requests import add_model
from fedvit.comparison import Comparison
from fedvit.wire.messages import ModelReport, Models, ModelState

BETTER, WORSE, FIRST = Comparison(60, 30, 5, 5), Comparison(60, 5, 30, 5), Comparison(0, 90, 0, 10)


def compare_on(store: Record, name: str, compared: dict[str, Comparison], **rules: Any) -> str:
    """Store a model that devices have compared, with the rules of its run; return what follows."""
    run, _, number = name.rpartition("-")
    settings = msgspec.to_builtins(PromoteConfig(**rules))
    has_champion = {row.device for row in store.models.read_devices() if row.wanted == "champion"}
    model = ModelRecord(
        name=name, run=run, round=int(number), method="fedavg", classes=10, created_at=f"2026-11-28T10:{number:0>2}",
        stage="challenger", rules=settings, reason="", changed_at="2026-11-28T10:00",
    )  # fmt: skip
    rows = [
        DeviceModelRecord(
            model=name, device=device, labels={"site": "berlin" if device == "a" else "rome"}, comparison=counts,
            paired=device in has_champion, actual="challenger",
        )
        for device, counts in compared.items()
    ]  # fmt: skip
    return add_model(store, model, rows)


def list_wanted(store: Record, device: str) -> dict[str, str | None]:
    """The wanted states of the models of a device."""
    return {row.model: row.wanted for row in store.models.read_devices(device=device)}


class StatesOnly:
    """The models of a device that obeys: the newest message is what it has."""

    def __init__(self, *models: str) -> None:
        self.states: dict[str, ModelState] = dict.fromkeys(models, "challenger")

    def obey(self, message: Models) -> ModelReport:
        """Take the wanted states, and return the report."""
        for name, wanted in message.states.items():
            if wanted == "retired":
                self.states.pop(name, None)
            elif name in self.states:
                self.states[name] = wanted
        return self.report(message.instance)

    def report(self, instance: str, **values: Any) -> ModelReport:
        serving = {state: name for name, state in self.states.items()}
        used = serving.get("canary") or serving.get("champion") or ""
        return ModelReport(instance, dict(self.states), used, **values)
