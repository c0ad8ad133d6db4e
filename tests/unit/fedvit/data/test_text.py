"""A device's own text: reading, cutting, and the errors of its folder."""

from pathlib import Path

import numpy as np
import pytest

from fedvit.data.folder import DeviceData, TextSplit
from fedvit.data.growing import GrowingFolder
from fedvit.data.text import TextSettings, write_texts
from fedvit.errors import DataError
from fedvit.program import Batch, Text
from tests.support.codes import has_code

SETTINGS = TextSettings(context=3, stride=3)
BATCH = Batch(batch_size=2, text=Text(context=3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_texts(tmp_path / "device", SETTINGS, (("train", "ab cab a"), ("test", "bc\na")))
    return tmp_path / "device"


def write_folder(split: TextSplit, classes: tuple[str, ...]) -> list[tuple[str, str]]:
    names = [{"U+0020": " ", "U+000A": "\n"}.get(name, name) for name in classes]
    pairs = zip(split.tokens, split.labels, strict=True)
    return [("".join(names[code] for code in read), "".join(names[code] for code in after)) for read, after in pairs]


def test_labels_are_the_characters_that_follow(folder: Path) -> None:
    data = DeviceData.open(folder)
    assert data.classes == ("U+000A", "U+0020", "a", "b", "c")
    assert isinstance(data.train, TextSplit)
    assert isinstance(data.test, TextSplit)
    assert write_folder(data.train, data.classes) == [("ab ", "b c"), ("cab", "ab ")]
    assert write_folder(data.test, data.classes) == [("bc\n", "c\na")]
    assert data.counts == (data.classes, 2, 1)
    assert data.problems() == []


def test_text_keeps_its_meaning_under_the_classes_of_a_run(folder: Path) -> None:
    data = DeviceData.open(folder)
    more = ("z", "c", "b", "a", "U+0020", "U+000A")
    relabelled = data.relabel(more).train
    assert isinstance(relabelled, TextSplit)
    assert isinstance(data.train, TextSplit)
    assert write_folder(relabelled, more) == write_folder(data.train, data.classes)


def test_text_that_changes_is_read_again_and_only_then(folder: Path, tmp_path: Path) -> None:
    growing = GrowingFolder(folder, split_file=tmp_path / "split.json")
    assert not growing.look()
    (folder / "train.txt").write_text("ab cab ab ab")
    assert growing.look()
    assert len(growing.data.train) == 3
    assert not (tmp_path / "split.json").exists(), "a text is divided by its owner"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"train.txt": b"abc"}, "FV1405"),
        ({"train.txt": b"abcd", "test.txt": b"a"}, "FV1405"),
        ({"train.txt": b"abc\xffd"}, "FV1405"),
        ({}, "FV1702"),
        ({"text.json": b'{"context": 0, "stride": 1}'}, "FV1405"),
        ({"text.json": b'{"context": 9}'}, "FV1405"),
        ({"text.json": b'{"\xffontext": 3, "stride": 3}'}, "FV1405"),
    ],
)
def test_folder_that_cannot_be_used_says_why(tmp_path: Path, files: dict[str, bytes], code: str) -> None:
    for name, content in {"text.json": b'{"context": 3, "stride": 3}', **files}.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, check=has_code(code)):
        DeviceData.open(tmp_path)


def test_character_that_the_run_does_not_know_is_named(folder: Path) -> None:
    data = DeviceData.open(folder)
    with pytest.raises(DataError):
        data.relabel(("U+0020", "a", "b"))


def test_folder_of_another_kind_or_context_is_named(folder: Path) -> None:
    data = DeviceData.open(folder)
    data.check_fits(BATCH)
    with pytest.raises(DataError, check=has_code("FV1402")):
        data.check_fits(Batch(batch_size=2, text=Text(context=4)))
    with pytest.raises(DataError):
        data.check_fits(Batch(batch_size=2, image_size=8, patch_size=4))
    (folder.parent / "images" / "cat").mkdir(parents=True)
    from PIL import Image

    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder.parent / "images" / "cat" / "0.png")
    with pytest.raises(DataError):
        DeviceData.open(folder.parent / "images").check_fits(BATCH)
