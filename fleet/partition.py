"""Deal a data set out into one folder per device, ready for edge clients on this or other machines."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedvit.data import SOURCES, read_samples
from fedvit.data.images import Indices
from fedvit.data.layout import TEST, TRAIN
from fedvit.data.partition import PARTITIONS, make_partition, partition, split_train_test
from fedvit.data.samples import Samples
from fedvit.errors import ConfigError, DataError, StorageFailed

SUMMARY_FILE = "partition.json"

_TABLE_CLASSES = 10  # with more, a column per class does not fit into 80 characters


class DeviceCounts(Struct, frozen=True):
    """How many images of each class a device's folder holds; every class is listed."""

    name: str
    train: dict[str, int]
    test: dict[str, int]

    def total(self, class_name: str) -> int:
        return self.train[class_name] + self.test[class_name]


class PartitionSummary(Struct, frozen=True, kw_only=True):
    """What was written and how to write it again; the content of `partition.json`."""

    dataset: str
    classes: tuple[str, ...]
    size: int
    partition: str | None  # None: the caller dealt the samples out by a rule of its own
    options: dict[str, bool | int | float]
    seed: int
    test_share: float
    devices: tuple[DeviceCounts, ...]
    unreadable: tuple[str, ...] = ()  # what was left out and why, one line each


