"""MedMNIST's .npz files, and errors that name the array."""

from pathlib import Path

import numpy as np
import pytest

from fedvit.errors import DataError
from fleet.datasets import read_samples
from fleet.datasets.medmnist import is_medmnist, read_medmnist
from tests.support.codes import has_code


def arrays(colours: tuple[int, ...] = (3,)) -> dict[str, np.ndarray]:
    """As blood and path (colours) or breast and organ (gray): 4 for training, 2 to validate, 1 to test."""
    result = {}
    for split, labels in (("train", [0, 1, 2, 0]), ("val", [2, 1]), ("test", [2])):
        level = np.array(labels).reshape(-1, 1, 1, *(1 for _ in colours)) * 50
        result[f"{split}_images"] = np.broadcast_to(level, (len(labels), 28, 28, *colours)).astype(np.uint8)
        result[f"{split}_labels"] = np.array(labels, dtype=np.uint8).reshape(-1, 1)
    return result


def write(folder: Path, content: dict[str, np.ndarray]) -> Path:
    path = folder / "bloodmnist.npz"
    np.savez_compressed(path, **content)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("colours", [(3,), ()])
@pytest.mark.parametrize("size", [28, 32])
def test_all_splits_together(tmp_path: Path, colours: tuple[int, ...], size: int) -> None:
    samples = read_medmnist(write(tmp_path, arrays(colours)), size)
    assert samples.dataset == "bloodmnist"
    assert samples.classes == ("0", "1", "2")
    assert samples.labels.tolist() == [0, 1, 2, 0, 2, 1, 2]
    images = samples.images[np.arange(7)]
    assert images.shape == (7, size, size, 3)
    assert (images == samples.labels.reshape(-1, 1, 1, 1) * 50).all()


def test_it_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path, arrays())
    assert len(read_samples(str(path), 28)) == 7
    assert not is_medmnist(tmp_path)


def test_a_split_may_be_missing(tmp_path: Path) -> None:
    content = {name: array for name, array in arrays().items() if not name.startswith("val")}
    assert len(read_medmnist(write(tmp_path, content), 28)) == 5


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"val_labels": np.zeros((2, 14), np.uint8)}, "FV2010"),
        ({"val_labels": np.zeros((3, 1), np.uint8)}, "FV2010"),
        ({"val_labels": np.zeros((2, 1), np.float32)}, "FV2010"),
        ({"val_images": np.zeros((2, 28, 28, 28), np.uint8)}, "FV2010"),
        ({"val_images": np.zeros((2, 28, 28), np.float32)}, "FV2010"),
        ({"val_images": np.zeros((2, 9, 9, 3), np.uint8)}, "FV2008"),
        ({"val_images": np.array([{}, {}])}, "FV2010"),
        ({"val_labels": None}, "FV2010"),
        (dict.fromkeys(arrays()) | {"x": np.zeros(3)}, "FV2010"),
    ],
)
def test_error_names_file_and_array(tmp_path: Path, changed: dict[str, np.ndarray | None], code: str) -> None:
    content = {key: array for key, array in {**arrays(), **changed}.items() if array is not None}
    with pytest.raises(DataError, check=has_code(code)):
        read_medmnist(write(tmp_path, content))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut"])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(DataError, check=has_code("FV2010", "x.npz")):
        read_medmnist(tmp_path / "x.npz")
