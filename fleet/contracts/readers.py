"""Laws of readers, on the small data set that each writes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedvit.errors import DataError
from fleet.contracts.laws import Law, fail, require
from fleet.datasets import READERS, DatasetReader, load_reader
from fleet.datasets.samples import STRATA, Samples

SIZES = (8, 20)


class _Example(NamedTuple):
    reader: DatasetReader
    path: Path


def recognise_its_own(name: str) -> None:
    """It recognises its data set, which no reader of fedvit does, and no other path."""
    with _write_example(name) as (reader, path), tempfile.TemporaryDirectory() as other:
        require(reader.recognises(path), f"it does not recognise {path.name}, which it wrote")
        others = [one for one, own in READERS.items() if one not in (name, "imagefolder") and own.recognises(path)]
        require(name in READERS or not others, f"fedvit's reader {' and '.join(others)} comes first for {path.name}")
        empty, noise = Path(other) / "folder", Path(other) / "noise.bin"
        empty.mkdir()
        noise.write_bytes(np.random.default_rng(0).bytes(999))
        for foreign in (empty, noise, Path(other) / "absent"):
            require(name == "imagefolder" or not reader.recognises(foreign), f"it recognises {foreign.name}, too")


def give_images_with_labels(name: str) -> None:
    """Images are uint8 (rows, size, size, 3), labels int64 and within the classes, of numbers within ten groups."""
    with _write_example(name) as (reader, path):
        for size in SIZES:
            samples = reader.read(path, size)
            require(isinstance(samples, Samples), f"it returns a {type(samples).__name__}, no Samples")
            require(len(samples) > 1 and samples.size == size, f"{len(samples)} samples of size {samples.size}")
            images = samples.images[np.arange(len(samples))]
            require(images.dtype == np.uint8, f"images are {images.dtype}")
            require(images.shape == (len(samples), size, size, 3), f"images have shape {images.shape}")
            labels = samples.labels
            require(labels.dtype == np.int64 and labels.ndim == 1, f"labels are {labels.dtype}, {labels.ndim} axes")
            is_number = samples.other is not None and samples.other.task == "regression"
            most = STRATA if is_number else len(samples.classes)
            inside = 0 <= labels.min() <= labels.max() < most
            require(bool(inside), f"labels {labels.min()} to {labels.max()}, expected at most {most - 1}")


def give_the_rows_asked_for(name: str) -> None:
    """Rows come in the order asked for, and the same again."""
    with _write_example(name) as (reader, path):
        samples = reader.read(path, SIZES[0])
        whole = samples.images[np.arange(len(samples))]
        order = np.random.default_rng(0).permutation(len(samples))
        require(np.array_equal(samples.images[order], whole[order]), "rows asked for in another order differ")
        again = reader.read(path, SIZES[0])
        require(np.array_equal(again.labels, samples.labels), "read again, labels differ")
        require(np.array_equal(again.images[order], whole[order]), "read again, images differ")


def refuse_damaged_files(name: str) -> None:
    """A file cut in half is refused as DataError, or left out."""
    with _write_example(name) as (reader, path):
        files = [file for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()]
        for file in files:
            content = file.read_bytes()
            file.write_bytes(content[: len(content) // 2])
            try:
                if reader.recognises(path):
                    samples = reader.read(path, SIZES[0])
                    samples.images[np.arange(len(samples))]
            except DataError:
                pass
            except Exception as error:  # noqa: BLE001 - whatever the code of a package raises breaks the law
                fail(f"{file.name} cut in half: {type(error).__name__}: {error}")
            file.write_bytes(content)


LAWS: tuple[Law, ...] = (recognise_its_own, give_images_with_labels, give_the_rows_asked_for, refuse_damaged_files)


@contextmanager
def _write_example(name: str) -> Iterator[_Example]:
    reader = READERS[name] if name in READERS else load_reader(name)
    if reader.write_example is None:
        fail("it has no `write_example`, which writes a small data set")
    with tempfile.TemporaryDirectory() as folder:
        yield _Example(reader, reader.write_example(Path(folder)))
