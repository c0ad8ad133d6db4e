"""Images of the server as a model reads them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvit.data import server_images
from fedvit.data.folder import DeviceData
from fedvit.data.images import normalise, unfold
from fedvit.data.server_images import ServerImages
from fedvit.errors import DataError
from fedvit.program import Batch
from tests.support.codes import has_code

BATCH = Batch(image_size=4, patch_size=2, batch_size=8, mean=(0.5,) * 3, std=(0.5,) * 3)


def put(folder: Path, count: int) -> None:
    for number in range(count):
        path = folder / "any" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (20 * number,) * 3).save(path)


def test_all_images_are_read_whether_a_device_would_train_or_test_with_them(tmp_path: Path) -> None:
    put(tmp_path, 10)
    images, parts = ServerImages(tmp_path, BATCH), DeviceData.open(tmp_path)
    assert len(images) == 10 > len(parts.train)
    paths = [*parts.train.paths, *parts.test.paths]
    rows = np.array([9, 0, 4])
    want = [np.full((4, 4, 3), 20 * int(paths[row].stem), np.uint8) for row in rows]
    np.testing.assert_array_equal(images.read(rows), unfold(normalise(np.stack(want), BATCH), 2))


def test_an_image_without_pixels_is_black(tmp_path: Path) -> None:
    put(tmp_path, 1)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "any" / "0.png")
    (tmp_path / "any" / "0.png").write_bytes((tmp_path / "any" / "0.png").read_bytes()[:200])
    np.testing.assert_array_equal(ServerImages(tmp_path, BATCH).read(np.array([0])), -1)


def test_too_many_images_and_no_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 4)
    monkeypatch.setattr(server_images, "MOST_IMAGES", 3)
    with pytest.raises(DataError, check=has_code("FV2132")):
        ServerImages(tmp_path, BATCH)
    with pytest.raises(DataError, check=has_code("FV1402")):
        ServerImages(tmp_path / "nowhere", BATCH)
