"""Deal a data set out into one folder per device, ready for edge clients on this or other machines."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image
from rich import box
from rich.table import Table
from rich.text import Text

from fedvit.command_line import Command, json_flag
from fedvit.data.images import Indices, Pixels
from fedvit.data.layout import PARTITION_FILE, TEST, TRAIN
from fedvit.data.split import split_train_test
from fedvit.data.text import character_name, write_texts
from fedvit.errors import ConfigError, DataError, StorageFailed
from fleet.datasets import SOURCES, read_dataset
from fleet.datasets.samples import Samples
from fleet.datasets.texts import Texts
from fleet.partition_plot import Counts, bar_lines, draw_bubbles
from fleet.partitions import (
    PARTITIONS,
    Option,
    deal_out,
    make_partition,
    partition_options,
)
from fleet.partitions.dealing import refuse_empty
from fleet.partitions.feature_noise import add_noise
from fleet.partitions.natural import Natural
from profiles.report.console import Console

PLOT_FILE = "partition.png"
GLOBAL_TEST = "global-test"
"""Folder beside those of devices: class folders of images that no device has."""

_TABLE_CLASSES = 10  # with more, a column per class does not fit into 80 characters


class DeviceCounts(Struct, frozen=True):
    """How many images, or characters, of each class a device's folder holds; every class is listed."""

    name: str
    train: dict[str, int]
    test: dict[str, int]
    noise_std: float = 0.0  # of the noise added to its images, gray levels of 0..255
    source: str | None = None  # of a text: the role or the user that the device has

    def total(self, class_name: str) -> int:
        return self.train[class_name] + self.test[class_name]


class PartitionSummary(Struct, frozen=True, kw_only=True):
    """A written partition and its settings; the content of `partition.json`."""

    dataset: str
    classes: tuple[str, ...]
    size: int  # side of the images, pixels; of a text the characters of context
    partition: str | None  # None: the caller dealt the samples out
    options: dict[str, Option]
    seed: int
    test_share: float
    devices: tuple[DeviceCounts, ...]
    validation_share: float | None = None  # where it is set, "test" images are of the training images
    global_test: float | None = None  # share of each class that no device has
    domains: tuple[str, ...] = ()  # of the data set, in the order of the partition `domain`
    unreadable: tuple[str, ...] = ()  # images that were left out, with the reason


def deal(
    dataset: str | Samples | Texts,
    partition: str,
    devices: int,
    out: Path,
    *,
    options: Mapping[str, Option | str] | None = None,
    seed: int = 0,
    test_share: float = 0.2,
    validation_share: float | None = None,
    global_test: float | None = None,
    size: int | None = None,
    overwrite: bool = False,
    plot: bool = False,
) -> PartitionSummary:
    """Deal a data set out by a partition of `PARTITIONS` and write a folder per device, as `fleet partition` does.

    `dataset` is a name, a path, or samples already read; `size`, the side of images in pixels (None: 32) or the context
    of a text in characters (None: 80), is for the first two. `validation_share` is as for `write_device_folders`.
    `global_test` is the share of each class of images that is set apart before the rest is dealt out, in class folders
    in `out`/GLOBAL_TEST. With `plot` a picture lies beside the folders. The same arguments write the same files.
    Raises ConfigError for bad values and where `out` is occupied, DataError for an unusable data set,
    StorageFailed when the disk is full or not writable.
    """
    rule = make_partition(partition, **(options or {}))
    _refuse_occupied(out, overwrite)  # before reading a large data set takes minutes
    samples = read_dataset(dataset, size) if isinstance(dataset, str) else dataset
    if isinstance(samples, Texts):
        if not isinstance(rule, Natural):
            raise ConfigError(f"partition {partition} deals out single samples, which tears a text apart; use natural")
        if global_test is not None:
            raise ConfigError(f"global_test = {global_test} sets images apart, and {samples.dataset} is a text")
        summary = write_text_folders(
            samples,
            deal_out(rule, samples.annotations, devices, seed),
            out,
            test_share=test_share,
            validation_share=validation_share,
            seed=seed,
            options=asdict(rule),
            overwrite=overwrite,
        )
    else:
        everything = np.arange(len(samples), dtype=np.int64)
        # a stream of its own: devices have 0, 1, ...
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(devices,)))
        dealt, apart = split_train_test(everything, samples.labels, global_test or 0.0, rng)
        summary = write_device_folders(
            samples,
            [dealt[part] for part in deal_out(rule, samples.annotations.rows(dealt), devices, seed)],
            out,
            test_share=test_share,
            validation_share=validation_share,
            seed=seed,
            partition=partition,
            options=asdict(rule),
            apart=apart if global_test else None,
            global_test=global_test,
            noise_stds=[rule.noise_std(device, devices) for device in range(devices)],
            overwrite=overwrite,
        )
    if plot:
        write_plot(summary, out / PLOT_FILE)
    return summary


