"""`fleet experiment`: a grid of methods, partitions and seeds from one file, compared on equal terms."""

from pathlib import Path
from typing import Any

import click

from fedvit.command_line import Command, json_flag
from fleet.experiments.settings import read_experiment


@click.command(
    "experiment",
    cls=Command,
    examples=["fleet experiment digits.toml --dry-run", "fleet experiment digits.toml --only 'fedavg/*'"],
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dataset", metavar="NAME|PATH", help="Data set in place of the one that FILE names.")
@click.option("--pretrained", metavar="PATH", help="Checkpoint in place of the one that FILE names.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for everything.  [default: experiments/NAME]")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Cells that run at the same time.  [default: 1; with --ray as many as fit on the nodes]",
)
@click.option("--ray", "address", metavar="HOST:PORT|local", help="Run cells on the nodes of a Ray cluster.")
@click.option(
    "--only", multiple=True, metavar="METHOD/PARTITION", help="Only these cells; * stands for any. Repeatable."
)
@click.option("--keep", is_flag=True, help="Keep what devices stored, also of cells that are finished.")
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="Compile steps of engine torch by g++: takes a minute or two, and speeds up long runs of small models.",
)
@click.option("--dry-run", is_flag=True, help="Check the file, list the cells, run nothing.")
@json_flag
def experiment_command(file: Path, dataset: str | None, pretrained: str | None, **flags: Any) -> None:
    """Run the grid that FILE describes, over a network in memory; finished cells are not run again."""
    experiment = read_experiment(file, dataset, pretrained)
    from fleet.experiments.command import ExperimentFlags, run_experiment  # torch: a wrong name need not wait for it

    run_experiment(experiment, ExperimentFlags(**flags))
