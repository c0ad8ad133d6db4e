import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedvit.errors import DataError
from fleet.datasets import read_samples
from fleet.datasets.cifar100 import FINE
from fleet.datasets.domainfolder import is_domainfolder, read_domainfolder
from tests.support.codes import has_code
from tests.support.pictures import png


def write(where: Path, members: dict[str, bytes], packed: bool = False) -> Path:
    if packed:
        with zipfile.ZipFile(where / "set.zip", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return where / "set.zip"
    for name, content in members.items():
        (where / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (where / "set" / name).write_bytes(content)
    return where / "set"


OFFICE = {
    "Art/Bed/1.jpg": png(1),
    "Art/Chair/1.jpg": png(2),
    "Product/Chair/1.jpg": png(3),
    "Product/Alarm/2.jpg": png(4),
    "Product/notes.txt": b"x",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("top", ["", "OfficeHome/"])
def test_office_home(tmp_path: Path, packed: bool, top: str) -> None:
    """Domains, then classes (Alarm 0, Bed 1, Chair 2), then files, each sorted."""
    path = write(tmp_path, {f"{top}{name}": content for name, content in OFFICE.items()}, packed)
    samples = read_samples(str(path), 4)
    assert samples.classes == ("Alarm", "Bed", "Chair")
    assert samples.labels.tolist() == [1, 2, 0, 2]
    assert samples.domain_names == ("Art", "Product")
    assert samples.domains is not None
    assert samples.domains.tolist() == [0, 0, 1, 1]
    assert samples.images[np.arange(4)][:, 0, 0, 0].tolist() == [1, 2, 4, 3]


@pytest.mark.parametrize(
    "members",
    [
        {"cat/1.png": png(1), "dog/1.png": png(2)},
        {"train/cat/1.png": png(1), "test/cat/1.png": png(2)},
        {"train/cat/1.png": png(1), "val/cat/1.png": png(2)},
        {"Art/cat/1.png": png(1)},
        {"Art/cat/1.png": png(1), "Product/1.png": png(2)},
        {"Art/cat/1.txt": b"x", "Product/dog/1.txt": b"x"},
    ],
)
def test_what_has_no_domains(tmp_path: Path, members: dict[str, bytes]) -> None:
    assert not is_domainfolder(write(tmp_path, members))


def test_other_files(tmp_path: Path) -> None:
    assert not is_domainfolder(tmp_path / "gone")
    (tmp_path / "x.csv").write_text("1,2")
    assert not is_domainfolder(tmp_path / "x.csv")


def test_unreadable_images_are_left_out(tmp_path: Path) -> None:
    samples = read_domainfolder(write(tmp_path, {**OFFICE, "Art/Bed/0.jpg": b"x"}), 4)
    assert len(samples) == 4
    assert "0.jpg: not a PNG" in samples.unreadable[0]
    assert samples.domains is not None
    assert samples.domains.tolist() == [0, 0, 1, 1]


def test_no_readable_image(tmp_path: Path) -> None:
    path = write(tmp_path, {"Art/Bed/0.jpg": b"x", "Product/Bed/0.jpg": b"x"})
    with pytest.raises(DataError, check=has_code("FV2008")):
        read_domainfolder(path, 4)


def test_class_folders_with_the_names_of_cifar_100_have_coarse_labels(tmp_path: Path) -> None:
    """A class of it is named "train"; the first class, apple, is of coarse label 4."""
    path = write(tmp_path, {f"{name}/0.png": png(0) for name in FINE})
    samples = read_samples(str(path), 4)
    assert samples.classes == FINE
    assert samples.coarse_labels is not None
    assert np.bincount(samples.coarse_labels).tolist() == [5] * 20
    assert samples.coarse_labels[0] == 4
