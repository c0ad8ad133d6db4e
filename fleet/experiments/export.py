"""The work of `fleet results`."""

from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Group, RenderableType
from rich.text import Text

from fedvit.command_line import print_json
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import name_failure
from fleet.experiments.kept_results import write_kept_results
from fleet.experiments.paper_figures import FigureStyle, check_font
from fleet.experiments.report import terminal_report
from fleet.experiments.report_tables import describe_missing
from fleet.experiments.result_files import (
    describe_ranks,
    make_tests_section,
    read_results,
    write_csv,
    write_figures,
    write_latex,
)
from fleet.experiments.significance import SignedRankTest, rank_methods, run_signed_rank_tests
from profiles.report.console import Console
from profiles.report.experiment import ExperimentOutcome


class ExportFlags(NamedTuple):
    """The command's flags."""

    csv: bool
    latex: bool
    out: Path
    figures: Path | None
    form: str
    width_in: float
    font: str
    font_size: float
    band: str
    keep: Path | None
    wilcoxon: bool
    holm: bool
    as_json: bool


def export_results(experiment: str, flags: ExportFlags) -> None:
    """Write the files that are asked for, or show the report. Raises ConfigError, StorageFailed."""
    outcome = read_results(experiment)
    if not outcome.comparisons:
        raise ConfigError("FV2125", f"{outcome.experiment}: no cell is finished; {describe_missing(outcome)}")
    tests = run_signed_rank_tests(outcome, holm=flags.holm) if flags.wilcoxon or flags.holm else []
    written = _write_files(outcome, tests, flags)
    missing, ranks = describe_missing(outcome), rank_methods(outcome)
    if flags.as_json:
        tables = [test._asdict() for test in tests]
        print_json(
            {
                "experiment": outcome.experiment,
                "comparisons": outcome.comparisons,
                "unfinished": [cell.name for cell in outcome.cells if cell.result is None],
                "tests": tables,
                "ranks": ranks and ranks._asdict(),
                "written": [str(file) for file in written],
            }
        )
        return
    shown: list[RenderableType] = [] if written else [terminal_report(outcome), Text()]
    if tests:
        section = make_tests_section(outcome, tests)
        shown += [section.sheet.draw(section.title), Text(section.note, style="dim")]
    shown.append(Text(describe_ranks(ranks)))
    Console().print(Group(*shown))
    if written:
        click.echo(f"written: {', '.join(map(str, written))}")
        if missing:
            click.echo(missing)


def _write_files(outcome: ExperimentOutcome, tests: list[SignedRankTest], flags: ExportFlags) -> list[Path]:
    written: list[Path] = []
    if flags.csv:
        written += write_csv(outcome, tests, _make_folder(flags.out))
    if flags.latex:
        written += write_latex(outcome, tests, _make_folder(flags.out))
    if flags.figures:
        check_font(flags.font)
        style = FigureStyle(flags.form, flags.width_in, flags.font, flags.font_size, flags.band)
        written += write_figures(outcome, style, _make_folder(flags.figures))
    if flags.keep:
        written.append(write_kept_results(outcome, _make_folder(flags.keep)))
    return written


def _make_folder(folder: Path) -> Path:
    with name_failure(f"cannot write to {folder}", StorageFailed, "FV1701"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
