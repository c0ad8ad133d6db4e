"""The results of an experiment as files for other programs: CSV, tables in LaTeX, figures."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write
from fedvit.wire.topics import is_name
from fleet.experiments.across import make_studies
from fleet.experiments.outcome import CONFIDENCE, find_leader
from fleet.experiments.paper_figures import FigureStyle, write_bars, write_curves, write_novel, write_ranks, write_study
from fleet.experiments.report_tables import (
    COST_UNITS,
    LEADER,
    ReportSection,
    accuracy_sheet,
    cost_sheet,
    describe_missing,
    describe_spread,
    make_sections,
    make_sheet,
    protocol_lines,
)
from fleet.experiments.significance import MethodRanks, SignedRankTest, rank_methods
from profiles.report.curves import RoundFigures
from profiles.report.experiment import RESULTS_FILE, CellOutcome, ExperimentOutcome, MethodComparison
from profiles.report.tables import Column, Sheet

MOST_BYTES = 1 << 30
"""Largest file of results that is read; pictures are most of one."""

SOURCE = "% fleet results; the document needs \\usepackage{booktabs}\n"
TESTS = (
    "Wilcoxon's signed-rank test against {reference}, two-sided, over cells of the same partition and seed; the median"
    " is that of the differences in accuracy{correction}"
)
HOLM = "; p (Holm) is corrected for the number of methods"


class MethodRow(NamedTuple):
    """A line of `methods.csv`."""

    entry: MethodComparison
    outcome: ExperimentOutcome

    @property
    def is_leader(self) -> bool:
        return find_leader(self.outcome, self.entry.partition) == self.entry.method

    @property
    def difference(self) -> Any:
        return self.outcome.difference(self.entry.method, self.entry.partition)


class RoundRow(NamedTuple):
    """A line of `rounds.csv`."""

    cell: CellOutcome
    figures: RoundFigures


class DeviceRow(NamedTuple):
    """A line of `devices.csv`."""

    cell: CellOutcome
    device: str
    accuracy: float

    @property
    def balanced_accuracy(self) -> float | None:
        return self.cell.result.balanced_by_device.get(self.device) if self.cell.result else None

    @property
    def macro_f1(self) -> float | None:
        return self.cell.result.macro_f1_by_device.get(self.device) if self.cell.result else None

    @property
    def auc(self) -> float | None:
        return self.cell.result.auc_by_device.get(self.device) if self.cell.result else None


def read_results(experiment: str) -> ExperimentOutcome:
    """Read the results of an experiment: its folder, its name in `experiments/`, its TOML file, or results.json.

    Raises ConfigError naming what was looked for.
    """
    named = Path(experiment)
    default = Path("experiments") / (named.stem if named.suffix == ".toml" else named.name)
    tried = [named, named / RESULTS_FILE, default / RESULTS_FILE]
    file = next((file for file in tried if file.is_file() and file.suffix == ".json"), None)
    if file is None:
        looked = " and ".join(str(file.parent) for file in tried[1:])
        raise ConfigError(
            "FV2125", f"there are no results of an experiment {experiment!r}: no {RESULTS_FILE} in {looked}"
        )
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ConfigError("FV2125", f"{file} has {file.stat().st_size} bytes, more than {MOST_BYTES}")
        outcome = msgspec.json.decode(file.read_bytes(), type=ExperimentOutcome)
    except OSError as error:
        raise StorageFailed("FV1701", f"cannot read {file}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError("FV2125", f"{file} has no results of this version: {error}") from None
    _check_names(outcome, file)
    return outcome


def _check_names(outcome: ExperimentOutcome, file: Path) -> None:
    """Check the names that become parts of files. Raises ConfigError."""
    partitions, option = outcome.partitions, outcome.settings.get("across")
    for name in (
        outcome.experiment.replace(" ", "-"),
        *outcome.methods,
        *partitions,
        *([str(option)] if option else []),
    ):
        if not is_name(name):
            raise ConfigError("FV2125", f"{file}: {name[:80]!r} is not the name of a method, partition or experiment")
    if outcome.methods and outcome.reference not in outcome.methods:
        raise ConfigError("FV2125", f"{file}: the reference {outcome.reference!r} is not one of the methods")
    named = [(cell.method, cell.partition) for cell in outcome.cells]
    for method, partition in (*named, *((entry.method, entry.partition) for entry in outcome.comparisons)):
        if method not in outcome.methods or partition not in partitions:
            raise ConfigError("FV2125", f"{file}: unknown method or partition: {method[:80]}/{partition[:80]}")


def write_csv(outcome: ExperimentOutcome, tests: list[SignedRankTest], folder: Path) -> list[Path]:
    """Write a line for each method and partition, cell, round of a cell, device of a cell, and test."""
    finished = [cell for cell in outcome.cells if cell.result]
    sheets = {
        "methods": Sheet([MethodRow(entry, outcome) for entry in outcome.comparisons], _METHOD_COLUMNS),
        "cells": Sheet(outcome.cells, _CELL_COLUMNS),
        "rounds": Sheet(
            [RoundRow(cell, figures) for cell in finished for figures in (cell.result.rounds if cell.result else ())],
            _ROUND_COLUMNS,
        ),
        "devices": Sheet(
            [
                DeviceRow(cell, device, accuracy)
                for cell in finished
                for device, accuracy in (cell.result.accuracy_by_device.items() if cell.result else ())
            ],
            _DEVICE_COLUMNS,
        ),
    }
    if tests:
        sheets["tests"] = Sheet(tests, [Column(name, name) for name in SignedRankTest._fields])
    return [_write(folder / f"{name}.csv", sheet.csv()) for name, sheet in sheets.items()]


def write_latex(outcome: ExperimentOutcome, tests: list[SignedRankTest], folder: Path) -> list[Path]:
    """Write the tables of the report, one a file; the caption tells which cells are not finished."""
    notes = [describe_spread(outcome), LEADER, *protocol_lines(outcome)]
    cost_section = ReportSection("costs", "costs", cost_sheet(outcome), COST_UNITS)
    sections = [
        ReportSection(
            "accuracy",
            f"{outcome.experiment}: accuracy",
            accuracy_sheet(outcome),
            ". ".join(f"{note[0].upper()}{note[1:]}" for note in notes),
        ),
        *make_sections(outcome),
        cost_section,
        *([make_tests_section(outcome, tests)] if tests else []),
    ]
    missing = describe_missing(outcome)
    written = []
    for section in sections:
        notes_below = [f"{text[0].upper()}{text[1:]}" for text in (section.note, missing) if text]
        caption = ". ".join([section.title, *notes_below])
        label = f"tab:{outcome.experiment.replace(' ', '-')}-{section.name}"
        written.append(_write(folder / f"{section.name}.tex", SOURCE + section.sheet.latex(f"{caption}.", label)))
    return written


def write_figures(outcome: ExperimentOutcome, style: FigureStyle, folder: Path) -> list[Path]:
    """Write curves and bars of every partition with results, curves of novel devices, accuracy against the
    experiment's option, and ranks if there are two blocks or more."""
    written = []
    for partition in dict.fromkeys(entry.partition for entry in outcome.comparisons):
        for name, write in (("curves", write_curves), ("bars", write_bars)):
            file = folder / f"{name}-{partition}.{style.form}"
            write(outcome, partition, style, file)
            written.append(file)
        if any(len(entry.novel_rounds) > 1 for entry in outcome.comparisons if entry.partition == partition):
            written.append(folder / f"novel-{partition}.{style.form}")
            write_novel(outcome, partition, style, written[-1])
    for study in make_studies(outcome):
        written.append(folder / f"across-{study.name}.{style.form}")
        write_study(study, style, written[-1])
    if ranks := rank_methods(outcome):
        file = folder / f"ranks.{style.form}"
        write_ranks(ranks, style, file)
        written.append(file)
    return written


