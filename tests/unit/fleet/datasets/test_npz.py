"""Arrays of images in .npz files: as Keras keeps MNIST and CIFAR, and with other names and scales."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvit.errors import DataError
from fleet.datasets import read_samples
from fleet.datasets.npz import is_npz, read_npz
from tests.support.codes import has_code

GRAY = np.arange(3, dtype=np.uint8).reshape(3, 1, 1).repeat(4, 1).repeat(4, 2) * 100


def write(path: Path, **content: Any) -> Path:
    np.savez_compressed(path, **content)
    return path


def test_the_test_arrays_are_the_official_split(tmp_path: Path) -> None:
    path = write(tmp_path / "m.npz", x_train=GRAY, y_train=np.array([1, 0, 1]), x_test=GRAY[:1], y_test=np.array([[5]]))
    samples = read_samples(str(path), 4)
    assert samples.classes == ("0", "1", "5")
    assert samples.labels.tolist() == [1, 0, 1, 2]
    assert samples.images[np.arange(4)][:, 0, 0, 2].tolist() == [0, 100, 200, 0]
    assert samples.official_test is not None
    assert samples.official_test.tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    "images",
    [
        GRAY, GRAY[..., None], GRAY[:, None].astype(np.int64), GRAY[..., None].repeat(3, -1),
        GRAY[:, None].repeat(3, 1),
        GRAY / 255, (GRAY / 127.5 - 1).astype(np.float32), GRAY.astype(np.float16),
    ],
)  # fmt: skip
def test_shapes_and_scales(tmp_path: Path, images: np.ndarray) -> None:
    samples = read_npz(write(tmp_path / "a.npz", x=images, y=np.array([0, 1, 2])), 4)
    assert samples.images[np.arange(3)][:, 3, 3].tolist() == [[level] * 3 for level in (0, 100, 200)]
    assert samples.official_test is None


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"x_train": GRAY}, "y_train"),
        ({"x": GRAY, "y": np.zeros(2, np.int64)}, "shape (2,)"),
        ({"x": GRAY, "y": np.zeros(3)}, "float64"),
        ({"x": GRAY[0], "y": np.zeros(4, np.int64)}, "shape (4, 4)"),
        ({"x": GRAY[..., None].repeat(5, -1), "y": np.zeros(3, np.int64)}, "shape (3, 4, 4, 5)"),
        ({"x": GRAY * 5.0, "y": np.zeros(3, np.int64)}, "1000"),
        ({"x": GRAY * np.nan, "y": np.zeros(3, np.int64)}, "nan"),
        ({"x": GRAY.astype("U3"), "y": np.zeros(3, np.int64)}, "<U3"),
        ({"x": np.array([{}]), "y": np.zeros(1, np.int64)}, "a.npz"),
    ],
)
def test_error_names_file_and_array(tmp_path: Path, content: dict[str, Any], name: str) -> None:
    with pytest.raises(DataError, check=has_code("FV2010", name)):
        read_npz(write(tmp_path / "a.npz", **content), 4)


def test_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    """The archive says that it unpacks to 2^60 bytes."""
    path = write(tmp_path / "a.npz", x=GRAY, y=np.zeros(3, np.int64))
    info = zipfile.ZipFile(path).getinfo("x.npy")
    content = path.read_bytes()
    # a directory's entry with an extra field of ZIP64, since its own sizes have 4 bytes
    entry = content.index(b"PK\x01\x02")
    extra = (1).to_bytes(2, "little") + (8).to_bytes(2, "little") + (1 << 60).to_bytes(8, "little")
    name_end = entry + 46 + len("x.npy")
    changed = bytearray(content)
    changed[entry + 24 : entry + 28] = b"\xff" * 4
    changed[entry + 30 : entry + 32] = len(extra).to_bytes(2, "little")
    changed[name_end : name_end + len(info.extra)] = extra
    end = changed.rindex(b"PK\x05\x06")
    size = int.from_bytes(changed[end + 12 : end + 16], "little") + len(extra) - len(info.extra)
    changed[end + 12 : end + 16] = size.to_bytes(4, "little")
    path.write_bytes(changed)
    assert zipfile.ZipFile(path).getinfo("x.npy").file_size == 1 << 60
    assert not is_npz(path)
    with pytest.raises(DataError, check=has_code("FV2008", "needs 11529215046068")):
        read_npz(path, 4)


@pytest.mark.parametrize(("images", "labels"), [("x_train", "y_train"), ("train_images", "train_labels")])
def test_an_array_that_says_more_than_it_has_is_refused(tmp_path: Path, images: str, labels: str) -> None:
    """400 bytes whose header says 32 TiB, for both readers of such files."""
    path = write(tmp_path / "a.npz", **{labels: np.zeros(1, np.int64)})
    with zipfile.ZipFile(path, "a") as archive, archive.open(f"{images}.npy", "w") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (1 << 35, 32, 32)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(DataError, check=has_code("FV2010", f"a.npz: {images} has 128 bytes")):
        read_samples(str(path), 4)


@pytest.mark.parametrize("header", ["{'descr': '<f4', ", "{[]: 1}", "(" * 5000])
def test_a_damaged_header_names_the_file(tmp_path: Path, header: str) -> None:
    path = write(tmp_path / "a.npz", y=np.zeros(1, np.int64))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode())
    with pytest.raises(DataError, check=has_code("FV2010", "a.npz")):
        read_samples(str(path), 4)


def test_a_name_that_is_no_text_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", é=GRAY)
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    with pytest.raises(DataError, check=has_code("FV2010", "a.npz")):
        read_samples(str(path), 4)


def test_other_files_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "b.npz").write_bytes(b"no archive")
    assert not is_npz(tmp_path / "b.npz")
    assert not is_npz(write(tmp_path / "c.npz", train_images=GRAY))
    assert not is_npz(tmp_path)
