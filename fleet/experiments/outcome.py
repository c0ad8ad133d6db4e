"""The outcome of an experiment: figures of every cell, of every method on every partition, and of searches."""

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev, stdev
from typing import Any

import msgspec
from scipy.special import stdtrit  # the quantile of scipy.stats.t, which takes longer to import

from fleet.experiments.cells import SCHEMA, Grid, Search
from fleet.experiments.folder import FinishedCell
from fleet.experiments.search import SearchState, search_state
from fleet.experiments.settings import Experiment
from profiles.report.experiment import (
    CellOutcome,
    CellResult,
    Difference,
    ExperimentOutcome,
    Gain,
    Interval,
    MethodComparison,
    SearchOutcome,
    TriedValues,
    Values,
)

CONFIDENCE = 0.95
"""Confidence of all intervals."""


def make_outcome(grid: Grid, ended: Iterable[FinishedCell]) -> ExperimentOutcome:
    """Compute the outcome from the cells in `ended`; all others are not finished."""
    by_digest = {entry.cell.digest: entry for entry in ended}
    states = [(search, search_state(search, by_digest)) for search in grid.searches]
    cells = _make_cells(grid, by_digest, [state for _, state in states])
    pairs = dict.fromkeys((cell.method, cell.partition) for cell in cells)
    comparisons = [
        _compare(method, partition, results, grid.experiment)
        for method, partition in pairs
        if (results := _results(cells, method, partition))
    ]
    return ExperimentOutcome(
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
        searches=[_make_search(search, state) for search, state in states],
    )


def find_leader(outcome: ExperimentOutcome, partition: str) -> str | None:
    """Return the method that is shown to be ahead of all others, or None if there is no such method.

    It is shown by intervals of paired differences that lie above zero. So a single seed shows nothing, and
    neither does a partition on which a seed of any method has not ended.
    """
    cells = [cell for cell in outcome.cells if cell.partition == partition]
    entries = sorted(
        (entry for entry in outcome.comparisons if entry.partition == partition), key=lambda entry: -entry.accuracy
    )
    if len(entries) < 2 or any(cell.result is None and cell.failure is None for cell in cells):
        return None
    first, *others = (_results(cells, entry.method, partition) for entry in entries)
    if len(first) < len(outcome.seeds):
        return None
    for other in others:
        interval = mean_interval(_pair_differences(first, other))
        if interval is None or interval.low <= 0:
            return None
    return entries[0].method


def _make_cells(grid: Grid, ended: dict[str, FinishedCell], states: Sequence[SearchState]) -> list[CellOutcome]:
    runnable = [*grid.cells, *(cell for state in states if state.chosen for cell in state.chosen.cells)]
    by_name = {(cell.method, cell.partition, cell.seed): cell for cell in runnable}
    cells = []
    for seed in grid.experiment.seeds:
        for partition in grid.experiment.partitions:
            for method in grid.methods:
                cell = by_name.get((method, partition, seed))  # None: a search has not chosen its values
                over = ended.get(cell.digest) if cell else None
                result, failure = (over.result, over.failure) if over else (None, None)
                cells.append(CellOutcome(method=method, partition=partition, seed=seed, result=result, failure=failure))
    return cells


def _make_search(search: Search, state: SearchState) -> SearchOutcome:
    return SearchOutcome(
        method=search.method,
        partition=search.partition,
        tried=[
            TriedValues(values=one.point.values, rounds=one.rounds, accuracy=one.accuracy, unusable=one.unusable)
            for one in state.tries
        ],
        chosen=state.chosen.values if state.chosen else None,
        over=state.over,
        at_edge=_at_edge(state, state.chosen.values) if state.chosen else {},
    )


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Interval of the mean of a sample of a normal distribution; None for a single value."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * stdev(values) / len(values) ** 0.5
    return Interval(fmean(values) - half, fmean(values) + half)


def _differences(grid: Grid, cells: Sequence[CellOutcome]) -> list[Difference]:
    """Compare with a method that the file names, and not with the best one, which the same figures would select."""
    differences = []
    reference = grid.experiment.reference or next(iter(grid.methods))
    for partition in grid.experiment.partitions:
        first = _results(cells, reference, partition)
        for method in grid.methods:
            if method == reference:
                continue
            other = _results(cells, method, partition)
            seeds = [seed for seed in first if seed in other]
            paired = _pair_differences(other, first)
            if interval := mean_interval(paired):
                differences.append(
                    Difference(
                        method=method,
                        reference=reference,
                        partition=partition,
                        seeds=seeds,
                        mean=fmean(paired),
                        interval=interval,
                    )
                )
    return differences


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


def _at_edge(state: SearchState, chosen: Values) -> dict[str, str]:
    """Options with numeric values of which the lowest or the highest was chosen."""
    edges = {}
    for option, value in chosen.items():
        values = {one.point.values[option] for one in state.tries}
        if len(values) > 1 and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
            for name, edge in (("lowest", min(values)), ("highest", max(values))):
                if value == edge:
                    edges[option] = name
    return edges


