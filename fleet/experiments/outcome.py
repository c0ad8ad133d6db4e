"""What came of an experiment: the figures of every cell, and of every method on every partition."""

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec
from msgspec import Struct

from fleet.experiments.cell import CellResult
from fleet.experiments.conduct import Ended
from fleet.experiments.grid import SCHEMA, Grid


class CellOutcome(Struct, frozen=True, kw_only=True):
    method: str  # as the file calls it
    partition: str
    seed: int
    result: CellResult | None  # None: not finished
    failure: str | None  # why, when it was tried


class Comparison(Struct, frozen=True, kw_only=True):
    """One method on one partition, over the seeds that are finished; every figure is a mean over them."""

    method: str
    partition: str
    seeds: list[int]
    accuracy: float  # of the mean over devices, after the last round
    std_over_seeds: float | None  # of `accuracy`, sample standard deviation; None: a single seed tells nothing of it
    std_over_devices: float  # within one run, population standard deviation
    accuracy_weighted: float  # over test images
    bytes_down: float  # per device and round, evaluation included
    bytes_up: float
    flops: float | None  # of training, per device and round
    wall_s: float
    peak_rss_bytes: int | None  # the most of any cell
    epsilon: float | None = None  # of devices' updates, over all rounds; the most of any cell
    feature_epsilon: float | None = None  # of one device's features; the most of any cell


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

    @property
    def partitions(self) -> list[str]:
        return list(dict.fromkeys(cell.partition for cell in self.cells))

    @property
    def spread(self) -> str:
        """What stands behind ± in tables."""
        counts = {len(entry.seeds) for entry in self.comparisons}
        if counts == {1}:
            return "single seed: ± is the standard deviation over devices within one run, not between runs"
        if 1 in counts:
            return (
                "± is the sample standard deviation over seeds of the mean over devices; where it is missing, "
                "a single seed is finished"
            )
        seeds = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts, default=0)}"
        return f"± is the sample standard deviation over {seeds} seeds of the mean over devices"

    def comparison(self, method: str, partition: str) -> Comparison | None:
        return next(
            (entry for entry in self.comparisons if (entry.method, entry.partition) == (method, partition)), None
        )

    def deviation(self, entry: Comparison) -> float | None:
        """What to write behind ±; see `spread`."""
        single = all(len(other.seeds) == 1 for other in self.comparisons)
        return entry.std_over_devices if single else entry.std_over_seeds

    def best(self, partition: str) -> set[str]:
        """The methods with the highest accuracy, as printed; none where there is nothing to compare."""
        entries = [entry for entry in self.comparisons if entry.partition == partition]
        top = max((round(entry.accuracy, 3) for entry in entries), default=0.0)
        return {entry.method for entry in entries if round(entry.accuracy, 3) == top} if len(entries) > 1 else set()


def make_outcome(grid: Grid, ended: Sequence[Ended]) -> Outcome:
    """Put the cells together; those that `ended` does not name are not finished."""
    known = {entry.cell.digest: entry for entry in ended}
    cells = []
    for cell in grid.cells:
        over = known.get(cell.digest)
        cells.append(
            CellOutcome(
                method=cell.method,
                partition=cell.partition,
                seed=cell.seed,
                result=over.result if over else None,
                failure=over.failure if over else None,
            )
        )
    pairs = dict.fromkeys((cell.method, cell.partition) for cell in cells)
    comparisons = [
        _compared(method, partition, finished)
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
    )


def _settings(grid: Grid) -> dict[str, Any]:
    """What outcomes may depend on: where cells ran is not."""
    settings: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(grid.experiment))
    return {key: value for key, value in settings.items() if key != "ray"}


def _finished(cells: Sequence[CellOutcome], method: str, partition: str) -> dict[int, CellResult]:
    return {
        cell.seed: cell.result for cell in cells if (cell.method, cell.partition) == (method, partition) and cell.result
    }


def _compared(method: str, partition: str, finished: dict[int, CellResult]) -> Comparison:
    results = list(finished.values())
    means = [result.accuracy.mean for result in results]
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
    )


def _most(figures: Iterable[float | None]) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)
