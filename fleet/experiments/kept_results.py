"""Kept results: the figures of an experiment that outlive its folder, in one small file of `docs/results/`.

`fleet results NAME --keep docs/results` writes it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write
from profiles.report.experiment import ATTACK_FIGURES, ExperimentOutcome, Interval, MeanAttack, SearchOutcome, Values

_DIGITS = 4

T = TypeVar("T")


class KeptAccuracy(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A method's accuracy on a partition, the mean over devices, then over seeds; and its costs, None if not kept."""

    method: str
    partition: str
    seeds: int
    mean: float
    interval: Interval | None = None  # None: a single seed
    generated_difference: float | None = None  # between devices' generated tensors; None: there is no generator
    chosen: Values = {}  # by a search
    at_edge: dict[str, str] = {}  # options whose best value is the "lowest" or "highest" that a search tried
    flops: float | None = None  # of training, per device and round
    bytes_down: float | None = None  # per device and round
    bytes_up: float | None = None
    wall_s: float | None = None  # of a run
    late: float | None = None  # mean of the evaluations in the last rounds; None: the experiment asks for none
    novel: float | None = None  # accuracy of devices that joined after the training; None: there are none
    novel_interval: Interval | None = None
    rounds_to_target: float | None = None  # None: no target, or not reached in every seed
    seconds_to_target: float | None = None


