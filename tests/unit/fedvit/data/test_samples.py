import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedvit.data import SOURCES, read_samples
from fedvit.data.digits import read_digits
from fedvit.errors import ConfigError


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_keeps_the_contract(name: str) -> None:
    samples = SOURCES[name](16)
    assert samples.dataset == name
    assert len(samples) == len(samples.images) == len(samples.labels) > 0
    assert samples.labels.dtype == np.int64
    assert set(np.unique(samples.labels)) <= set(range(len(samples.classes)))
    assert list(samples.classes) == sorted(samples.classes)
    images = samples.images[np.array([0, 1, 0])]
    assert images.shape == (3, 16, 16, 3)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(images[0], images[2])


def test_digits() -> None:
    """Ten classes, 1797 images. At their own size 8 nothing is resized: gray level 16 becomes 255, 8 becomes
    127.5, rounded to even 128, and all colours are equal."""
    samples = read_digits(8)
    original = load_digits()
    assert samples.classes == tuple("0123456789")
    assert len(samples) == 1797
    np.testing.assert_array_equal(samples.labels, original.target)
    images = samples.images[np.arange(1797)]
    assert set(images[:, :, :, 0][original.images == 16]) == {255}
    assert set(images[:, :, :, 0][original.images == 8]) == {128}
    assert (images == images[..., :1]).all()


def test_digits_have_32_pixels_where_nothing_is_said() -> None:
    assert read_digits().images[np.array([0])].shape == (1, 32, 32, 3)


def test_a_path_is_opened_as_class_folders(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "cat/0.png")
    assert read_samples(str(tmp_path), 4).classes == ("cat",)


def test_neither_a_name_nor_a_path() -> None:
    with pytest.raises(ConfigError, match=r"'mnist-or-so' is neither a path that exists nor one of: digits"):
        read_samples("mnist-or-so", 4)


def test_importing_the_room_is_light() -> None:
    """In a process of its own, so that nobody else's imports are seen."""
    code = (
        "import sys, fedvit.data, fedvit.data.folder, fedvit.data.images, fedvit.data.partition;"
        "print(sorted({'sklearn', 'torch', 'torchvision', 'timm', 'onnx', 'scipy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
