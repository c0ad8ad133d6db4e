"""Deals a data set out into one folder per device, ready for edge clients on this or other machines."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image

from fedvit.data.images import Indices
from fedvit.data.label_file import CLASS_FILE, MASKS, SETS, write_label_file
from fedvit.data.layout import PARTITION_FILE, TEST, TRAIN
from fedvit.data.split import split_train_test
from fedvit.data.text import character_name, write_texts
from fedvit.errors import ConfigError, DataError, StorageFailed
from fleet.datasets import read_dataset
from fleet.datasets.columns import Columns
from fleet.datasets.samples import OtherLabels, Samples
from fleet.datasets.texts import Texts
from fleet.partitions import Option, deal_out, make_partition
from fleet.partitions.dealing import refuse_empty
from fleet.partitions.feature_noise import add_noise
from fleet.partitions.natural import Natural
from fleet.whole_folder import make_whole

GLOBAL_TEST = "global-test"
"""Folder beside those of devices: class folders of images that no device has."""


Official = Literal["official"]
"""In place of a share: the test images of the data set's own split."""
OFFICIAL: Official = "official"


class DeviceCounts(Struct, frozen=True):
    """Numbers of images, or characters, of each class in a device's folder; every class is listed."""

    name: str
    train: dict[str, int]
    test: dict[str, int]
    noise_std: float = 0.0  # of the noise added to its images, gray levels of 0..255
    source: str | None = None  # of a text: the role or the user that the device has

    def total(self, class_name: str) -> int:
        """Training and test images of a class."""
        return self.train[class_name] + self.test[class_name]


class PartitionSummary(Struct, frozen=True, kw_only=True):
    """A written partition and its settings; the content of `partition.json`."""

    dataset: str
    classes: tuple[str, ...]
    size: int  # side of the images, pixels; of a text the characters of context
    partition: str | None  # None: the caller dealt the samples out
    options: dict[str, Option]
    seed: int
    test_share: float | Official
    devices: tuple[DeviceCounts, ...]
    validation_share: float | None = None  # where it is set, "test" images are of the training images
    global_test: float | Official | None = None  # share of each class that no device has
    domains: tuple[str, ...] = ()  # of the data set, in the order of the partition `domain`
    unreadable: tuple[str, ...] = ()  # images that were left out, with the reason


class DealSettings(NamedTuple):
    """Settings of a partition and its folders. The same settings write the same files."""

    options: Mapping[str, Option | str] = {}  # of the partition
    seed: int = 0
    test_share: float | Official = 0.2  # of each class of a device; official: those of its images that are test images
    validation_share: float | None = None  # of the training images, in place of test images: for a search
    global_test: float | Official | None = None  # of each class, set apart first in `GLOBAL_TEST`
    size: int | None = None  # side of images in pixels, context of a text in characters; None: 32 or 80
    overwrite: bool = False  # an earlier partition
    columns: Columns = Columns()  # of a table of images
    samples: int | None = None  # images that are dealt out, drawn by the seed; None: all
    classes: int | None = None  # the most frequent ones, of which images are dealt out; None: all


class Division(NamedTuple):
    """Samples by device, as a partition divided them, or the caller."""

    parts: Sequence[Indices]
    partition: str | None = None
    options: Mapping[str, Option] = {}
    noise_stds: Sequence[float] = ()  # of each device's images, in gray levels of 0..255
    apart: Indices | None = None  # images of no device


