"""Keeps a device within its budgets: monitors a task while it runs, and decides when it has to stop.

Memory is that of the process and of the one that runs its graphs, sampled several times a second, also during a step.
A task that exceeds a budget is stopped; a budget that only the last step exceeds is reported with the result.
"""

import threading
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Self

from edge_client.health.memory import OwnMemory
from fedvit.errors import OverBudget
from fedvit.quantities import format_bytes, format_flops, format_seconds
from fedvit.resources import Budget, BudgetKind, ResourceUse
from fedvit.wire.messages import TaskKind
from profiles.probes.battery import battery
from profiles.probes.meter import Meter, Metered, Sensors

SAMPLE_EVERY_S = 0.05
LEAST_STEPS = 20
"""With fewer steps a tenth is too small for a comparison."""


class Exceeded(OverBudget):
    """A task was stopped because it exceeded a budget of this device; nothing of it is kept."""

    def __init__(self, reason: str, broke: BudgetKind, use: ResourceUse) -> None:
        super().__init__("FV1425", reason)
        self.broke = broke
        self.use = use


@dataclass
class Tally:
    """The steps of a task so far."""

    flops: int = 0
    phases: list[list[float]] = field(default_factory=list)  # seconds of each step, phase by phase

    @property
    def steps(self) -> int:
        return sum(map(len, self.phases))

    @property
    def step_s(self) -> float | None:
        """The median of all steps."""
        return median(second for phase in self.phases for second in phase) if self.steps else None

    @property
    def sustained(self) -> float | None:
        """The median step of the last tenth divided by that of the first, of the phase that took longest.

        Above 1 the device became slower, for instance because of heat. None for fewer than LEAST_STEPS steps.
        """
        longest = max(self.phases, key=sum, default=[])
        if len(longest) < LEAST_STEPS:
            return None
        tenth = len(longest) // 10
        return median(longest[-tenth:]) / median(longest[:tenth])


