"""The outcome of an experiment: figures of every cell, of every method on every partition, and of searches."""

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev, stdev
from typing import Any

import msgspec
from msgspec import Struct

from fleet.experiments.cell import CellResult
from fleet.experiments.grid import SCHEMA, Experiment, Grid, Search, Values
from fleet.experiments.scheduler import FinishedCell
from fleet.experiments.search import search_state

CONFIDENCE = 0.95
"""Of all intervals."""
OF_MEAN = f" of the mean over devices, [ ] is its {CONFIDENCE:.0%} interval over seeds (Student's t)"


class CellOutcome(Struct, frozen=True, kw_only=True):
    method: str  # as the file calls it
    partition: str
    seed: int
    result: CellResult | None  # None: not finished
    failure: str | None  # why, when it failed


class Interval(Struct, frozen=True):
    """Of a mean over seeds, by Student's t; not cut off at 0 and 1."""

    low: float
    high: float


class Comparison(Struct, frozen=True, kw_only=True):
    """One method on one partition, over the seeds that are finished; every figure is a mean over them."""

    method: str
    partition: str
    seeds: list[int]
    accuracy: float  # of the mean over devices, after the last round
    std_over_seeds: float | None  # of `accuracy`, sample standard deviation; None for a single seed
    std_over_devices: float  # within one run, population standard deviation
    accuracy_weighted: float  # over test images
    bytes_down: float  # per device and round, evaluation included
    bytes_up: float
    flops: float | None  # of training, per device and round
    wall_s: float
    peak_rss_bytes: int | None  # largest of all cells
    epsilon: float | None = None  # of devices' updates, over all rounds; largest of all cells
    feature_epsilon: float | None = None  # of one device's features; largest of all cells
    interval: Interval | None = None  # of `accuracy`; None for a single seed
    protocol: str | None = None  # how accuracy is measured
    late: float | None = None  # mean of the evaluations in the last `late_rounds` rounds
    late_std: float | None = None  # over these evaluations, population standard deviation, of each run
    rounds_to_target: float | None = None  # until an evaluation reached `target_accuracy`; None: not in every seed
    generic: float | None = None  # accuracy of the server's model on images that no device has; None: there is none
    generic_interval: Interval | None = None
    novel: float | None = None  # accuracy of devices that joined after the training; None: there are none
    novel_interval: Interval | None = None


class Difference(Struct, frozen=True, kw_only=True):
    """Difference in accuracy to the reference, on the same partition and the same seeds."""

    method: str
    reference: str
    partition: str
    seeds: list[int]  # finished of both
    mean: float  # over seeds, of the difference in accuracy
    interval: Interval


class Gain(Struct, frozen=True, kw_only=True):
    """By how much one device's accuracy is above the reference's on the same device, partition and seed."""

    method: str
    partition: str
    seed: int
    device: str
    gain: float


class TriedValues(Struct, frozen=True, kw_only=True):
    """Values that a search tried, and their outcome."""

    values: Values
    rounds: int  # of the last rung in which they were compared; 0: not tried
    accuracy: float | None  # on validation images, mean over devices, then over seeds; None: not known, or unusable
    unusable: str | None  # why no device could train with these values


class SearchOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of the search for one method's values on one partition."""

    method: str
    partition: str
    tried: list[TriedValues]
    chosen: Values | None  # None: not known yet, or no values are usable
    over: bool
    at_edge: dict[str, str]  # options of which the lowest or highest value was chosen -> "lowest" or "highest"