def deal(
    dataset: str | Samples | Texts, partition: str, devices: int, out: Path, settings: DealSettings | None = None
) -> PartitionSummary:
    """Deal a data set out by a partition and write a folder per device, as `fleet partition` does.

    `dataset` is a name, a path, or samples in memory. Raises ConfigError for bad values and if `out` is occupied,
    DataError for an unusable data set, StorageFailed when the disk is full or not writable.
    """
    settings = settings or DealSettings()
    rule = make_partition(partition, **settings.options)
    if settings.global_test == settings.test_share == OFFICIAL:
        raise ConfigError("FV2013", "test_share and global_test are both 'official'; one of them has to be a share")
    _refuse_occupied(out, settings.overwrite)  # before reading a large data set takes minutes
    samples = read_dataset(dataset, settings.size, settings.columns) if isinstance(dataset, str) else dataset
    if isinstance(samples, Texts):
        if not isinstance(rule, Natural):
            raise ConfigError(
                "FV2003", f"partition {partition} deals out single samples, which tears a text apart; use natural"
            )
        for key, value in (("samples", settings.samples), ("classes", settings.classes)):
            if value is not None:
                raise ConfigError("FV2150", f"{key} = {value} chooses images, and {samples.dataset} is a text")
        if settings.global_test is not None:
            raise ConfigError(
                "FV2004", f"global_test = {settings.global_test} sets images apart, and {samples.dataset} is a text"
            )
        parts = deal_out(rule, samples.annotations, devices, settings.seed)
        return _write_texts(samples, Division(parts, partition, asdict(rule)), out, settings)
    if settings.classes is not None:
        samples = samples.keep_frequent(settings.classes)
    if samples.other and settings.global_test is not None:
        raise ConfigError(
            "FV2004", f"global_test = {settings.global_test} needs class folders; the task is {samples.other.task}"
        )
    # a stream of its own: devices have 0, 1, ...
    rng = np.random.default_rng(np.random.SeedSequence(settings.seed, spawn_key=(devices,)))
    dealt, apart = _split(samples, _draw_samples(samples, settings), settings.global_test or 0.0, rng)
    if settings.global_test and not len(apart):
        raise ConfigError("FV2003", f"global_test = {settings.global_test} sets none of the {len(dealt)} images apart")
    division = Division(
        [dealt[part] for part in deal_out(rule, samples.annotations.rows(dealt), devices, settings.seed)],
        partition,
        asdict(rule),
        [rule.noise_std(device, devices) for device in range(devices)],
        apart if settings.global_test else None,
    )
    return write_division(samples, division, out, settings)


def _draw_samples(samples: Samples, settings: DealSettings) -> Indices:
    """Draw the images that are dealt out, the same for every number of devices. Raises ConfigError for too many."""
    count = len(samples)
    if settings.samples is None:
        return np.arange(count, dtype=np.int64)
    if settings.samples > count:
        raise ConfigError("FV2150", f"samples = {settings.samples}: {samples.dataset} has {count} images")
    return np.sort(np.random.default_rng(settings.seed).permutation(count)[: settings.samples])


def write_device_folders(
    samples: Samples, parts: Sequence[Indices], out: Path, *, test_share: float, seed: int
) -> PartitionSummary:
    """Write a folder per device with the samples that the caller divided; see `write_division`."""
    return write_division(samples, Division(parts), out, DealSettings(test_share=test_share, seed=seed))


