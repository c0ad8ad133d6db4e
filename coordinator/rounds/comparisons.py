"""Comparisons of a run's last or best model with the models that its devices use."""

import time

import msgspec

from coordinator.record.scores import find_round
from coordinator.record.tables import DeviceModelRecord, ModelRecord, now
from coordinator.rounds.models.requests import add_model
from coordinator.rounds.parts import RunParts
from coordinator.rounds.ports import Comparisons
from fedvit.comparison import read_metrics

SETTLE_S = 5.0
"""Longest wait for the reports of devices whose models change at the end of a run."""


class RecordComparisons(Comparisons):
    """The comparisons of a run in the record of all runs, whose devices hear of the outcome at once."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._store = parts.state.store
        self._run = parts.state.run

    def can_compare(self, device: str) -> bool:
        return device in self._state.presence and self._state.presence[device].hello.models > 0

    def find_round(self) -> int:
        return find_round(self._store, self._run, None).round

    def has(self, number: int) -> bool:
        return self._store.models.has(f"{self._run}-{number}")

    def keep(self, number: int) -> None:
        """Store the counts with what the rules say of them, in one transaction; then devices hear of it."""
        state, rules = self._state, self._state.config.promote
        name, at = f"{self._run}-{number}", now()
        rows = []
        for result in state.results(number, "compare"):
            comparison, paired = read_metrics(result.metrics)
            labels = state.presence[result.device].hello.labels if result.device in state.presence else {}
            rows.append(
                DeviceModelRecord(
                    model=name, device=result.device, labels=dict(labels), comparison=comparison, paired=paired,
                    actual="challenger", changed_at=at,
                )
            )  # fmt: skip
        model = ModelRecord(
            name=name, run=self._run, round=number, method=state.config.method, classes=len(state.classes),
            created_at=at, stage="challenger", rules=msgspec.to_builtins(rules), reason="", changed_at=at,
        )  # fmt: skip
        self._parts.operator_log(add_model(self._store, model, rows))
        if keeper := self._parts.models:
            keeper.look()
            self._parts.inbox.pump(keeper.is_settled, deadline=time.monotonic() + SETTLE_S)