class Outcome(Struct, frozen=True, kw_only=True):
    """The content of `results.json`."""

    schema: int
    experiment: str
    description: str
    protocols: list[str]  # how accuracy is measured; more than one when methods differ
    settings: dict[str, Any]  # the experiment's file, with defaults
    methods: dict[str, dict[str, Any]]  # name -> method, and all its options
    seeds: list[int]
    comparisons: list[Comparison]
    cells: list[CellOutcome]
    differences: list[Difference] = []
    gains: list[Gain] = []  # where the file names a reference
    searches: list[SearchOutcome] = []

    @property
    def partitions(self) -> list[str]:
        return list(dict.fromkeys(cell.partition for cell in self.cells))

    @property
    def reference(self) -> str:
        """The method to which differences are given."""
        named: str | None = self.settings.get("reference")
        return named or next(iter(self.methods), "-")

    @property
    def spread(self) -> str:
        """The meaning of ± in tables."""
        counts = {len(entry.seeds) for entry in self.comparisons}
        if counts == {1}:
            return (
                "single seed: ± is the standard deviation over devices within one run, not between runs; "
                "there are no intervals"
            )
        if 1 in counts:
            return f"± is the sample standard deviation over seeds{OF_MEAN}; without, a single seed is finished"
        seeds = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts, default=0)}"
        return f"± is the sample standard deviation over {seeds} seeds{OF_MEAN}"

    @property
    def has_figures(self) -> bool:
        return bool(self.comparisons) or any(one.rounds for search in self.searches for one in search.tried)

    def difference(self, method: str, partition: str) -> Difference | None:
        return next(
            (entry for entry in self.differences if (entry.method, entry.partition) == (method, partition)), None
        )

    def gains_of(self, method: str, partition: str) -> list[float]:
        """Of every device of every seed, the lowest first."""
        return sorted(entry.gain for entry in self.gains if (entry.method, entry.partition) == (method, partition))

    def comparison(self, method: str, partition: str) -> Comparison | None:
        return next(
            (entry for entry in self.comparisons if (entry.method, entry.partition) == (method, partition)), None
        )

    def deviation(self, entry: Comparison) -> float | None:
        """The figure after ±; see `spread`."""
        single = all(len(other.seeds) == 1 for other in self.comparisons)
        return entry.std_over_devices if single else entry.std_over_seeds

    def leader(self, partition: str) -> str | None:
        """Return the method that is shown to be ahead of all others, or None if there is no such method.

        It is shown by intervals of paired differences that lie above zero. So a single seed shows nothing, and
        neither does a partition on which a seed of any method has not ended.
        """
        cells = [cell for cell in self.cells if cell.partition == partition]
        entries = sorted(
            (entry for entry in self.comparisons if entry.partition == partition), key=lambda entry: -entry.accuracy
        )
        if len(entries) < 2 or any(cell.result is None and cell.failure is None for cell in cells):
            return None
        first, *others = (_finished(cells, entry.method, partition) for entry in entries)
        if len(first) < len(self.seeds):
            return None
        for other in others:
            interval = mean_interval(_pair_differences(first, other))
            if interval is None or interval.low <= 0:
                return None
        return entries[0].method


def make_outcome(grid: Grid, ended: Iterable[FinishedCell]) -> Outcome:
    """The outcome of the cells in `ended`; all others are not finished."""
    known = {entry.cell.digest: entry for entry in ended}
    states = [(search, search_state(search, known)) for search in grid.searches]
    runnable = [*grid.cells, *(cell for _, at in states if at.chosen for cell in at.chosen.cells)]
    by_name = {(cell.method, cell.partition, cell.seed): cell for cell in runnable}
    cells = []
    for seed in grid.experiment.seeds:
        for partition in grid.experiment.partitions:
            for method in grid.methods:
                cell = by_name.get((method, partition, seed))  # None: a search has not chosen its values
                over = known.get(cell.digest) if cell else None
                cells.append(
                    CellOutcome(
                        method=method,
                        partition=partition,
                        seed=seed,
                        result=over.result if over else None,
                        failure=over.failure if over else None,
                    )
                )
    pairs = dict.fromkeys((cell.method, cell.partition) for cell in cells)
    comparisons = [
        _compared(method, partition, finished, grid.experiment)
        for method, partition in pairs
        if (finished := _finished(cells, method, partition))
    ]
    return Outcome(
        schema=SCHEMA,
        experiment=grid.name,
        description=grid.description,
        protocols=sorted({cell.result.protocol for cell in cells if cell.result and cell.result.protocol}),
        settings=_settings(grid),
        methods=grid.methods,
        seeds=list(grid.experiment.seeds),
        comparisons=comparisons,
        cells=cells,
        differences=_differences(grid, cells),
        gains=_gains(grid.experiment.reference, cells) if grid.experiment.reference else [],
        searches=[
            SearchOutcome(
                method=search.method,
                partition=search.partition,
                tried=[
                    TriedValues(
                        values=one.point.values, rounds=one.rounds, accuracy=one.accuracy, unusable=one.unusable
                    )
                    for one in at.tries
                ],
                chosen=at.chosen.values if at.chosen else None,
                over=at.over,
                at_edge=_at_edge(search, at.chosen.values) if at.chosen else {},
            )
            for search, at in states
        ],
    )


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The interval of their mean, as of a sample of a normal distribution; None for a single value."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # the quantile of scipy.stats.t, which takes longer to import

    freedom = len(values) - 1
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * stdev(values) / len(values) ** 0.5
    return Interval(fmean(values) - half, fmean(values) + half)