def write_device_folders(
    samples: Samples,
    parts: Sequence[Indices],
    out: Path,
    *,
    test_share: float,
    seed: int,
    validation_share: float | None = None,
    partition: str | None = None,
    options: Mapping[str, Option] | None = None,
    noise_stds: Sequence[float] | None = None,
    apart: Indices | None = None,
    global_test: float | None = None,
    overwrite: bool = False,
) -> PartitionSummary:
    """Write `out/device-0/train/<class>/0000.png`, `.../test/...` and so on, and `out/partition.json`.

    Every device gets a folder for every class, even without images of it, so that all devices have the same classes.
    Images that cannot be decoded are left out and listed in the summary. With `validation_share` devices train on a
    part of their training images, validate on that share of each class, and get no test images: for a search that must
    not use test images. `noise_stds` has the noise of each device's images, in gray levels of 0..255. `apart` are
    images of no device, for `out/global-test/<class>/`. `partition`, `options` and `global_test` are only written into
    the summary.

    `out` appears when it is complete; after a failure its earlier content is unchanged. Raises ConfigError when `out`
    is a file or not empty, unless `overwrite` is set and `out` is an earlier partition, when a device has no image,
    and when it has too few training images for a validation image; StorageFailed when the disk is full or not
    writable.
    """
    parts = refuse_empty(partition or "by hand", parts)
    with _new_folder(out, overwrite) as partial:
        unreadable = list(samples.unreadable)
        devices = []
        for number, part in enumerate(parts):
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
            train, test = split_train_test(part, samples.labels, test_share, rng)
            folder = partial / f"device-{number}"
            if validation_share is not None:
                held = len(train)
                train, test = split_train_test(train, samples.labels, validation_share, rng)
                if not len(test):
                    raise ConfigError(
                        f"validation_share = {validation_share} leaves {folder.name} without a validation image: its"
                        f" {held} training images are of {held} classes, and one of each class has to train; give"
                        " devices more images"
                    )
            noise = _Noise(noise_stds[number] if noise_stds else 0.0, seed)
            devices.append(
                DeviceCounts(
                    folder.name,
                    _write_classes(samples, train, folder / TRAIN, noise, unreadable),
                    _write_classes(samples, test, folder / TEST, noise, unreadable),
                    noise.std,
                )
            )
        if apart is not None:
            _write_classes(samples, apart, partial / GLOBAL_TEST, _Noise(0.0, seed), unreadable)
        summary = PartitionSummary(
            dataset=samples.dataset,
            classes=samples.classes,
            size=samples.size,
            partition=partition,
            options=dict(options or {}),
            seed=seed,
            test_share=test_share,
            validation_share=validation_share,
            global_test=global_test,
            devices=tuple(devices),
            domains=samples.domain_names,
            unreadable=tuple(unreadable),
        )
        _write_summary(summary, partial)
    return summary


def write_text_folders(
    texts: Texts,
    parts: Sequence[Indices],
    out: Path,
    *,
    test_share: float,
    seed: int,
    validation_share: float | None = None,
    options: Mapping[str, Option] | None = None,
    overwrite: bool = False,
) -> PartitionSummary:
    """Write `out/device-0/train.txt`, `test.txt` and `text.json` and so on, and `out/partition.json`.

    The last `test_share` of a device's text is for testing; `validation_share` is as for `write_device_folders`. Raises
    ConfigError when a device has too little text for a sample of each kind, and what `write_device_folders` raises.
    """
    if not 0 <= test_share < 1:
        raise ConfigError(f"test share is {test_share}, expected a number in [0, 1)")
    least = texts.settings.context + 1
    with _new_folder(out, overwrite) as partial:
        devices = []
        for number, rows in enumerate(parts):
            source = texts.source_names[texts.sources[rows[0]]]
            train, test = _cut(texts.text(rows), test_share, least)
            if validation_share is not None:
                train, test = _cut(train, validation_share, least)
            for what, text in (("training", train), ("testing", test)):
                if len(text) < least and (text or what == "training" or validation_share is not None):
                    raise ConfigError(
                        f"device-{number} has too little text: of the {len(rows)} characters of {source!r} {len(text)}"
                        f" are for {what}, and a sample takes {least}; raise min_samples, or shorten the context"
                    )
            write_texts(partial / f"device-{number}", texts.settings, ((TRAIN, train), (TEST, test)))
            held, tested = (_characters(text, texts.classes) for text in (train, test))
            devices.append(DeviceCounts(f"device-{number}", held, tested, source=source))
        summary = PartitionSummary(
            dataset=texts.dataset,
            classes=texts.classes,
            size=texts.settings.context,
            partition="natural",
            options=dict(options or {}),
            seed=seed,
            test_share=test_share,
            validation_share=validation_share,
            devices=tuple(devices),
        )
        _write_summary(summary, partial)
    return summary


def _cut(text: str, share: float, sample: int) -> tuple[str, str]:
    """The text without its last `share`, and that; between two samples."""
    first = round(len(text) * (1 - share)) // sample * sample if share else len(text)
    return text[:first], text[first:]


def _characters(text: str, classes: Sequence[str]) -> dict[str, int]:
    held = Counter(map(character_name, text))
    return {name: held[name] for name in classes}


