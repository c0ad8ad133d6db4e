"""The process that runs graphs leaves out the images that the device leaves out, while its folder changes."""

import csv
from copy import deepcopy
from pathlib import Path

import numpy as np
from PIL import Image

from edge_client.sandbox.worker import _KnownImages
from fedvit.data.growing import GrowingFolder
from fedvit.label_forms import LabelForm
from fedvit.program import Batch

BATCH = Batch(image_size=16, patch_size=4, batch_size=2, labels=LabelForm(task="segmentation"))
TESTED = ("a.png", "b.png", "c.png")


def write_picture(file: Path, shape: tuple[int, ...] = (16, 16, 3)) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 2, shape, np.uint8)).save(file)


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:60])


def write_rows(folder: Path, count: int) -> None:
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = [("train.png", "train", "train_mask.png"), *((name, "test", f"mask_{name}") for name in TESTED[:count])]
        csv.writer(file).writerows([("path", "split", "mask"), *rows])


def test_images_whose_masks_cannot_be_read_are_those_of_the_device(tmp_path: Path) -> None:
    """A mask may come damaged, and be mended, after the images before it were decoded."""
    folder, worker = tmp_path / "data", _KnownImages()
    folder.mkdir()
    (folder / "classes.txt").write_text("x\ny\n")
    for name in ("train.png", *TESTED):
        write_picture(folder / name)
        write_picture(folder / ("train_mask.png" if name == "train.png" else f"mask_{name}"), (16, 16))
    write_rows(folder, 2)
    damage(folder / "b.png")
    growing = GrowingFolder(folder, split_file=tmp_path / "split.json")

    def load() -> dict[str, bool]:
        """Send the images, as the device does; the ones that the process can use."""
        files = growing.data.fit_to(BATCH).test.files
        worker.add({"test": deepcopy(files)})
        _, readable = worker.files["test"].load(np.arange(len(files.paths)), BATCH.image_size)
        for one in worker.list_unreadable():
            files.failed[files.paths[one.row]] = one.reason
        assert readable.tolist() == [path not in files.failed for path in files.paths]
        return {path.name: bool(one) for path, one in zip(files.paths, readable, strict=True)}

    assert load() == {"a.png": True, "b.png": False}
    write_rows(folder, 3)
    damage(folder / "mask_c.png")
    assert growing.look()
    assert load() == {"a.png": True, "b.png": False, "c.png": False}
    write_picture(folder / "mask_c.png", (16, 16))
    assert growing.look()
    assert load() == {"a.png": True, "b.png": False, "c.png": True}
