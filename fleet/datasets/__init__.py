"""Readers of data sets.

An installed package adds its own by entry points (docs/plugins.md).
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedvit import plugins
from fedvit.choices import did_you_mean
from fedvit.errors import ConfigError
from fleet.datasets.cifar import is_cifar, read_cifar
from fleet.datasets.columns import Columns
from fleet.datasets.digits import (
    read_digit_domains,
    read_digit_masks,
    read_digit_pairs,
    read_digits,
    read_dimmed_digits,
    read_turned_digits,
)
from fleet.datasets.domainfolder import is_domainfolder, read_domainfolder
from fleet.datasets.idx import is_idx, read_idx
from fleet.datasets.imagefolder import read_imagefolder
from fleet.datasets.leafimages import is_leafimages, read_leafimages
from fleet.datasets.manifest import is_manifest, read_manifest
from fleet.datasets.medmnist import is_medmnist, read_medmnist
from fleet.datasets.npz import is_npz, read_npz
from fleet.datasets.parquet import is_parquet, read_parquet
from fleet.datasets.pfllib import is_pfllib, read_pfllib
from fleet.datasets.samples import Samples
from fleet.datasets.saved import is_saved, read_saved
from fleet.datasets.texts import Texts, is_texts, read_texts

log = logging.getLogger(__name__)

IMAGE_SIZE = 32
"""Default side of images, pixels."""

SOURCES: dict[str, Callable[[int], Samples]] = {
    "digits": read_digits,
    "digits-domains": read_digit_domains,
    "digits-turned": read_turned_digits,
    "digits-pairs": read_digit_pairs,
    "digits-dimmed": read_dimmed_digits,
    "digits-masks": read_digit_masks,
}
"""Data sets by name: image side -> samples. Every other data set is a path."""


class DatasetReader(NamedTuple):
    """Opens the paths that `recognises` accepts: (path, image side) -> samples.

    `recognises` reads as little as possible and raises nothing.
    """

    recognises: Callable[[Path], bool]
    read: Callable[[Path, int], Samples]
    read_columns: Callable[[Path, int, Columns], Samples] | None = None  # of a table, whose columns may be named
    write_example: Callable[[Path], Path] | None = None  # into an empty folder: a small data set, for its contract


READERS: dict[str, DatasetReader] = {
    "npz": DatasetReader(is_npz, read_npz),
    "medmnist": DatasetReader(is_medmnist, read_medmnist),
    "idx": DatasetReader(is_idx, read_idx),
    "cifar": DatasetReader(is_cifar, read_cifar),
    "manifest": DatasetReader(is_manifest, read_manifest, read_manifest),
    "pfllib": DatasetReader(is_pfllib, read_pfllib),
    "leafimages": DatasetReader(is_leafimages, read_leafimages),
    "saved": DatasetReader(is_saved, read_saved, read_saved),
    "parquet": DatasetReader(is_parquet, read_parquet, read_parquet),
    "domainfolder": DatasetReader(is_domainfolder, read_domainfolder),
    "imagefolder": DatasetReader(Path.exists, read_imagefolder),
}
"""Kinds of data sets in files; the first that recognises a path reads it. Packages' readers come before the last."""


def check_dataset(dataset: str) -> None:
    """Check a data set's name. Raises ConfigError if it is neither in `SOURCES` nor an existing path."""
    if dataset not in SOURCES and not Path(dataset).exists():
        near = did_you_mean(dataset, SOURCES)
        raise ConfigError(
            "FV2001", f"data set {dataset!r} is neither a path that exists nor one of: {', '.join(SOURCES)}{near}"
        )


def find_reader(path: Path) -> DatasetReader:
    """Find the reader of an existing path. A package's reader that fails to look at it is left out, with a warning.

    Raises ConfigError if several packages have one for it.
    """
    *own, last = READERS.values()
    if (reader := next((one for one in own if one.recognises(path)), None)) is not None:
        return reader
    able: dict[str, DatasetReader] = {}
    for name in plugins.read_entries(plugins.READERS):
        try:
            reader = load_reader(name)
            if reader.recognises(path):
                able[name] = reader
        except Exception as error:  # noqa: BLE001 - whatever the code of a package raises
            log.warning("left out: %s", error if isinstance(error, ConfigError) else f"reader {name!r}: {error!r}")
    if len(able) > 1:
        raise ConfigError("FV1485", f"{path}: readers {' and '.join(sorted(able))} of packages read it; uninstall one")
    return next(iter(able.values()), last)


def load_reader(name: str) -> DatasetReader:
    """Load a package's reader. Raises ConfigError if it cannot be used."""
    entry = plugins.find_entry(plugins.READERS, name, READERS)
    assert entry is not None
    return plugins.load_object(plugins.READERS, entry, DatasetReader)


def read_samples(dataset: str, size: int, columns: Columns | None = None) -> Samples:
    """Open a data set by its name in `SOURCES`, or by its path; of a table, `columns` may be named.

    Raises ConfigError when it is neither, or has no columns, DataError when the path cannot be used.
    """
    check_dataset(dataset)
    path = Path(dataset)
    reader = None if dataset in SOURCES else find_reader(path)
    if columns is not None and columns != Columns():
        if reader is None or reader.read_columns is None:
            raise ConfigError("FV2011", f"{dataset} has no columns to name; Parquet, CSV and saved data sets have")
        return reader.read_columns(path, size, columns)
    return SOURCES[dataset](size) if reader is None else reader.read(path, size)


def read_dataset(dataset: str, size: int | None, columns: Columns | None = None) -> Samples | Texts:
    """Open images, or a text, whose `size` is its context in characters; None: the default size."""
    check_dataset(dataset)
    if dataset not in SOURCES and is_texts(Path(dataset)) and not is_leafimages(Path(dataset)):
        return read_texts(Path(dataset), size)
    return read_samples(dataset, IMAGE_SIZE if size is None else size, columns)
