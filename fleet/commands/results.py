"""`fleet results`: the results of an experiment for a paper."""

from pathlib import Path
from typing import Any

import click

from fedvit.command_line import Command, json_flag


@click.command(
    "results",
    cls=Command,
    examples=["fleet results digits --csv --latex", "fleet results digits --figures figures --format svg --width 5"],
)
@click.argument("experiment")
@click.option("--csv", is_flag=True, help="Write methods, cells, rounds and devices as CSV.")
@click.option("--latex", is_flag=True, help="Write the report's tables for LaTeX with booktabs.")
@click.option("--out", type=click.Path(path_type=Path), default="tables", help="Folder of CSV and LaTeX files.")
@click.option("--figures", metavar="DIR", type=click.Path(path_type=Path), help="Draw curves, bars and ranks there.")
@click.option("--format", "form", type=click.Choice(["pdf", "svg"]), default="pdf", help="Of figures.")
@click.option("--width", "width_in", type=click.FloatRange(1, 40), default=3.3, help="Of a figure, inches.")
@click.option("--font", default="serif", help="Font of figures; it must be installed.")
@click.option("--font-size", type=click.FloatRange(4, 40), default=8.0, help="Points.")
@click.option(
    "--band",
    type=click.Choice(["interval", "deviation", "range"]),
    default="interval",
    help="Band of curves over seeds: 95% interval of the mean, standard deviation, or all seeds.",
)
@click.option(
    "--keep", metavar="DIR", type=click.Path(path_type=Path), help="Write means and differences as small JSON."
)
@click.option("--wilcoxon", is_flag=True, help="Test each method against the reference: signed ranks over cells.")
@click.option("--holm", is_flag=True, help="Correct these tests for the number of methods; implies --wilcoxon.")
@json_flag
def results_command(experiment: str, **flags: Any) -> None:
    """Write the results of an experiment as CSV, LaTeX tables and figures; without flags show them."""
    from fleet.experiments.export import ExportFlags, export_results  # scipy.stats and matplotlib take seconds

    export_results(experiment, ExportFlags(**flags))