def write_device_folders(
    samples: Samples,
    parts: Sequence[Indices],
    out: Path,
    *,
    test_share: float,
    seed: int,
    partition: str | None = None,
    options: Mapping[str, bool | int | float] | None = None,
    overwrite: bool = False,
) -> PartitionSummary:
    """Write `out/device-0/train/<class>/0000.png`, `.../test/...` and so on, and `out/partition.json`.

    Every device gets a folder for every class, also for those that it has no image of, so that all devices
    name the same classes. Images that cannot be decoded are left out and listed in the summary.
    `partition` and `options` only go into the summary.

    `out` appears when it is complete; a run that breaks leaves what was there before. Raises ConfigError
    when `out` is a file or holds something, unless `overwrite` is set and `out` is an earlier partition;
    StorageFailed when the disk is full or not writable.
    """
    _refuse_occupied(out, overwrite)
    out = out.resolve()  # behind a symlink, renaming works only beside the folder itself
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        unreadable = list(samples.unreadable)
        devices = []
        for number, part in enumerate(parts):
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
            train, test = split_train_test(part, samples.labels, test_share, rng)
            folder = partial / f"device-{number}"
            devices.append(
                DeviceCounts(
                    folder.name,
                    _write_classes(samples, train, folder / TRAIN, unreadable),
                    _write_classes(samples, test, folder / TEST, unreadable),
                )
            )
        summary = PartitionSummary(
            dataset=samples.dataset,
            classes=samples.classes,
            size=samples.size,
            partition=partition,
            options=dict(options or {}),
            seed=seed,
            test_share=test_share,
            devices=tuple(devices),
            unreadable=tuple(unreadable),
        )
        (partial / SUMMARY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        _put_in_place(partial, out)
    except OSError as error:
        raise StorageFailed(f"cannot write device folders to {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def summary_table(summary: PartitionSummary) -> Table:
    """Who got what, for a terminal: images per device, and of each class where the classes are few."""
    many = len(summary.classes) > _TABLE_CLASSES
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in ("device", TRAIN, TEST):
        table.add_column(heading, justify="left" if heading == "device" else "right", no_wrap=True)
    for heading in ("classes", "most of") if many else map(_short, summary.classes):
        # Text: brackets in a class name are no markup
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for device in summary.devices:
        totals = {name: device.total(name) for name in summary.classes}
        held = [name for name in summary.classes if totals[name]]
        if many:
            cells = [Text(str(len(held))), Text(max(held, key=totals.__getitem__, default=""))]
        else:
            cells = [Text(str(totals[name] or "·"), style="dim") for name in summary.classes]
        table.add_row(device.name, str(sum(device.train.values())), str(sum(device.test.values())), *cells)
    return table


@click.command("partition")
@click.option(
    "--dataset",
    default="digits",
    show_default=True,
    metavar="NAME|PATH",
    help=f"A known data set ({', '.join(SOURCES)}), or a folder or .zip with train/<class>/ and test/<class>/,"
    " or <class>/, full of images.",
)
@click.option("--devices", default=4, show_default=True, type=click.IntRange(min=1), help="How many device folders.")
@click.option(
    "--partition",
    "name",
    default="dirichlet",
    show_default=True,
    type=click.Choice(list(PARTITIONS)),
    help="How samples are dealt out.",
)
@click.option("--alpha", type=float, help="dirichlet: small gives each device few classes.  [default: 0.3]")
@click.option("--min-samples", type=click.IntRange(min=0), help="dirichlet: the least a device gets.  [default: 10]")
@click.option("--cap/--no-cap", default=None, help="dirichlet: level the sizes of devices.  [default: no-cap]")
@click.option("--out", default="parts", show_default=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Same seed, same folders.")
@click.option(
    "--test-share",
    default=0.2,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of each class that a device tests with.",
)
@click.option("--size", default=32, show_default=True, type=click.IntRange(min=1), help="Side of the images, pixels.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier partition in --out.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def partition_command(
    dataset: str,
    devices: int,
    name: str,
    alpha: float | None,
    min_samples: int | None,
    cap: bool | None,
    out: Path,
    seed: int,
    test_share: float,
    size: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Deal a data set out into one folder per device."""
    given = {"alpha": alpha, "min_samples": min_samples, "cap": cap}
    options = {option: value for option, value in given.items() if value is not None}
    complete = asdict(make_partition(name, **options))
    _refuse_occupied(out, overwrite)  # before minutes go into reading a large data set
    samples = read_samples(dataset, size)
    parts = partition(name, samples.labels, devices, seed, **options)
    summary = write_device_folders(
        samples,
        parts,
        out,
        test_share=test_share,
        seed=seed,
        partition=name,
        options=complete,
        overwrite=overwrite,
    )
    if as_json:
        click.echo(msgspec.json.encode(summary))
        return
    Console().print(summary_table(summary))
    if summary.unreadable:
        click.echo(f"left out {len(summary.unreadable)} images, the first: {summary.unreadable[0]}")
    click.echo(f"{summary.dataset} dealt out to {len(summary.devices)} devices in {out}")


def _refuse_occupied(out: Path, overwrite: bool) -> None:
    """Raises ConfigError unless `out` is free, or an earlier partition that may be overwritten."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, expected a folder to write device folders to")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{out} is not empty; choose another folder, or overwrite it (--overwrite)")
    if not (out / SUMMARY_FILE).is_file():
        # a mistyped path must not cost somebody a home folder
        raise ConfigError(f"{out} holds no {SUMMARY_FILE}, so it is no earlier partition and is not overwritten")


def _write_classes(samples: Samples, rows: Indices, folder: Path, unreadable: list[str]) -> dict[str, int]:
    """Write the images into class folders; how many of each class could be written."""
    counts = {}
    for label, name in enumerate(samples.classes):
        (folder / name).mkdir(parents=True)
        counts[name] = 0
        for row in rows[samples.labels[rows] == label]:
            try:
                (pixels,) = samples.images[np.array([row])]
            except DataError as error:
                unreadable.append(str(error))
                continue
            Image.fromarray(pixels).save(folder / name / f"{counts[name]:04d}.png")
            counts[name] += 1
    return counts


def _short(name: str) -> str:
    """A class name no wider than the numbers below it."""
    return name if len(name) <= 4 else f"{name[:3]}…"


def _put_in_place(partial: Path, out: Path) -> None:
    if not out.is_dir():
        partial.rename(out)
        return
    replaced = out.with_name(f".{out.name}.{os.getpid()}.replaced")
    out.rename(replaced)
    try:
        partial.rename(out)
    except OSError:
        replaced.rename(out)
        raise
    shutil.rmtree(replaced)
