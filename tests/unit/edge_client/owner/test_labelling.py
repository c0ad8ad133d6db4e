import shutil
from pathlib import Path

import pytest

from edge_client.owner.labelling import KEYS, ClassFolders, Labelling, open_images
from fedvit.errors import DataError
from tests.support.codes import has_code
from tests.support.owner_pages import Home, make_home, make_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Classes cat and dog, and three images without a label."""
    return make_home(tmp_path).images


def test_images_go_where_training_looks_for_them(folder: Path, tmp_path: Path) -> None:
    divided = tmp_path / "divided"
    for name in ("cat", "dog"):
        shutil.copytree(folder / name, divided / "train" / name)
    shutil.copytree(folder / "unlabelled", divided / "unlabelled")
    images = Labelling(divided)
    images.label("dog")
    assert (divided / "train/dog/0000.png").is_file()


def test_damaged_images_are_named_and_left_alone(folder: Path) -> None:
    (folder / "unlabelled" / "0001.png").write_text("no image")
    (folder / "unlabelled" / "notes.txt").write_text("no image either")
    images = Labelling(folder)
    assert len(images) == 2
    assert [path.name for path, _ in images.unreadable] == ["0001.png"]


def test_image_that_is_gone_meanwhile(folder: Path) -> None:
    images = Labelling(folder)
    (folder / "unlabelled" / "0000.png").unlink()
    with pytest.raises(DataError, check=has_code("FV1413", "cat/0000.png")):
        images.label("cat")


def test_undo_overwrites_no_picture_that_arrived_since(folder: Path) -> None:
    images = Labelling(folder)
    images.label("cat")
    (folder / "unlabelled" / "0000.png").write_bytes(b"another picture")
    with pytest.raises(DataError, check=has_code("FV1413", "0000.png")):
        images.undo()
    assert (folder / "unlabelled" / "0000.png").read_bytes() == b"another picture"
    assert (folder / "cat" / "0000.png").is_file()
    assert (images.labelled, images.number) == (1, 2)


def test_keys_are_distinct_and_none_has_another_meaning() -> None:
    assert len(set(KEYS)) == len(KEYS) == 60
    assert not {"u", "q", " ", "\n"} & set(KEYS)


def test_waiting_images_are_those_of_one_folder(folder: Path) -> None:
    (folder / "unlabelled" / "deeper").mkdir()
    (folder / "unlabelled" / ".hidden.png").touch()
    folders = ClassFolders(folder)
    assert [path.name for path in folders.list_waiting()] == ["0000.png", "0001.png", "0002.png"]
    assert [(path.name, folders.classes[label]) for path, label in folders.images] == [
        ("known.png", "cat"), ("known.png", "dog"),
    ]  # fmt: skip
    shutil.rmtree(folder / "unlabelled")
    assert folders.list_waiting() == []


def test_images_of_the_device_are_opened_unless_none_has_a_label(folder: Path, tmp_path: Path) -> None:
    settings = make_settings(Home(folder, tmp_path / "state"))
    images = open_images(settings, tmp_path / "state")
    assert images is not None
    assert images.classes == ("cat", "dog")
    for name in ("cat", "dog"):
        (folder / name / "known.png").unlink()
    assert open_images(settings, tmp_path / "state") is None


def test_a_folder_with_a_label_file_is_not_sorted_into_class_folders(folder: Path) -> None:
    """Training would not see an image that is moved there."""
    (folder / "labels.csv").write_text("path,labels\ncat/known.png,cat\n")
    with pytest.raises(DataError, check=has_code("FV1402", "labels.csv")):
        Labelling(folder)
