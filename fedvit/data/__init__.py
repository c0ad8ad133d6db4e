"""Images and labels: a device's own (`folder`), and whole data sets to deal out (`read_samples`)."""

from collections.abc import Callable
from pathlib import Path

from fedvit.data.digits import read_digits
from fedvit.data.imagefolder import read_imagefolder
from fedvit.data.samples import Samples
from fedvit.errors import ConfigError

SOURCES: dict[str, Callable[[int], Samples]] = {"digits": read_digits}
"""Data sets by name: image side -> samples. Every other data set is a path."""


def read_samples(dataset: str, size: int) -> Samples:
    """Open a data set by its name in `SOURCES`, or by the path of a folder or .zip with class folders.

    Raises ConfigError when it is neither, DataError when the path cannot be used.
    """
    if dataset in SOURCES:
        return SOURCES[dataset](size)
    if not Path(dataset).exists():
        raise ConfigError(f"data set {dataset!r} is neither a path that exists nor one of: {', '.join(SOURCES)}")
    return read_imagefolder(Path(dataset), size)
