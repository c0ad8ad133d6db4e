import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from fedvit.errors import ConfigError, DataError
from fleet.datasets import READERS, SOURCES, read_samples
from fleet.datasets.digits import read_digits
from fleet.datasets.samples import STRATA, ArrayImages, Samples, folder_names
from tests.support.codes import has_code


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_keeps_the_contract(name: str) -> None:
    samples = SOURCES[name](16)
    assert samples.dataset == name
    assert len(samples) == len(samples.images) == len(samples.labels) > 0
    assert samples.labels.dtype == np.int64
    strata = STRATA if samples.other and samples.other.task == "regression" else len(samples.classes)
    assert set(np.unique(samples.labels)) <= set(range(strata))
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


def test_every_digit_is_in_one_domain() -> None:
    plain, domains = read_digits(8), SOURCES["digits-domains"](8)
    assert domains.domain_names == ("faint", "inverted", "mirrored", "plain")
    assert domains.domains is not None
    assert np.bincount(domains.domains).tolist() == [450, 449, 449, 449]
    seen, original = (samples.images[np.arange(4)] for samples in (domains, plain))
    np.testing.assert_array_equal(seen[1], 255 - original[1])
    np.testing.assert_array_equal(seen[2], original[2, :, ::-1])
    np.testing.assert_array_equal(seen[3], original[3])


def test_digits_turned_and_of_other_sizes() -> None:
    turned = SOURCES["digits-turned"](8)
    assert turned.classes == ("000", "090", "180", "270")
    upright, upside_down = turned.images[np.array([0, 2 * 1797])]
    np.testing.assert_array_equal(upside_down, upright[::-1, ::-1])
    assert read_digits().images[np.array([0])].shape == (1, 32, 32, 3)


def test_a_path_is_opened_as_class_folders(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "cat/0.png")
    assert read_samples(str(tmp_path), 4).classes == ("cat",)


def test_neither_a_name_nor_a_path() -> None:
    with pytest.raises(ConfigError, check=has_code("FV2001")):
        read_samples("mnist-or-so", 4)


def test_importing_readers_and_partitions_is_light() -> None:
    """In its own process, so that no other imports are seen."""
    code = (
        "import sys, fedvit.data.folder, fleet.datasets, fleet.partitions;"
        "heavy = {'sklearn', 'torch', 'torchvision', 'timm', 'onnx', 'scipy', 'rich', 'pyarrow', 'pandas'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_reader_of_the_package_is_in_the_table() -> None:
    folder = Path(sys.modules["fleet.datasets"].__file__ or "").parent
    written = {path.stem for path in folder.glob("*.py") if "\ndef read_" in path.read_text()}
    assert written - {"digits", "pickles", "texts", "__init__"} == READERS.keys()


@pytest.mark.parametrize("shape", [(3, 4, 4, 3), (3, 4, 4), (3, 9, 7, 3), (3, 9, 7)])
def test_images_in_memory_come_as_square_rgb(shape: tuple[int, ...]) -> None:
    """Flat images stay flat when they are resized."""
    stored = np.broadcast_to(np.array([10, 20, 30]).reshape(-1, *(1 for _ in shape[1:])), shape).astype(np.uint8)
    images = ArrayImages(stored, 4)
    assert len(images) == 3
    rows = images[np.array([2, 0])]
    assert rows.dtype == np.uint8
    assert rows.shape == (2, 4, 4, 3)
    assert (rows[0] == 30).all()
    assert (rows[1] == 10).all()


@given(st.lists(st.text("ab/\\\\.\n_ (01)", max_size=6), max_size=20))
def test_any_names_become_different_folder_names(names: list[str]) -> None:
    made = folder_names(names)
    assert len(set(made)) == len(made) == len(names)
    if made:
        empty = np.zeros(0, dtype=np.int64)
        images = np.zeros((0, 4, 4, 3), dtype=np.uint8)
        Samples(dataset="made", size=4, images=images, labels=empty, classes=made)


class TestSamplesRefuse:
    def make_samples(self, **changed: object) -> Samples:
        images = np.zeros((2, 4, 4, 3), dtype=np.uint8)
        content = {"images": images, "labels": np.array([0, 1]), "classes": ("a", "b"), **changed}
        return Samples(dataset="made", size=4, **content)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "/a", "a\nb", "__MACOSX"])
    def test_names_that_no_folder_can_have(self, name: str) -> None:
        with pytest.raises(DataError):
            self.make_samples(classes=("a", name))

    def test_names_that_occur_twice(self) -> None:
        with pytest.raises(DataError):
            self.make_samples(classes=("a", "a"))

    def test_other_numbers_of_things(self) -> None:
        for field in ("coarse_labels", "domains"):
            with pytest.raises(DataError):
                self.make_samples(**{field: np.zeros(3, dtype=np.int64)})
        with pytest.raises(DataError):
            self.make_samples(labels=np.zeros(3, dtype=np.int64))