def describe_ranks(ranks: MethodRanks | None) -> str:
    """A line on the ranks, or the reason why there are none."""
    if ranks is None:
        return "ranks: need two methods, and two pairs of partition and seed that every method has finished"
    friedman = "" if ranks.friedman_p is None else f"; Friedman's test: p = {ranks.friedman_p:.3g}"
    return (
        f"ranks over {ranks.blocks} pairs of partition and seed: critical difference {ranks.critical_difference:.3f}"
        f" (Nemenyi, {CONFIDENCE:.0%}){friedman}"
    )


def make_tests_section(outcome: ExperimentOutcome, tests: list[SignedRankTest]) -> ReportSection:
    """Make the table of tests."""
    is_corrected = any(test.p_holm is not None for test in tests)
    headings = ("method", "pairs", "better", "worse", "median", "p", *(["p (Holm)"] if is_corrected else []))
    rows = [
        (
            test.method,
            *map(str, (test.pairs, test.better, test.worse)),
            "-" if test.median is None else f"{test.median:+.3f}",
            *(_format_p(p) for p in ((test.p, test.p_holm) if is_corrected else (test.p,))),
        )
        for test in tests
    ]
    note = TESTS.format(reference=outcome.reference, correction=HOLM if is_corrected else "")
    return ReportSection("tests", f"{outcome.experiment}: tests", make_sheet(headings, rows), note)


