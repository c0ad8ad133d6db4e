"""Accuracy against one value of an experiment, such as the devices of a round: the figures of several papers."""

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from fleet.experiments.settings import RUN_KEYS, read_tune
from profiles.report.experiment import ExperimentOutcome, Interval, MethodComparison


class Point(NamedTuple):
    """Accuracy with one value of the option."""

    value: Any
    accuracy: float  # of late evaluations if the experiment has them, else of the last one
    interval: Interval | None  # over seeds; None for a single seed, and for late evaluations

    @property
    def errors(self) -> tuple[float, float]:
        """Lengths of the interval below and above the accuracy; 0 without an interval."""
        return (self.accuracy - self.interval.low, self.interval.high - self.accuracy) if self.interval else (0.0, 0.0)


class Line(NamedTuple):
    """Rows of the experiment that differ in the option alone."""

    name: str
    points: list[Point]


class Study(NamedTuple):
    """One picture, on partitions that differ at most in the option."""

    name: str  # of the partitions, as a part of a file's name
    option: str
    values: list[Any]  # numbers in their order, others as the file has them
    lines: list[Line]
    levels: dict[str, float]  # accuracy of methods that have no such option

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


class _Row(NamedTuple):
    entry: MethodComparison
    rest: dict[str, Any]  # all values of the method but the option


_NONE = object()


def make_studies(outcome: ExperimentOutcome) -> list[Study]:
    """Make a study for each group of partitions; none if the experiment names no option, or nothing is finished."""
    option = outcome.settings.get("across")
    if not option:
        return []
    partitions = outcome.settings["partitions"]
    # a method may have another option of this name: alpha
    is_of_partitions = len({table[option] for table in partitions.values() if option in table}) > 1
    groups: dict[str, list[tuple[Any, _Row]]] = {}
    for entry in outcome.comparisons:
        partition = dict(partitions[entry.partition])
        method = _list_values(outcome, entry.method)
        value = (partition if is_of_partitions else method).pop(option, _NONE)
        if isinstance(value, list | tuple):
            is_searched = option in read_tune(outcome.settings["methods"][entry.method])
            value = _NONE if is_searched else str([*value])
        groups.setdefault(_key(partition), []).append((value, _Row(entry, method)))
    return [_make_study(option, rows) for rows in groups.values()]


def _list_values(outcome: ExperimentOutcome, method: str) -> dict[str, Any]:
    """All values of a method's rows: its options, those of its model, and keys of the run."""
    table, general = outcome.settings["methods"][method], outcome.settings["model"]
    run = {"cohort": outcome.settings["cohort"], "model": general["name"]}
    run |= {key: table[key] for key in RUN_KEYS if key in table}
    options = {**({} if "model" in table else general["options"]), **run.pop("model_options", {})}
    return {**outcome.methods[method], **run, **options}


def _make_study(option: str, rows: Sequence[tuple[Any, _Row]]) -> Study:
    with_value = [(value, row) for value, row in rows if value is not _NONE and value is not None]
    values = list(dict.fromkeys(value for value, _ in with_value))
    by_rest: dict[str, list[tuple[Any, _Row]]] = {}
    for value, row in with_value:
        by_rest.setdefault(_key(row.rest), []).append((value, row))
    rests = [rows_of_line[0][1].rest for rows_of_line in by_rest.values()]
    lines = [
        Line(
            _name_line([row for _, row in rows_of_line], rests),
            [
                Point(value, _accuracy(row.entry), None if row.entry.late is not None else row.entry.interval)
                for value, row in rows_of_line
            ],
        )
        for rows_of_line in by_rest.values()
    ]
    partitions = list(dict.fromkeys(row.entry.partition for _, row in rows))
    study = Study(
        name=_shorten(partitions) or option,
        option=option,
        values=values,
        lines=lines,
        levels={row.entry.method: _accuracy(row.entry) for value, row in rows if value is _NONE or value is None},
    )
    if not study.is_numeric:
        return study
    ordered = [line._replace(points=sorted(line.points, key=lambda point: point.value)) for line in lines]
    return study._replace(values=sorted(values), lines=ordered)


def _accuracy(entry: MethodComparison) -> float:
    return entry.accuracy if entry.late is None else entry.late


def _name_line(rows: Sequence[_Row], rests: Sequence[dict[str, Any]]) -> str:
    """Name a line by what its rows' names begin with, or else by the values in which it differs from other lines."""
    if name := _shorten(list(dict.fromkeys(row.entry.method for row in rows))):
        return name
    rest = rows[0].rest
    own = [f"{key} = {value}" for key, value in rest.items() if any(other.get(key) != value for other in rests)]
    return ", ".join(own) or str(rest["method"])


def _shorten(names: Sequence[str]) -> str:
    """
    >>> _shorten(["fedtp-05", "fedtp-10"]), _shorten(["fedtp-05"]), _shorten(["attn", "mlp"])
    ('fedtp', 'fedtp-05', '')
    """
    if len(names) == 1:
        return names[0]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike).rstrip("-_.0123456789")


def _key(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)
