"""`fleet partition`: a data set as one folder per device."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError
from fleet.datasets import SOURCES
from fleet.datasets.columns import make_columns
from fleet.partition import OFFICIAL, DealSettings, Official, deal
from fleet.partition_plot import bar_lines, count_matrix, summary_table, write_plot
from fleet.partitions import PARTITIONS, Option
from profiles.report.console import Console

PLOT_FILE = "partition.png"


def _option_help() -> str:
    listed = (
        f"{name}: {', '.join(f'{option}={_as_text(value)}' for option, value in options.items())}"
        for name, kind in PARTITIONS.items()
        if (options := asdict(kind()))
    )
    return f"Option of the partition; repeatable. Defaults: {'; '.join(listed)}."


def _as_text(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _merge_options(pairs: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both ways to set an option. Raises ConfigError for one that is set twice."""
    options = {option: value for option, value in flags.items() if value is not None}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError("FV1003", f"partition option {pair!r} must be written KEY=VALUE")
        if option in options:
            raise ConfigError("FV1003", f"partition option {option} is given twice: {options[option]} and {value}")
        options[option] = value
    return options


def read_share(_: click.Context, option: click.Parameter, text: str) -> float | Official:
    """Read a share of 0 to 1, or "official". Raises BadParameter."""
    try:
        share = OFFICIAL if text == OFFICIAL else float(text)
    except ValueError:
        share = -1.0
    if share == OFFICIAL or 0 <= share < 1:
        return share
    raise click.BadParameter(f"{text!r} is neither {OFFICIAL} nor a share of 0 to 1", param=option)


@click.command("partition", cls=Command, examples=["fleet partition --devices 6 --alpha 0.1 --plot --out parts"])
@click.option(
    "--dataset",
    default="digits",
    show_default=True,
    metavar="NAME|PATH",
    help=f"A known data set ({', '.join(SOURCES)}), or the path of one: class folders (also as .zip), domain folders,"
    " CIFAR-10 or -100, MNIST's idx files, .npz, Parquet, CSV, saved data sets, PFLlib's folders, a .txt of speaking"
    " roles, LEAF's .json.",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="PURPOSE=NAME",
    help="Column of Parquet, CSV or a saved data set for image, label, coarse_label or domain; repeatable.",
)
@click.option("--devices", default=4, show_default=True, type=click.IntRange(min=1), help="How many device folders.")
@click.option(
    "--partition",
    "name",
    default="dirichlet",
    show_default=True,
    metavar="|".join((*PARTITIONS, "NAME")),
    help="How samples are dealt out; NAME: by a partition of an installed package.",
)
@click.option("-p", "pairs", multiple=True, metavar="KEY=VALUE", help=_option_help())
@click.option("--alpha", type=float, help="Short for -p alpha=...")
@click.option("--min-samples", type=int, help="Short for -p min_samples=...")
@click.option("--cap/--no-cap", default=None, help="Short for -p cap=...")
@click.option("--out", default="parts", show_default=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Same seed, same folders.")
@click.option(
    "--test-share",
    default="0.2",
    show_default=True,
    metavar="SHARE|official",
    callback=read_share,
    help="Share of each class that a device tests with, or the test images of the data set's own split.",
)
@click.option(
    "--validation-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Devices test with this share of their training images instead, and get no test image.",
)
@click.option(
    "--size",
    type=click.IntRange(min=1),
    help="Side of the images, pixels (32), or characters of a text that a prediction may read (80).",
)
@click.option("--classes", type=click.IntRange(min=1), help="Deal out images of the most frequent classes alone.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier partition in --out.")
@click.option("--plot", is_flag=True, help=f"Draw images by device and class, here and as {PLOT_FILE} in --out.")
@json_flag
def partition_command(out: Path, name: str, devices: int, plot: bool, as_json: bool, **flags: Any) -> None:
    """Deal a data set out into one folder per device."""
    short = {option: flags.pop(option) for option in ("alpha", "min_samples", "cap")}
    dataset, options = flags.pop("dataset"), _merge_options(flags.pop("pairs"), short)
    flags["columns"] = make_columns(_merge_options(flags["columns"], {}))
    summary = deal(dataset, name, devices, out, DealSettings(options, **flags))
    if plot:
        write_plot(summary, out / PLOT_FILE)
    if as_json:
        click.echo(msgspec.json.encode(summary).decode())
        return
    Console().print(summary_table(summary))
    if plot:
        click.echo()
        for line in bar_lines([device.name for device in summary.devices], count_matrix(summary)):
            click.echo(line)
        click.echo(f"picture: {out / PLOT_FILE}")
    if summary.unreadable:
        click.echo(f"left out {len(summary.unreadable)} images, the first: {summary.unreadable[0]}")
    click.echo(f"{summary.dataset} dealt out to {len(summary.devices)} devices in {out}")