def _format_p(p: float | None) -> str:
    return "-" if p is None else f"{p:.3g}"


def _write(file: Path, text: str) -> Path:
    atomic_write(file, text.encode())
    return file


def _take(path: str) -> Any:
    """Make a function that reads an attribute of an attribute; None where the first one is None."""
    head, _, tail = path.partition(".")

    def read(row: Any) -> Any:
        value = getattr(row, head)
        return value if value is None or not tail else _take(tail)(value)

    return read


def _columns(**paths: str) -> list[Column]:
    return [Column(name, name, _take(path)) for name, path in paths.items()]


_METHOD_COLUMNS = _columns(
    method="entry.method", partition="entry.partition", accuracy="entry.accuracy",
    std_over_seeds="entry.std_over_seeds", interval_low="entry.interval.low", interval_high="entry.interval.high",
    is_leader="is_leader", std_over_devices="entry.std_over_devices", accuracy_by_image="entry.accuracy_weighted",
    difference="difference.mean", difference_low="difference.interval.low", difference_high="difference.interval.high",
    balanced_accuracy="entry.balanced_accuracy", macro_f1="entry.macro_f1", auc="entry.auc",
    generic="entry.generic", novel="entry.novel", late="entry.late", rounds_to_target="entry.rounds_to_target",
    seconds_to_target="entry.seconds_to_target",
    bytes_down="entry.bytes_down", bytes_up="entry.bytes_up", flops="entry.flops", wall_s="entry.wall_s",
    peak_rss_bytes="entry.peak_rss_bytes",
)  # fmt: skip
_METHOD_COLUMNS[2:2] = [
    Column("seeds", "seeds", lambda row: len(row.entry.seeds)),
    Column("seeds_of", "seeds_of", lambda row: len(row.outcome.seeds)),
]
_CELL_COLUMNS = _columns(
    method="method", partition="partition", seed="seed", state="state", failure="failure",
    accuracy="result.accuracy.mean", std_over_devices="result.accuracy.std_over_devices",
    accuracy_by_image="result.accuracy.weighted", generic="result.generic_accuracy", novel="result.novel.mean",
    bytes_down="result.bytes_down", bytes_up="result.bytes_up", flops="result.flops", wall_s="result.wall_s",
    peak_rss_bytes="result.peak_rss_bytes", epsilon="result.epsilon",
)  # fmt: skip
_ROUND_COLUMNS = _columns(
    method="cell.method", partition="cell.partition", seed="cell.seed", round="figures.round",
    accuracy="figures.accuracy.mean", std_over_devices="figures.accuracy.std_over_devices",
    accuracy_by_image="figures.accuracy.weighted", train_loss="figures.train_loss", bytes_down="figures.bytes_down",
    bytes_up="figures.bytes_up", flops="figures.flops", took_s="figures.took_s",
)  # fmt: skip
_DEVICE_COLUMNS = _columns(
    method="cell.method", partition="cell.partition", seed="cell.seed", device="device", accuracy="accuracy",
    balanced_accuracy="balanced_accuracy", macro_f1="macro_f1", auc="auc",
)  # fmt: skip
