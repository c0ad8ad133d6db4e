"""The record of a whole fleet, made by hand: one large run under way, and many others."""

from coordinator.record.record import Record
from coordinator.record.tables import RunStatus, SavedState
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result
from tests.support.records import name_of

ENDS: tuple[RunStatus, ...] = (
    "finished",
    "finished",
    "finished",
    "cancelled",
    "failed",
    "queued",
    "finished",
    "finished",
)
"""Statuses of the other runs, in turn."""
METHODS = ("fedavg", "fedprox", "fedper", "eftvit")


def other_runs(store: Record, count: int, rounds: int = 3, devices: int = 4) -> list[str]:
    """Add runs of a few devices each, which ended in every way or wait in the queue; return their names."""
    names = [f"20261120-{number // 60:02}{number % 60:02}00-{METHODS[number % 4]}" for number in range(count)]
    cohort = [name_of(number) for number in range(1, devices + 1)]
    with store.database.together():
        for number, name in enumerate(names):
            status = ENDS[number % len(ENDS)]
            config = {"method": METHODS[number % 4], "model": "vit_tiny", "seed": number, "rounds": rounds}
            if status == "queued":
                store.runs.submit(name, config)
                continue
            store.runs.create(name, config)
            for round_number in range(1, rounds + 1):
                store.rounds.open(name, round_number, cohort)
                store.tasks.add_results(
                    [
                        (device, Result(name, round_number, kind, 10, metrics, ResourceUse()), None)
                        for kind, metrics in (("train", {"loss": 1.0}), ("evaluate", {"correct": 4.0 + number % 6}))
                        for device in cohort
                    ]
                )
                store.rounds.close(name, round_number, SavedState({}, None, {}), {})
                store.rounds.close_evaluation(name, round_number)
            reason = "no device returned a usable result in three attempts" if status == "failed" else None
            store.runs.update(name, status=status, reason=reason)
    return names