def _settings(grid: Grid) -> dict[str, Any]:
    """The settings that outcomes may depend on, so without [ray]."""
    settings: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(grid.experiment))
    return {key: value for key, value in settings.items() if key != "ray"} | {"partitions": grid.partitions}


def _results(cells: Sequence[CellOutcome], method: str, partition: str) -> dict[int, CellResult]:
    return {
        cell.seed: cell.result for cell in cells if (cell.method, cell.partition) == (method, partition) and cell.result
    }


def _compare(method: str, partition: str, by_seed: dict[int, CellResult], experiment: Experiment) -> MethodComparison:
    results = list(by_seed.values())
    late = [_late_accuracies(result, experiment.late_rounds) for result in results] if experiment.late_rounds else []
    reached = [_first_round(result, experiment.target_accuracy) for result in results]
    rounds_to_target = [number for number in reached if number is not None]
    seconds = [_add_seconds(result, number) for result, number in zip(results, reached, strict=True) if number]
    seconds_to_target = [one for one in seconds if one is not None]
    means = [result.accuracy.mean for result in results]
    generic = [result.generic_accuracy for result in results if result.generic_accuracy is not None]
    novel = [result.novel.mean for result in results if result.novel is not None]
    made = [result.generated_difference for result in results if result.generated_difference is not None]
    balanced = [result.balanced_accuracy for result in results if result.balanced_accuracy is not None]
    macro_f1 = [result.macro_f1 for result in results if result.macro_f1 is not None]
    auc = [result.auc for result in results if result.auc is not None]
    flops = [result.flops for result in results if result.flops is not None]
    peaks = [result.peak_rss_bytes for result in results if result.peak_rss_bytes is not None]
    return MethodComparison(
        method=method,
        partition=partition,
        seeds=list(by_seed),
        accuracy=fmean(means),
        std_over_seeds=stdev(means) if len(means) > 1 else None,
        std_over_devices=fmean(result.accuracy.std_over_devices for result in results),
        accuracy_weighted=fmean(result.accuracy.weighted for result in results),
        bytes_down=fmean(result.bytes_down for result in results),
        bytes_up=fmean(result.bytes_up for result in results),
        flops=fmean(flops) if flops else None,
        wall_s=fmean(result.wall_s for result in results),
        peak_rss_bytes=max(peaks, default=None),
        epsilon=_largest(result.epsilon for result in results),
        feature_epsilon=_largest(result.feature_epsilon for result in results),
        interval=mean_interval(means),
        protocol=results[0].protocol,
        late=fmean(fmean(means) for means in late) if late else None,
        late_std=fmean(pstdev(means) for means in late) if late else None,
        rounds_to_target=fmean(rounds_to_target) if len(rounds_to_target) == len(results) else None,
        seconds_to_target=fmean(seconds_to_target) if len(seconds_to_target) == len(results) else None,
        generic=fmean(generic) if generic else None,
        generic_interval=mean_interval(generic),
        novel=fmean(novel) if novel else None,
        novel_interval=mean_interval(novel),
        novel_rounds=[fmean(values) for values in zip(*(result.novel_rounds for result in results), strict=False)],
        generated_difference=fmean(made) if len(made) == len(results) else None,
        generated_interval=mean_interval(made) if len(made) == len(results) else None,
        balanced_accuracy=fmean(balanced) if len(balanced) == len(results) else None,
        balanced_interval=mean_interval(balanced) if len(balanced) == len(results) else None,
        macro_f1=fmean(macro_f1) if len(macro_f1) == len(results) else None,
        macro_f1_interval=mean_interval(macro_f1) if len(macro_f1) == len(results) else None,
        auc=fmean(auc) if len(auc) == len(results) else None,
        auc_interval=mean_interval(auc) if len(auc) == len(results) else None,
    )


def _late_accuracies(result: CellResult, rounds: int) -> list[float]:
    """The accuracies of the evaluations in the last `rounds` rounds."""
    first = result.rounds[-1].round - rounds
    return [entry.accuracy.mean for entry in result.rounds if entry.accuracy and entry.round > first]


def _first_round(result: CellResult, target: float | None) -> int | None:
    """The round whose evaluation was the first to reach the target; None if none was."""
    numbers = (
        entry.round
        for entry in result.rounds
        if target is not None and entry.accuracy and entry.accuracy.mean >= target
    )
    return next(numbers, None)


def _add_seconds(result: CellResult, last: int) -> float | None:
    """Add up the times of the slowest device of each round; None if one was not measured."""
    seconds = [entry.longest_s for entry in result.rounds if entry.round <= last]
    measured = [one for one in seconds if one is not None]
    return sum(measured) if len(measured) == len(seconds) else None


def _largest(figures: Iterable[float | None]) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)