def summary_table(summary: PartitionSummary) -> Table:
    """A table for a terminal: images per device, and of each class where there are few classes."""
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


def write_plot(summary: PartitionSummary, file: Path) -> None:
    """Draw the images of each device and class. Raises StorageFailed when the picture cannot be written."""
    options = ", ".join(f"{option}={value}" for option, value in summary.options.items())
    title = f"{summary.dataset}: {summary.partition or 'dealt out'}{f' ({options})' if options else ''}"
    devices = [device.name for device in summary.devices]
    try:
        draw_bubbles(title, devices, list(summary.classes), count_matrix(summary)).save(file)
    except OSError as error:
        raise StorageFailed(f"cannot write {file}: {error.strerror or error}") from error


def count_matrix(summary: PartitionSummary) -> Counts:
    """Images of each device and class, train and test together: (devices, classes)."""
    counts = [[device.total(name) for name in summary.classes] for device in summary.devices]
    return np.array(counts, dtype=np.int64).reshape(len(summary.devices), len(summary.classes))


def _option_help() -> str:
    listed = (
        f"{name}: {', '.join(f'{option}={_as_text(value)}' for option, value in options.items())}"
        for name in PARTITIONS
        if (options := partition_options(name))
    )
    return f"Option of the partition; repeatable. Defaults: {'; '.join(listed)}."


def _as_text(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _merged_options(pairs: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, in either way. Raises ConfigError when one was given twice."""
    options = {option: value for option, value in flags.items() if value is not None}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"partition option {pair!r} must be written KEY=VALUE")
        if option in options:
            raise ConfigError(f"partition option {option} is given twice: {options[option]} and {value}")
        options[option] = value
    return options


@click.command(
    "partition",
    cls=Command,
    examples=[
        "fleet partition --devices 6 --alpha 0.1 --plot --out parts",
    ],
)
@click.option(
    "--dataset",
    default="digits",
    show_default=True,
    metavar="NAME|PATH",
    help=f"A known data set ({', '.join(SOURCES)}), or the path of one: class folders (also as .zip), domain folders,"
    " CIFAR-10 or -100, MNIST's idx files, MedMNIST's .npz, Parquet, a .txt of speaking roles, LEAF's .json.",
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
@click.option("-p", "pairs", multiple=True, metavar="KEY=VALUE", help=_option_help())
@click.option("--alpha", type=float, help="Short for -p alpha=...")
@click.option("--min-samples", type=int, help="Short for -p min_samples=...")
@click.option("--cap/--no-cap", default=None, help="Short for -p cap=...")
@click.option("--out", default="parts", show_default=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Same seed, same folders.")
@click.option(
    "--test-share",
    default=0.2,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of each class that a device tests with.",
)
@click.option(
    "--size",
    type=click.IntRange(min=1),
    help="Side of the images, pixels (32), or characters of a text that a prediction may read (80).",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier partition in --out.")
@click.option("--plot", is_flag=True, help=f"Draw images by device and class, here and as {PLOT_FILE} in --out.")
@json_flag
def partition_command(
    dataset: str,
    devices: int,
    name: str,
    pairs: tuple[str, ...],
    alpha: float | None,
    min_samples: int | None,
    cap: bool | None,
    out: Path,
    seed: int,
    test_share: float,
    size: int | None,
    overwrite: bool,
    plot: bool,
    as_json: bool,
) -> None:
    """Deal a data set out into one folder per device."""
    summary = deal(
        dataset,
        name,
        devices,
        out,
        options=_merged_options(pairs, {"alpha": alpha, "min_samples": min_samples, "cap": cap}),
        seed=seed,
        test_share=test_share,
        size=size,
        overwrite=overwrite,
        plot=plot,
    )
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


@contextmanager
def _new_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write to, which becomes `out` at the end; `out` is unchanged after a failure."""
    _refuse_occupied(out, overwrite)
    out = out.resolve()  # behind a symlink, renaming works only beside the folder itself
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        _put_in_place(partial, out)
    except OSError as error:
        raise StorageFailed(f"cannot write device folders to {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_summary(summary: PartitionSummary, folder: Path) -> None:
    (folder / PARTITION_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def _refuse_occupied(out: Path, overwrite: bool) -> None:
    """Raises ConfigError unless `out` is free, or an earlier partition that may be overwritten."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, expected a folder to write device folders to")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{out} is not empty; choose another folder, or overwrite it (--overwrite)")
    if not (out / PARTITION_FILE).is_file():
        # a mistyped path must not delete a home folder
        raise ConfigError(f"{out} holds no {PARTITION_FILE}, so it is no earlier partition and is not overwritten")


@dataclass(frozen=True)
class _Noise:
    std: float  # gray levels of 0..255
    seed: int

    def add(self, image: Pixels, row: int) -> Pixels:
        return add_noise(image, self.std, seed=self.seed, sample=row)


def _write_classes(
    samples: Samples, rows: Indices, folder: Path, noise: _Noise, unreadable: list[str]
) -> dict[str, int]:
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
            Image.fromarray(noise.add(pixels, int(row))).save(folder / name / f"{counts[name]:04d}.png")
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
