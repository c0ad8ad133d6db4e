"""What torch makes of images and draws is what numpy makes of them on a device."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from PIL import Image

from edge_client.work.batches import training_feeds
from fedvit.data.folder import DeviceData
from fedvit.data.images import augment, draw_variation
from fedvit.errors import DataError
from fedvit.program import Batch, Train
from fleet.engines.pictures import Pictures, draw_training, training_samples, varied
from tests.support.codes import has_code

HALF = (0.5, 0.5, 0.5)
PHASE = Train(graph="train", groups=(), lr=0.1, epochs=2)


def batch(**options: object) -> Batch:
    given = {"image_size": 8, "patch_size": 4, "batch_size": 4, "mean": (0.4, 0.5, 0.6), "std": HALF, **options}
    return Batch(**given)  # type: ignore[arg-type]


@given(st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 0.3]), st.integers(0, 2**31))
def test_variation_gives_the_pixels_of_a_device(padding: int, flip: bool, brightness: float, seed: int) -> None:
    asked = batch(crop_padding=padding, flip=flip, brightness=brightness)
    images = np.random.default_rng(seed).integers(0, 256, (5, 8, 8, 3)).astype(np.uint8)
    drawn = draw_variation(np.arange(5), asked, np.random.default_rng(seed))
    fed = {name: torch.from_numpy(value) for name, value in drawn._asdict().items() if value is not None}
    theirs = augment(images, asked, drawn)
    assert np.array_equal(varied(torch.from_numpy(images), fed, asked).numpy(), theirs)


@pytest.fixture
def data(tmp_path: Path) -> DeviceData:
    """Eleven training images of two classes, of which one has a good header and no more, and two for tests."""
    draw = np.random.default_rng(0)
    for number in range(13):
        folder = tmp_path / "device" / ("train" if number < 11 else "test") / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3)).astype(np.uint8)).save(folder / f"{number}.png")
    broken = tmp_path / "device" / "train" / "class-0" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    return DeviceData.open(tmp_path / "device")


@pytest.mark.parametrize("views", [UNSET, 2], ids=["new", "views"])
def test_batches_are_those_of_a_device(data: DeviceData, views: int | UnsetType) -> None:
    """Order, variation, masks, padding and weights, over two passes."""
    asked = batch(crop_padding=1, flip=True, mask_ratio=0.5, views=views)
    pictures = Pictures(batch(), torch.device("cpu"))
    images = pictures.add(data.train)
    pictures.finish()

    def generators() -> list[np.random.Generator]:
        return [np.random.default_rng(seed) for seed in range(3)]

    drawn = draw_training(images, asked, PHASE, generators())
    order, picture, mask = generators()
    assert len(drawn.epochs) == 2 * 3
    for step, epoch in enumerate(drawn.epochs):
        if step % 3 == 0:
            rows = order.permutation(11)
        some = rows[step % 3 * 4 : step % 3 * 4 + 4]
        feeds, readable = training_feeds(data.train, some, asked, 4, picture, mask)
        fed = {name: torch.from_numpy(array[step]) for name, array in drawn.arrays.items()}
        ours = training_samples(pictures.pixels, fed, asked)["batch/patches"].numpy()
        real = len(some)  # what padding holds is weighed with 0
        assert np.allclose(ours[:real], feeds["batch/patches"][:real], atol=1e-6)
        for name in ("labels", "weight", "kept"):
            assert np.array_equal(fed[name][:real].numpy(), feeds[f"batch/{name}"][:real])
        assert np.array_equal(fed["weight"].numpy(), feeds["batch/weight"])
        assert np.array_equal(drawn.readable[step], readable)
        assert epoch == step // 3


def test_images_of_a_folder_are_decoded_once_for_all_its_devices(data: DeviceData) -> None:
    pictures = Pictures(batch(), torch.device("cpu"))
    first, second = pictures.add(data.train), pictures.add(data.relabel(data.classes).train)
    pictures.finish()
    assert np.array_equal(first.rows, second.rows)
    assert len(pictures.pixels) == 11


def test_device_without_a_readable_image_is_refused(data: DeviceData) -> None:
    for path in data.train.paths:
        path.write_bytes(path.read_bytes()[:60])
    images = Pictures(batch(), torch.device("cpu")).add(data.train)
    with pytest.raises(DataError, check=has_code("FV1403")):
        draw_training(images, batch(), PHASE, [np.random.default_rng(seed) for seed in range(3)])