class KeptDifference(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A method's accuracy minus that of the reference on the same partition and seeds."""

    method: str
    reference: str
    partition: str
    seeds: int
    mean: float
    interval: Interval | None = None  # None: a single seed

    def reverse(self) -> "KeptDifference":
        """Return the same difference from the reference's side."""
        interval = self.interval and Interval(-self.interval.high, -self.interval.low)
        return KeptDifference(
            method=self.reference, reference=self.method, partition=self.partition, seeds=self.seeds, mean=-self.mean,
            interval=interval,
        )  # fmt: skip


class KeptResults(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The figures of an experiment that outlive its folder."""

    experiment: str
    scale: str  # data, rounds
    accuracies: list[KeptAccuracy] = []
    differences: list[KeptDifference] = []
    attacks: list[MeanAttack] = []  # on uploaded features

    def find_difference(self, method: str, reference: str, partition: str) -> KeptDifference:
        """Find a difference, in either direction. Raises ConfigError if it was not kept."""
        for one in self.differences:
            for entry in (one, one.reverse()):
                if (entry.method, entry.reference, entry.partition) == (method, reference, partition):
                    return entry
        raise ConfigError(
            "FV2151", f"{self.experiment}: no difference of {method} to {reference} on {partition} was kept"
        )

    def find_edge(self, difference: KeptDifference) -> str:
        """Say whose search ended at an edge, so that it may do better than in this difference; else return ''."""
        behind = difference.reference if difference.mean > 0 else difference.method
        for one in self.accuracies:
            if (one.method, one.partition) == (behind, difference.partition):
                return "; ".join(
                    f"{behind}'s best {option} is the {edge} tried" for option, edge in one.at_edge.items()
                )
        return ""


def keep_results(outcome: ExperimentOutcome) -> KeptResults:
    """Reduce results to means, intervals and differences to the reference."""
    settings = outcome.settings
    counts = f"{settings.get('devices')} devices, {settings.get('rounds')} rounds"
    searches = {(one.method, one.partition): one for one in outcome.searches}
    return KeptResults(
        experiment=outcome.experiment,
        scale=f"{Path(str(settings.get('dataset', ''))).stem}, {counts}",
        accuracies=[
            KeptAccuracy(
                method=one.method, partition=one.partition, seeds=len(one.seeds), mean=round(one.accuracy, _DIGITS),
                interval=one.interval and _round(one.interval),
                generated_difference=one.generated_difference and round(one.generated_difference, _DIGITS),
                **_describe_search(searches.get((one.method, one.partition))), flops=one.flops and round(one.flops),
                bytes_down=round(one.bytes_down), bytes_up=round(one.bytes_up), wall_s=round(one.wall_s, 1),
                late=one.late and round(one.late, _DIGITS), novel=one.novel and round(one.novel, _DIGITS),
                novel_interval=one.novel_interval and _round(one.novel_interval),
                rounds_to_target=one.rounds_to_target and round(one.rounds_to_target, 1),
                seconds_to_target=one.seconds_to_target and round(one.seconds_to_target, 1),
            )
            for one in outcome.comparisons
        ],
        differences=[
            KeptDifference(
                method=one.method, reference=one.reference, partition=one.partition, seeds=len(one.seeds),
                mean=round(one.mean, _DIGITS), interval=_round(one.interval),
            )
            for one in outcome.differences
        ] + _list_single_differences(outcome),
        attacks=[
            replace(one, **{name: round(getattr(one, name), _DIGITS) for name in ATTACK_FIGURES})
            for one in outcome.average_attacks()
        ],
    )  # fmt: skip


def _describe_search(search: SearchOutcome | None) -> dict[str, Any]:
    return {"chosen": search.chosen or {}, "at_edge": search.at_edge} if search else {}


def _list_single_differences(outcome: ExperimentOutcome) -> list[KeptDifference]:
    """List the differences of a single seed, which have no interval."""
    accuracies = {
        (cell.method, cell.partition, cell.seed): cell.result.accuracy.mean for cell in outcome.cells if cell.result
    }
    return [
        KeptDifference(
            method=method, reference=outcome.reference, partition=partition, seeds=1,
            mean=round(accuracies[method, partition, seed] - accuracies[outcome.reference, partition, seed], _DIGITS),
        )
        for method, partition, seed in accuracies
        if method != outcome.reference
        and (outcome.reference, partition, seed) in accuracies
        and outcome.difference(method, partition) is None
    ]  # fmt: skip


def write_kept_results(outcome: ExperimentOutcome, folder: Path) -> Path:
    """Write the small file of an experiment. Raises StorageFailed."""
    file = folder / f"{outcome.experiment}.json"
    atomic_write(file, msgspec.json.format(msgspec.json.encode(keep_results(outcome)), indent=1) + b"\n")
    return file


def read_kept_results(folder: Path) -> dict[str, KeptResults]:
    """Read the kept results by experiment. Raises ConfigError, StorageFailed."""
    results = (read_file(file, KeptResults) for file in sorted(folder.glob("*.json")))
    return {one.experiment: one for one in results}


def describe_difference(difference: KeptDifference) -> str:
    """
    >>> describe_difference(KeptDifference(method="a", reference="b", partition="p", seeds=1, mean=0.125))
    '+0.125'
    """
    return f"{difference.mean:+.3f}{describe_interval(difference.interval)}"


def describe_interval(interval: Interval | None) -> str:
    """
    >>> describe_interval(Interval(0.1, 0.25))
    ' [0.100, 0.250]'
    """
    return f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else ""


def list_figures(results: Iterable[KeptResults]) -> list[float]:
    """List all figures that were kept."""
    entries: list[KeptAccuracy | KeptDifference] = []
    for one in results:
        entries += [*one.accuracies, *one.differences]
    ends = [end for entry in entries if entry.interval for end in (entry.interval.low, entry.interval.high)]
    return [*(entry.mean for entry in entries), *ends]


def read_file(file: Path, kind: type[T]) -> T:
    """Read a file of this folder. Raises ConfigError, StorageFailed."""
    try:
        if file.suffix == ".toml":
            return msgspec.toml.decode(file.read_bytes(), type=kind)
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise StorageFailed("FV1701", f"cannot read {file}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError("FV2151", f"{file}: {error}") from None


def _round(interval: Interval) -> Interval:
    return Interval(round(interval.low, _DIGITS), round(interval.high, _DIGITS))