def _differences(grid: Grid, cells: Sequence[CellOutcome]) -> list[Difference]:
    """To a method that the file names and not to the best one, which the same figures would have selected."""
    found = []
    reference = grid.experiment.reference or next(iter(grid.methods))
    for partition in grid.experiment.partitions:
        first = _finished(cells, reference, partition)
        for method in grid.methods:
            if method == reference:
                continue
            other = _finished(cells, method, partition)
            seeds = [seed for seed in first if seed in other]
            paired = _pair_differences(other, first)
            if interval := mean_interval(paired):
                found.append(
                    Difference(
                        method=method,
                        reference=reference,
                        partition=partition,
                        seeds=seeds,
                        mean=fmean(paired),
                        interval=interval,
                    )
                )
    return found


def _pair_differences(one: dict[int, CellResult], other: dict[int, CellResult]) -> list[float]:
    """Return the difference in accuracy on each seed that both have finished, in the order of `other`."""
    return [one[seed].accuracy.mean - other[seed].accuracy.mean for seed in other if seed in one]


def _gains(reference: str, cells: Sequence[CellOutcome]) -> list[Gain]:
    base = {(cell.partition, cell.seed): cell.result.accuracy_by_device for cell in cells
            if cell.method == reference and cell.result}  # fmt: skip
    return [
        Gain(method=cell.method, partition=cell.partition, seed=cell.seed, device=device, gain=accuracy - own[device])
        for cell in cells
        if cell.method != reference and cell.result and (own := base.get((cell.partition, cell.seed)))
        for device, accuracy in cell.result.accuracy_by_device.items()
        if device in own
    ]


def _at_edge(search: Search, chosen: Values) -> dict[str, str]:
    """Options with numeric values of which the lowest or the highest was chosen."""
    edges = {}
    for option, value in chosen.items():
        values = {point.values[option] for point in search.points}
        if len(values) > 1 and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
            for name, edge in (("lowest", min(values)), ("highest", max(values))):
                if value == edge:
                    edges[option] = name
    return edges


def _settings(grid: Grid) -> dict[str, Any]:
    """The settings that outcomes may depend on, so without [ray]."""
    settings: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(grid.experiment))
    return {key: value for key, value in settings.items() if key != "ray"}


def _finished(cells: Sequence[CellOutcome], method: str, partition: str) -> dict[int, CellResult]:
    return {
        cell.seed: cell.result for cell in cells if (cell.method, cell.partition) == (method, partition) and cell.result
    }


def _compared(method: str, partition: str, finished: dict[int, CellResult], experiment: Experiment) -> Comparison:
    results = list(finished.values())
    late = [_late(result, experiment.late_rounds) for result in results] if experiment.late_rounds else []
    reached = [_reached(result, experiment.target_accuracy) for result in results]
    rounds_to_target = [number for number in reached if number is not None]
    means = [result.accuracy.mean for result in results]
    generic = [result.generic_accuracy for result in results if result.generic_accuracy is not None]
    novel = [result.novel.mean for result in results if result.novel is not None]
    flops = [result.flops for result in results if result.flops is not None]
    peaks = [result.peak_rss_bytes for result in results if result.peak_rss_bytes is not None]
    return Comparison(
        method=method,
        partition=partition,
        seeds=list(finished),
        accuracy=fmean(means),
        std_over_seeds=stdev(means) if len(means) > 1 else None,
        std_over_devices=fmean(result.accuracy.std_over_devices for result in results),
        accuracy_weighted=fmean(result.accuracy.weighted for result in results),
        bytes_down=fmean(result.bytes_down for result in results),
        bytes_up=fmean(result.bytes_up for result in results),
        flops=fmean(flops) if flops else None,
        wall_s=fmean(result.wall_s for result in results),
        peak_rss_bytes=max(peaks, default=None),
        epsilon=_most(result.epsilon for result in results),
        feature_epsilon=_most(result.feature_epsilon for result in results),
        interval=mean_interval(means),
        protocol=results[0].protocol,
        late=fmean(fmean(means) for means in late) if late else None,
        late_std=fmean(pstdev(means) for means in late) if late else None,
        rounds_to_target=fmean(rounds_to_target) if len(rounds_to_target) == len(results) else None,
        generic=fmean(generic) if generic else None,
        generic_interval=mean_interval(generic),
        novel=fmean(novel) if novel else None,
        novel_interval=mean_interval(novel),
    )


def _late(result: CellResult, rounds: int) -> list[float]:
    """The accuracies of the evaluations in the last `rounds` rounds."""
    first = result.rounds[-1].round - rounds
    return [entry.accuracy.mean for entry in result.rounds if entry.accuracy and entry.round > first]


def _reached(result: CellResult, target: float | None) -> int | None:
    """The round whose evaluation was the first to reach the target; None if none was."""
    numbers = (
        entry.round
        for entry in result.rounds
        if target is not None and entry.accuracy and entry.accuracy.mean >= target
    )
    return next(numbers, None)


def _most(figures: Iterable[float | None]) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)