def write_division(samples: Samples, division: Division, out: Path, settings: DealSettings) -> PartitionSummary:
    """Write `out/device-0/train/<class>/0000.png`, `.../test/...` and so on, and `out/partition.json`.

    Every device gets a folder for every class, even without images of it, so that all devices have the same classes.
    Images that cannot be decoded are left out and listed in the summary. With a validation share devices train on a
    part of their training images, validate on that share of each class, and get no test images: for a search that must
    not use test images.

    `out` appears when it is complete; after a failure its earlier content is unchanged. Raises ConfigError when `out`
    is a file or not empty, unless it is an earlier partition that may be overwritten, when a device has no image, and
    when it has too few training images for a validation image; StorageFailed when the disk is full or not writable.
    """
    parts = refuse_empty(division.partition or "by hand", division.parts)
    with _new_folder(out, settings.overwrite) as partial:
        writer = _ImageWriter(samples, settings.seed)
        devices = []
        for number, part in enumerate(parts):
            name = f"device-{number}"
            rng = np.random.default_rng(np.random.SeedSequence(settings.seed, spawn_key=(number,)))
            train, test = _split(samples, part, settings.test_share, rng)
            if not len(train):
                raise ConfigError("FV2003", f"{name} has {len(test)} test images and none to train with")
            if settings.validation_share is not None:
                images = len(train)
                train, test = split_train_test(train, samples.labels, settings.validation_share, rng)
                if not len(test):
                    raise ConfigError(
                        "FV2112",
                        f"validation_share = {settings.validation_share} leaves {name} without a validation image: its"
                        f" {images} training images are of {images} classes, and one of each class has to train; give"
                        " devices more images",
                    )
            std = division.noise_stds[number] if division.noise_stds else 0.0
            train_counts = writer.write(train, partial / name / TRAIN, std)
            test_counts = writer.write(test, partial / name / TEST, std)
            writer.write_labels(partial / name)
            devices.append(DeviceCounts(name, train_counts, test_counts, std))
        if division.apart is not None:
            writer.write(division.apart, partial / GLOBAL_TEST)
        summary = PartitionSummary(
            dataset=samples.dataset,
            classes=samples.classes,
            size=samples.size,
            partition=division.partition,
            options=dict(division.options),
            seed=settings.seed,
            test_share=settings.test_share,
            validation_share=settings.validation_share,
            global_test=settings.global_test,
            devices=tuple(devices),
            domains=samples.domain_names,
            unreadable=(*samples.unreadable, *writer.unreadable),
        )
        _write_summary(summary, partial)
    return summary


