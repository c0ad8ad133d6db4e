"""The device descriptions that plans use: as announced in the hello, corrected by what tasks really needed."""

from collections.abc import Iterable

from coordinator.compute.planning.planned_device import PlannedDevice
from coordinator.record.record import Record
from coordinator.rounds.presence import Presence
from fedvit.resources import Budget, BudgetKind, ResourceUse
from profiles.prediction import Expected

LEAST_CORRECTION = 1.1
"""Smallest factor by which a prediction is raised when a device exceeded its budget."""


class DeviceProfiles:
    """The targets of one run's plans. Corrections are in the store, so that they survive a restart."""

    def __init__(self, run: str, store: Record, presence: Presence, limits: Budget) -> None:
        self._run = run
        self._store = store
        self._presence = presence
        self._limits = limits
        self._corrections: dict[str, dict[BudgetKind, float]] = {}  # see Target

    def load(self) -> None:
        """Load the corrections of an earlier process."""
        self._corrections = self._store.runs.read(self._run).corrections

    def of(self, device: str) -> PlannedDevice | None:
        """The target of a device; None if it has not sent hello to this process."""
        if device not in self._presence:
            return None
        hello = self._presence[device].hello
        profile = hello.profile
        budget = profile.budget.tightest(self._limits)
        return PlannedDevice(
            device=device,
            speed=profile.speed,
            source="measured" if profile.speed else None,
            mode=None,
            budget=budget,
            budget_is_own=profile.budget.memory_bytes == budget.memory_bytes,
            images=hello.train_samples,
            test_images=hello.test_samples,
            base_rss_bytes=profile.base_rss_bytes,
            feature_bytes=profile.feature_bytes,
            corrections=tuple(sorted(self._corrections.get(device, {}).items())),
        )

    def learn(
        self, device: str, expected: Expected | None, broke: Iterable[BudgetKind], use: ResourceUse | None
    ) -> None:
        """Raise later predictions for a device that exceeded a budget although its prediction was within it."""
        broken = [kind for kind in broke if kind in ("memory", "time")]
        if expected is None or use is None or not broken:
            return
        prediction, known = expected.prediction, self._corrections.setdefault(device, {})
        ratios: dict[BudgetKind, float] = {"memory": (use.peak_rss_bytes or 0) / prediction.peak_rss_bytes}
        if prediction.train_s and use.train_s:  # for a stopped task: the time until then
            ratios["time"] = use.train_s / prediction.train_s
        for kind in broken:
            if kind in ratios:
                known[kind] = known.get(kind, 1.0) * max(LEAST_CORRECTION, ratios[kind])
        self._store.runs.update(self._run, corrections=self._corrections)
