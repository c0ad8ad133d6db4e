"""Gray images in idx files, packed and unpacked, and errors that name the damaged file."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from fedvit.errors import DataError
from fleet.datasets import read_samples
from fleet.datasets.idx import is_idx, read_idx
from tests.support.codes import has_code


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write(folder: Path, start: str, images: np.ndarray, labels: list[int], packed: bool = False) -> None:
    for kind, array in (("images-idx3", images), ("labels-idx1", np.array(labels))):
        raw = idx(array)
        (folder / f"{start}-{kind}-ubyte{'.gz' if packed else ''}").write_bytes(gzip.compress(raw) if packed else raw)


def write_mnist(folder: Path, packed: bool = False) -> Path:
    images = np.arange(3 * 6 * 6).reshape(3, 6, 6)
    write(folder, "train", images, [3, 0, 7], packed)
    write(folder, "t10k", images[:1], [0], packed)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(tmp_path: Path, packed: bool) -> None:
    """Files in the order of their names: t10k (label 0), train (3, 0, 7). Classes are the numbers that occur."""
    samples = read_idx(write_mnist(tmp_path, packed), 6)
    assert samples.classes == ("0", "3", "7")
    assert [samples.classes[label] for label in samples.labels] == ["0", "3", "0", "7"]
    images = samples.images[np.array([2, 0])]
    assert images.shape == (2, 6, 6, 3)
    np.testing.assert_array_equal(images[0, :, :, 1], np.arange(36, 72).reshape(6, 6))
    assert (images == images[..., :1]).all()


def test_it_is_resized(tmp_path: Path) -> None:
    assert read_idx(write_mnist(tmp_path), 32).images[np.arange(4)].shape == (4, 32, 32, 3)


def test_it_is_recognised(tmp_path: Path) -> None:
    assert not is_idx(tmp_path)
    assert not is_idx(tmp_path / "gone" / "gone")
    assert len(read_samples(str(write_mnist(tmp_path)), 6)) == 4
    assert len(read_samples(str(tmp_path / "train-images-idx3-ubyte"), 6)) == 4
    assert not is_idx(tmp_path / "train-labels-idx1-ubyte")


def test_packed_and_unpacked_side_by_side_are_read_once(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True)
    assert len(read_idx(write_mnist(tmp_path), 6)) == 4


def test_one_of_several_sets(tmp_path: Path) -> None:
    """EMNIST has many sets in one folder; 12 numbers have names of two digits, which sort as the numbers do."""
    image = np.zeros((12, 4, 4))
    for name in ("emnist-letters-train", "emnist-letters-test", "emnist-digits-train"):
        write(tmp_path, name, image, list(range(12)))
    with pytest.raises(DataError, check=has_code("FV2008")):
        read_idx(tmp_path)
    samples = read_idx(tmp_path / "emnist-letters-test-images-idx3-ubyte", 4)
    assert len(samples) == 24
    assert samples.classes == tuple(f"{number:02d}" for number in range(12))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG....",
        idx(np.zeros(5)),
        idx(np.zeros((3, 6, 6)))[:-1],
        idx(np.zeros((3, 6, 6))) + b"x",
        gzip.compress(idx(np.zeros((3, 6, 6))))[:-9],
        gzip.compress(idx(np.zeros((3, 6, 6))))[:12] + b"\xff\xff\xff",
        gzip.compress(idx(np.zeros((3, 6, 6))) + bytes(10**7)),
        bytes([0, 0, 8, 3]) + struct.pack(">3I", 1 << 31, 1 << 15, 1 << 15),
        bytes([0, 0, 8, 3]) + b"\xff" * 12,
    ],
    ids=[
        "empty", "png", "labels", "short", "long", "cut archive", "damaged archive", "archive of many bytes",
        "more than the memory", "more than an index",
    ],
)  # fmt: skip
def test_error_names_the_damaged_file(tmp_path: Path, content: bytes) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, check=has_code("FV2008", "train-images-idx3-ubyte")):
        read_idx(tmp_path)


def test_sets_that_do_not_fit(tmp_path: Path) -> None:
    """No file, labels of other images, images of another size, and no labels."""
    with pytest.raises(DataError):
        read_idx(tmp_path)
    write_mnist(tmp_path)
    write(tmp_path, "t10k", np.zeros((1, 4, 4)), [0])
    with pytest.raises(DataError, check=has_code("FV2008")):
        read_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(2)))
    with pytest.raises(DataError, check=has_code("FV2008", "train-labels-idx1-ubyte")):
        read_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, check=has_code("FV2008", "t10k-labels-idx1-ubyte")):
        read_idx(tmp_path)