class Guard:
    """The budgets of one device. `watching` makes the monitor of one task.

    With `owns_process` the process's high-water mark may be reset, so that each task's own peak is measured; without,
    the peak is the highest of several samples a second, or without any limit of one in each step. Without `sensors`
    energy and temperature are not measured.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        temperature_limit_c: float | None = None,
        sensors: Sensors | None = None,
        owns_process: bool = False,
        memory: OwnMemory | None = None,
    ) -> None:
        self.budget = budget or Budget()
        self.temperature_limit_c = temperature_limit_c
        self.sensors = sensors
        self.owns_process = owns_process
        self.memory = memory or OwnMemory()
        self.base_bytes: int | None = None  # of the process with its engine, before the first task

    @property
    def is_needed(self) -> bool:
        """Return True if tasks are monitored while a step runs: the many devices of one process have no limits."""
        return self.owns_process or self.budget != Budget() or self.temperature_limit_c is not None

    def watching(self, kind: TaskKind) -> "Guarded":
        """The monitor of a task that starts now; the engine should be loaded already."""
        if self.base_bytes is None:
            self.base_bytes = self.memory.resident_bytes()
        return Guarded(self, kind)


class Guarded:
    """Monitors one task: a context manager around its work."""

    def __init__(self, guard: Guard, kind: TaskKind) -> None:
        self.tally = Tally()
        self.upload_bytes: int | None = None  # of the result, when it is known
        self._guard = guard
        self._training = kind == "train"
        self._began = time.perf_counter()
        self._fresh = guard.owns_process and guard.memory.forget_peak()
        self._peak_before = guard.memory.peak_bytes()
        self._peak_bytes = 0
        self._broke: dict[BudgetKind, None] = {}  # in the order in which they were broken
        self._meter = Meter(guard.sensors) if guard.sensors else None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True) if guard.is_needed else None

    def __enter__(self) -> Self:
        self._sample()
        if self._thread:
            self._thread.start()
        if self._meter:
            self._meter.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()
        if self._meter:
            self._meter.__exit__()

    def over(self) -> bool:
        """Return True if the task has to stop."""
        self._sample()
        return bool(self._broke)

    def refuse_memory(self) -> None:
        """Note that an allocation was refused, because it would have exceeded the memory budget."""
        with self._lock:
            self._broke["memory"] = None

    @property
    def broke(self) -> tuple[BudgetKind, ...]:
        """The budgets that the task exceeded, the newest last."""
        return tuple(self._broke)

    def reason(self) -> str:
        """The measured value and the limit of each exceeded budget."""
        return "; ".join(self._describe(kind) for kind in self.broke)

    def use(self, flops: int | None = None) -> ResourceUse:
        """The cost of the task so far, without its bytes; `flops` overrides the count of its steps."""
        self._sample()
        sensors = self._guard.sensors
        metered = self._meter.finish() if self._meter else Metered(None, None, None, None)
        charge = battery(sensors.root) if sensors else None
        return ResourceUse(
            train_s=self._measure_elapsed_s(),
            step_s=self.tally.step_s,
            steps=self.tally.steps,
            flops=self.tally.flops if flops is None else flops,
            peak_rss_bytes=self._peak_bytes,
            sustained=self.tally.sustained,
            energy_j=metered.energy_j,
            energy_source=metered.energy_source,
            temperature_c=metered.temperature_c,
            throttled=metered.throttled,
            broke=self.broke,
            battery_percent=charge.percent if charge else None,
            charging=charge.charging if charge else None,
        )

    def _measure_elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        budget, limit_c = self._guard.budget, self._guard.temperature_limit_c
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, self._guard.memory.resident_bytes(), self._own_mark())
            celsius = self._meter.celsius if self._meter else None
            samples: tuple[tuple[BudgetKind, float | None, float | None], ...] = (
                ("memory", self._peak_bytes, budget.memory_bytes),
                ("temperature", celsius, limit_c),
                ("upload", self.upload_bytes, budget.upload_bytes),
            )
            if self._training:
                samples += (
                    ("time", self._measure_elapsed_s(), budget.round_deadline_s),
                    ("flops", self.tally.flops, budget.flops_per_round),
                )
            for kind, value, limit in samples:
                if value is not None and limit is not None and value > limit:
                    self._broke[kind] = None

    def _own_mark(self) -> int:
        """The process's high-water mark if it belongs to this task: it was reset, or it has risen; else 0."""
        mark = self._guard.memory.peak_bytes()
        if mark is None or not (self._fresh or self._peak_before is None or mark > self._peak_before):
            return 0
        return mark

    def _describe(self, kind: BudgetKind) -> str:
        budget, guard = self._guard.budget, self._guard
        match kind:
            case "memory":
                return memory_message(self._peak_bytes, budget.memory_bytes or 0, guard.base_bytes or 0)
            case "time":
                return (
                    f"training took {format_seconds(self._measure_elapsed_s())} with {self.tally.steps} steps, "
                    f"the deadline of a round on this device is {format_seconds(budget.round_deadline_s or 0)}"
                )
            case "flops":
                return (
                    f"training took {self.tally.flops} FLOPs with {self.tally.steps} steps, "
                    f"the budget of a round is {budget.flops_per_round} ({format_flops(budget.flops_per_round or 0)})"
                )
            case "temperature":
                hottest = self._meter.finish().temperature_c if self._meter else None
                return f"the processor was at {hottest} C, the limit of this device is {guard.temperature_limit_c} C"
            case "upload":
                return (
                    f"the result has {self.upload_bytes} bytes, "
                    f"the upload budget is {budget.upload_bytes} ({format_bytes(budget.upload_bytes or 0)})"
                )


def memory_message(peak_bytes: int, limit_bytes: int, base_bytes: int) -> str:
    """The message about an exceeded memory budget, which says if no task can keep it.

    >>> memory_message(63_400_000, 60_000_000, 52_000_000)
    'resident memory reached 63.4 MB, the memory budget is 60.0 MB; the program and its engine alone take 52.0 MB'
    """
    limit, base = _megabytes(limit_bytes), _megabytes(base_bytes)
    if base_bytes > limit_bytes:
        return (
            f"the program and its engine alone take {base} before any work, the memory budget is {limit}: "
            "no task can keep it; raise --memory-budget above that, plus what training takes"
        )
    reached = _megabytes(peak_bytes)
    return (
        f"resident memory reached {reached}, the memory budget is {limit}; the program and its engine alone take {base}"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