def _split(
    samples: Samples, part: Indices, share: float | Official, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Split images into (train, test), by a share of each class or by the data set's own split.

    Raises ConfigError when the data set has no split of its own.
    """
    if share != OFFICIAL:
        return split_train_test(part, samples.labels, share, rng)
    if samples.official_test is None:
        raise ConfigError("FV2013", f"{samples.dataset} has no test split of its own; give a share of 0 to 1")
    return part[~samples.official_test[part]], part[samples.official_test[part]]


def _write_texts(texts: Texts, division: Division, out: Path, settings: DealSettings) -> PartitionSummary:
    """Write `out/device-0/train.txt`, `test.txt` and `text.json` and so on, and `out/partition.json`.

    The last `test_share` of a device's text is for testing. Raises ConfigError when a device has too little text for a
    sample of each kind, and the errors of `write_division`.
    """
    if settings.test_share == OFFICIAL:
        raise ConfigError("FV2013", f"{texts.dataset} is a text, which has no test split of its own; give a share")
    if not 0 <= settings.test_share < 1:
        raise ConfigError("FV1408", f"test share is {settings.test_share}, expected a number in [0, 1)")
    with _new_folder(out, settings.overwrite) as partial:
        devices = []
        for number, rows in enumerate(division.parts):
            name, source = f"device-{number}", texts.source_names[texts.sources[rows[0]]]
            train, test = _divide_text(texts, rows, number, settings, settings.test_share)
            write_texts(partial / name, texts.settings, ((TRAIN, train), (TEST, test)))
            train_counts, test_counts = (_count_characters(text, texts.classes) for text in (train, test))
            devices.append(DeviceCounts(name, train_counts, test_counts, source=source))
        summary = PartitionSummary(
            dataset=texts.dataset,
            classes=texts.classes,
            size=texts.settings.context,
            partition=division.partition,
            options=dict(division.options),
            seed=settings.seed,
            test_share=settings.test_share,
            validation_share=settings.validation_share,
            devices=tuple(devices),
        )
        _write_summary(summary, partial)
    return summary


def _divide_text(
    texts: Texts, rows: Indices, number: int, settings: DealSettings, test_share: float
) -> tuple[str, str]:
    """Divide a device's text into training and test. Raises ConfigError when one of them is too short."""
    least = texts.settings.context + 1
    train, test = _cut(texts.text(rows), test_share, least)
    if settings.validation_share is not None:
        train, test = _cut(train, settings.validation_share, least)
    for purpose, text in (("training", train), ("testing", test)):
        if len(text) < least and (text or purpose == "training" or settings.validation_share is not None):
            source = texts.source_names[texts.sources[rows[0]]]
            raise ConfigError(
                "FV2003",
                f"device-{number} has too little text: of the {len(rows)} characters of {source!r} {len(text)}"
                f" are for {purpose}, and a sample takes {least}; raise min_samples, or shorten the context",
            )
    return train, test


def _cut(text: str, share: float, sample: int) -> tuple[str, str]:
    """Cut off the last `share` of a text, between two samples."""
    first = round(len(text) * (1 - share)) // sample * sample if share else len(text)
    return text[:first], text[first:]


def _count_characters(text: str, classes: Sequence[str]) -> dict[str, int]:
    counts = Counter(map(character_name, text))
    return {name: counts[name] for name in classes}


class _ImageWriter:
    """Writes images into class folders, or beside a label file; `unreadable` lists those that cannot be decoded."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self.unreadable: list[str] = []
        self._listed: list[tuple[str, str, str]] = []  # path, part and label of images with other labels

    def write(self, rows: Indices, folder: Path, noise_std: float = 0.0) -> dict[str, int]:
        """Write images of all classes, and count those of each class."""
        samples, counts = self._samples, {}
        if samples.other:
            return self._write_labelled(samples.other, rows, folder, noise_std)
        for label, name in enumerate(samples.classes):
            (folder / name).mkdir(parents=True)
            counts[name] = 0
            for row in rows[samples.labels[rows] == label]:
                counts[name] += self._save(int(row), folder / name / f"{counts[name]:04d}.png", noise_std)
        return counts

    def write_labels(self, folder: Path) -> None:
        """Write the label file of the images that were written below a folder."""
        if other := self._samples.other:
            columns = {"multi_label": SETS, "segmentation": MASKS}
            write_label_file(folder, columns.get(other.task, self._samples.classes[0]), self._listed)
            if other.task == "segmentation":
                (folder / CLASS_FILE).write_text("".join(f"{name}\n" for name in self._samples.classes), "utf-8")
            self._listed = []

    def _write_labelled(self, other: OtherLabels, rows: Indices, folder: Path, noise_std: float) -> dict[str, int]:
        folder.mkdir(parents=True)
        kept: list[int] = []
        for row in rows.tolist():
            name = f"{len(kept):05d}.png"
            if self._save(row, folder / name, noise_std):
                kept.append(row)
                label = other.write(row, self._samples.classes, folder / name)
                self._listed.append((f"{folder.name}/{name}", folder.name, label))
        if other.task == "regression":
            return {self._samples.classes[0]: len(kept)}
        return dict(zip(self._samples.classes, map(int, (other.values[kept] > 0).sum(axis=0)), strict=True))

    def _save(self, row: int, file: Path, noise_std: float) -> bool:
        """Write an image; False for one that cannot be decoded."""
        try:
            (pixels,) = self._samples.images[np.array([row])]
        except DataError as error:
            self.unreadable.append(str(error))
            return False
        Image.fromarray(add_noise(pixels, noise_std, seed=self._seed, sample=row)).save(file)
        return True


@contextmanager
def _new_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """Make a folder that becomes `out` at the end; `out` is unchanged after a failure."""
    _refuse_occupied(out, overwrite)
    try:
        with make_whole(out) as partial:
            yield partial
    except OSError as error:
        raise StorageFailed("FV1701", f"cannot write device folders to {out}: {error.strerror or error}") from error


def _write_summary(summary: PartitionSummary, folder: Path) -> None:
    (folder / PARTITION_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def _refuse_occupied(out: Path, overwrite: bool) -> None:
    """Raises ConfigError unless `out` is free, or an earlier partition that may be overwritten."""
    if out.exists() and not out.is_dir():
        raise ConfigError("FV2007", f"{out} is a file, expected a folder to write device folders to")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError("FV2007", f"{out} is not empty; choose another folder, or overwrite it (--overwrite)")
    if not (out / PARTITION_FILE).is_file():
        # a mistyped path must not delete a home folder
        raise ConfigError(
            "FV2007", f"{out} holds no {PARTITION_FILE}, so it is no earlier partition and is not overwritten"
        )
