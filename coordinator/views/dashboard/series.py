"""Series for comparisons: runs, and methods of experiments, with their accuracy and costs."""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from coordinator.run_view import RoundView, RunView
from coordinator.views.dashboard.frame import link
from profiles.report.curves import Point, add_up, mean_over_seeds
from profiles.report.experiment import CellResult, ExperimentOutcome

GRID = ("methods", "partitions", "common", "tuning")
"""Keys of an experiment that are not settings of one of its runs."""


class Series(NamedTuple):
    """One line of each chart, and a column of the tables."""

    name: str
    address: str | None  # of its page
    facts: dict[str, Any]  # status, rounds, devices, and figures that may be None
    settings: dict[str, Any]
    points: list[Point]


def make_run_series(run: RunView) -> Series:
    return Series(
        run.run,
        link("/run", run=run.run),
        {
            "status": run.status,
            "rounds": f"{len(run.rounds)} of {run.rounds_planned}",
            "accuracy": run.mean_accuracy,
            "devices": len(run.devices),
            "bytes_down": run.bytes_down,
            "bytes_up": run.bytes_up,
            "peak_rss_bytes": run.max_edge_rss_bytes,
            "energy_j": run.energy_j,
        },
        {"method": run.method, "model": run.model, "seed": run.seed, **run.settings},
        add_up(map(_make_point, run.rounds)),
    )


class CellGroup(NamedTuple):
    """A method on a partition of an experiment, of which a seed is finished."""

    name: str  # folder of the experiment/method/partition
    outcome: ExperimentOutcome
    method: str
    partition: str
    results: list[CellResult]  # by seed


def group_cells(outcomes: Mapping[str, ExperimentOutcome]) -> dict[str, CellGroup]:
    """Group the finished cells by name."""
    groups: dict[str, CellGroup] = {}
    for folder, outcome in outcomes.items():
        for cell in outcome.cells:
            name = f"{folder}/{cell.method}/{cell.partition}"
            if cell.result:
                one = groups.setdefault(name, CellGroup(name, outcome, cell.method, cell.partition, []))
                one.results.append(cell.result)
    return groups


def make_group_series(one: CellGroup) -> Series:
    """Make a series of the means over the finished seeds."""
    outcome, results = one.outcome, one.results
    points = mean_over_seeds([add_up(entry.point for entry in result.rounds) for result in results])
    peaks = [result.peak_rss_bytes for result in results if result.peak_rss_bytes is not None]
    evaluated = [point.accuracy for point in points if point.accuracy is not None]
    down, up = (
        fmean(sum((getattr(entry, field) or 0.0) * entry.accepted for entry in result.rounds) for result in results)
        for field in ("bytes_down", "bytes_up")
    )
    return Series(
        one.name,
        None,
        {
            "status": f"{len(results)} of {len(outcome.seeds)} seeds",
            "rounds": f"{max((point.round for point in points), default=0)} of {outcome.settings.get('rounds')}",
            "accuracy": evaluated[-1] if evaluated else None,
            "devices": outcome.settings.get("devices"),
            "bytes_down": down,
            "bytes_up": up,
            "peak_rss_bytes": max(peaks, default=None),  # of a process with all devices
            "energy_j": None,
        },
        _settings(outcome, one.method, one.partition),
        points,
    )


def _settings(outcome: ExperimentOutcome, method: str, partition: str) -> dict[str, Any]:
    """Return settings like those of a run: tables are flat, options of the method come under `options`."""
    own = outcome.methods.get(method, {})
    table = {key: value for key, value in outcome.settings.items() if key not in GRID}
    options = {key: value for key, value in own.items() if key != "method" and not isinstance(value, dict)}
    tables = {key: value for key, value in own.items() if isinstance(value, dict)}
    dealt = {"partition": {"name": partition, **outcome.settings.get("partitions", {}).get(partition, {})}}
    return dict(_flat({**table, **tables, "method": own.get("method", method), "options": options, **dealt}))


def _flat(table: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _make_point(entry: RoundView) -> Point:
    seconds = (entry.devices_s or 0.0) + (entry.server_s or 0.0)
    return Point(
        entry.round, entry.accuracy_mean, (entry.bytes_down + entry.bytes_up) / 1e6, entry.flops / 1e12, seconds
    )


def find_differences(chosen: list[Series]) -> dict[str, list[Any]]:
    """Find the settings that differ, with a value for each series; None: the default, or no such setting."""
    names = sorted({name for series in chosen for name in series.settings})
    settings = {name: [series.settings.get(name) for series in chosen] for name in names}
    return {name: values for name, values in settings.items() if any(value != values[0] for value in values)}
