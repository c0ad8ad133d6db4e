"""Images with labels of other tasks: `labels.csv` beside them."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from fedvit.data.folder import DeviceData, LabelledSplit
from fedvit.data.label_file import MOST_VALUES, read_label_file, write_label_file
from fedvit.data.split import RandomSplit
from fedvit.errors import DataError
from fedvit.label_forms import LabelForm
from fedvit.program import Batch
from tests.support.codes import has_code

SETS = "path,labels\na.png,dog;cat\nb.png,\nc.png,cat\nd.png,emu\n"
NUMBERS = "path,split,height\na.png,train,1.5\nb.png,test,-2\nc.png,train,3\n"


def write(folder: Path, table: str, names: str = "abcd") -> Path:
    for place, name in enumerate(names):
        Image.new("RGB", (4, 4), (place, 0, 0)).save(folder / f"{name}.png")
    (folder / "labels.csv").write_text(table)
    return folder


def find_labels(split: LabelledSplit) -> dict[str, list[float]]:
    return {path.name: row.tolist() for path, row in zip(split.paths, split.labels, strict=True)}


def test_sets_of_classes_are_read_and_relabelled(tmp_path: Path) -> None:
    data = DeviceData.open(write(tmp_path, SETS), split=RandomSplit(0.25))
    assert data.classes == ("cat", "dog", "emu")
    assert data.counts == (("cat", "dog", "emu"), 3, 1)
    moved = data.relabel(("ant", "emu", "dog", "cat"))
    assert isinstance(moved.train, LabelledSplit)
    assert isinstance(moved.test, LabelledSplit)
    assert find_labels(moved.train) | find_labels(moved.test) == {
        "a.png": [0, 0, 1, 1], "b.png": [0, 0, 0, 0], "c.png": [0, 0, 0, 1], "d.png": [0, 1, 0, 0],
    }  # fmt: skip
    assert (moved.train.count_classes(4) + moved.test.count_classes(4)).tolist() == [0, 1, 1, 2]
    with pytest.raises(DataError, check=has_code("FV1404", "labels in labels.csv that the run does not know: emu")):
        data.relabel(("cat", "dog"))


def test_a_run_with_too_many_classes_takes_no_memory(tmp_path: Path) -> None:
    """A coordinator chooses the classes of a Program, and each image would get a number for each of them."""
    data = DeviceData.open(write(tmp_path, SETS))
    with pytest.raises(DataError, check=has_code("FV2491", f"with {MOST_VALUES} labels each")):
        data.train.relabel(np.arange(len(data.classes)), MOST_VALUES)


def test_numbers_are_scaled_to_the_range_of_the_run(tmp_path: Path) -> None:
    data = DeviceData.open(write(tmp_path, NUMBERS))
    assert (data.classes, data.has_test_folder) == (("height",), True)
    form = LabelForm(task="regression", low=-3.0, high=3.0)
    fit = data.relabel(("height",)).fit_to(Batch(batch_size=2, labels=form))
    assert fit.train.labels.tolist() == [[0.5], [1.0]]
    np.testing.assert_allclose(fit.test.labels, [[-2 / 3]], rtol=1e-6)


def test_numbers_far_from_zero_keep_their_differences(tmp_path: Path) -> None:
    """A float32 of 1e9 has steps of 64."""
    table = "path,split,height\na.png,train,999999990\nb.png,test,999999995\nc.png,train,1e9\n"
    data = DeviceData.open(write(tmp_path, table))
    form = LabelForm(task="regression", low=999_999_990.0, high=1e9)
    fit = data.relabel(("height",)).fit_to(Batch(batch_size=2, labels=form))
    assert (fit.train.labels.tolist(), fit.test.labels.tolist()) == ([[-1.0], [1.0]], [[0.0]])
    assert fit.train.labels.dtype == np.float32


@pytest.mark.parametrize(
    ("table", "batch"),
    [
        (SETS, Batch(batch_size=2)),
        (SETS, Batch(batch_size=2, labels=LabelForm(task="regression"))),
        (NUMBERS, Batch(batch_size=2, labels=LabelForm(task="multi_label"))),
    ],
)
def test_labels_of_another_task_are_refused(tmp_path: Path, table: str, batch: Batch) -> None:
    with pytest.raises(DataError, check=has_code("FV1402")):
        DeviceData.open(write(tmp_path, table)).fit_to(batch)


def test_class_folders_do_not_fit_another_task(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "a.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "b.png")
    with pytest.raises(DataError, check=has_code("FV1402", "labels.csv")):
        DeviceData.open(tmp_path).fit_to(Batch(batch_size=2, labels=LabelForm(task="multi_label")))


def test_images_that_cannot_be_used_are_listed_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, SETS, "abc")
    (tmp_path / "c.png").write_bytes(b"")
    data = DeviceData.open(tmp_path, classes=("cat", "dog"), split=RandomSplit(0.0))
    assert [path.name for path in data.train.paths] == ["a.png", "b.png"]
    assert {path.name: reason for path, reason in data.unusable}["c.png"] == "an empty file"
    assert data.classes == ("cat", "dog")


def test_a_folder_that_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    before = DeviceData.open(write(tmp_path, SETS))
    assert DeviceData.open(tmp_path, before=before) is before
    write(tmp_path, SETS + "e.png,cat\n", "abcde")
    later = DeviceData.open(tmp_path, before=before)
    assert len(later.train) + len(later.test) == 5


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("path\na.png\n", "expected path"),
        ("path,labels,height\na.png,cat,1\n", "expected path"),
        ("path,labels,labels\na.png,cat,cat\n", "two columns"),
        ("path,labels\n../a.png,cat\n", "line 2"),
        ("path,labels\n/a.png,cat\n", "line 2"),
        ("path,labels\na.png,cat\na.png,dog\n", "line 3"),
        ("path,labels\na.png,cat\n./a.png,dog\n", "line 3"),
        ("path,labels\n.,cat\n", "line 2"),
        ("path,labels\na.png,ca\x01t\n", "not printable"),
        ("path,height\na.png,tall\n", "expected a number"),
        ("path,height\na.png,inf\n", "expected a number"),
        ("path,height\na.png,1e39\n", "'1e39', expected a number of at most 1e+09"),
        ("path,labels\n", "lists no image"),
        ('path,labels\n"a.png,cat\n', "no readable CSV"),
    ],
)
def test_a_label_file_that_cannot_be_used_is_refused_by_line(tmp_path: Path, table: str, named: str) -> None:
    (tmp_path / "labels.csv").write_text(table)
    with pytest.raises(DataError, check=has_code("FV2491", named)):
        read_label_file(tmp_path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_label_file(tmp_path, "labels", [("test/a.png", "test", "b;a"), ("train/b.png", "train", "")])
    table = read_label_file(tmp_path)
    assert (table.task, table.classes) == ("multi_label", ("a", "b"))
    assert [(row.path.name, row.label, row.part) for row in table.rows] == [
        ("a.png", ("a", "b"), "test"), ("b.png", (), "train"),
    ]  # fmt: skip


MASKS = "path,split,mask\na.png,train,masks/a.png\nb.png,test,masks/b.png\n"
PATCHES = Batch(batch_size=1, image_size=4, patch_size=2, labels=LabelForm(task="segmentation"))


def write_masks(folder: Path, *masks: list[list[int]], classes: str = "sky\nroad\ncar\n", table: str = MASKS) -> Path:
    write(folder, table, "ab")
    (folder / "classes.txt").write_text(classes)
    (folder / "masks").mkdir()
    for name, mask in zip("ab", masks, strict=True):
        Image.fromarray(np.array(mask, np.uint8)).save(folder / "masks" / f"{name}.png")
    return folder


FOUR = [[0, 0, 1, 1], [0, 2, 1, 9], [9, 9, 2, 2], [9, 9, 0, 2]]
"""A mask whose patches are mostly sky, road, nothing, car."""
ONE = [[1]]
"""A mask that is resized."""


def test_a_patch_has_the_class_of_most_of_its_pixels(tmp_path: Path) -> None:
    data = DeviceData.open(write_masks(tmp_path, FOUR, ONE))
    assert data.counts == (("sky", "road", "car"), 1, 1)
    fit = data.relabel(("car", "road", "tree")).fit_to(PATCHES)
    assert fit.train.labels.tolist() == [[-1, 1, -1, 0]], "the run has no sky"
    assert fit.test.labels.tolist() == [[1, 1, 1, 1]]
    assert fit.train.count_classes(3).tolist() == [1, 1, 0]
    same = data.fit_to(PATCHES).train.labels
    assert same.tolist() == [[0, 1, -1, 2]]
    with pytest.raises(DataError, check=has_code("FV1402", "segmentation")):
        data.fit_to(Batch(batch_size=2))


def test_an_image_without_a_readable_mask_is_listed(tmp_path: Path) -> None:
    write_masks(tmp_path, FOUR, ONE, table=MASKS + "c.png,train,masks/c.png\nd.png,train,masks/d.png\n")
    write(tmp_path, (tmp_path / "labels.csv").read_text(), "cd")
    whole = (tmp_path / "masks" / "a.png").read_bytes()
    (tmp_path / "masks" / "c.png").write_bytes(whole[:-30])
    data = DeviceData.open(tmp_path)
    assert [(path.name, reason) for path, reason in data.unusable] == [
        ("d.png", "its mask d.png: No such file or directory")
    ]
    fit = data.fit_to(PATCHES)
    assert fit.train.labels[1].tolist() == [-1] * 4
    _, readable = fit.train.load(np.arange(2), 4)
    assert readable.tolist() == [True, False]
    [(path, reason)] = fit.problems()[-1:]
    assert (path.name, "masks/c.png" in reason) == ("c.png", True)
    (tmp_path / "masks" / "c.png").write_bytes(whole)
    again = DeviceData.open(tmp_path, before=data).fit_to(PATCHES)
    assert again.train.labels[1].tolist() == [0, 1, -1, 2], "the mask was mended"
    _, readable = again.train.load(np.arange(2), 4)
    assert readable.all()


def test_a_mask_that_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    """A folder gets pictures all the time: thousands of masks would be decoded before each task."""
    data = DeviceData.open(write_masks(tmp_path, FOUR, ONE))
    first = data.fit_to(PATCHES).train.labels.tolist()
    mask = tmp_path / "masks" / "a.png"
    size, modified_ns = mask.stat().st_size, mask.stat().st_mtime_ns
    mask.write_bytes(b"x" * size)
    os.utime(mask, ns=(modified_ns, modified_ns))
    write(tmp_path, MASKS + "c.png,train,masks/b.png\n", "c")
    later = DeviceData.open(tmp_path, before=data)
    assert later.fit_to(PATCHES).train.labels.tolist() == [*first, [1, 1, 1, 1]]
    assert not later.problems()
    larger = msgspec.structs.replace(PATCHES, image_size=8)
    assert later.fit_to(larger).train.labels.shape == (2, 16), "all are read for another size"
    assert [path.name for path, _ in later.problems()] == ["a.png"]


def test_patches_of_single_pixels_take_no_memory(tmp_path: Path) -> None:
    """A coordinator chooses their size: 3 images would have 50 million labels."""
    write_masks(tmp_path, FOUR, ONE, table=MASKS + "c.png,train,masks/a.png\nd.png,train,masks/a.png\n")
    data = DeviceData.open(write(tmp_path, (tmp_path / "labels.csv").read_text(), "cd"))
    fine = msgspec.structs.replace(PATCHES, image_size=4096, patch_size=1)
    with pytest.raises(DataError, check=has_code("FV2491", "3 images with 16777216 labels each")):
        data.fit_to(fine)


def test_a_coloured_mask_is_refused(tmp_path: Path) -> None:
    write_masks(tmp_path, FOUR, ONE)
    Image.new("RGB", (4, 4)).save(tmp_path / "masks" / "a.png")
    fit = DeviceData.open(tmp_path).fit_to(PATCHES)
    assert "mode RGB" in fit.problems()[0][1]


@pytest.mark.parametrize(
    ("classes", "mask", "named"),
    [
        ("sky\nsky\n", "masks/a.png", "2 classes"),
        ("sky\n", "masks/a.png", "1 classes"),
        ("sky\n\nroad\n", "masks/a.png", "class ''"),
        ("".join(f"{place}\n" for place in range(256)), "masks/a.png", "256 classes"),
        ("sky\nroad\n", "../a.png", "../a.png"),
        ("sky\nroad\n", "", "mask ''"),
    ],
)
def test_masks_that_cannot_be_are_refused(tmp_path: Path, classes: str, mask: str, named: str) -> None:
    write_masks(tmp_path, FOUR, ONE, classes=classes, table=f"path,mask\na.png,{mask}\nb.png,masks/b.png\n")
    with pytest.raises(DataError, check=has_code("FV2491", named)):
        DeviceData.open(tmp_path)
