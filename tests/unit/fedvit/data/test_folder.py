from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvit.data.folder import DeviceData
from fedvit.data.split import RandomSplit
from fedvit.errors import ConfigError, DataError
from tests.support.codes import has_code


def put(folder: Path, *names: str, value: int = 100, side: int = 4) -> None:
    """Write small gray images; the folder exists even without names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (side, side), (value,) * 3).save(folder / name)


def make_numbered(count: int) -> list[str]:
    return [f"{number:02d}.png" for number in range(count)]


def break_late(path: Path) -> None:
    """Leave the header as it is, lose the pixels."""
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:200])


class TestLayouts:
    def test_folders_of_systems_are_not_classes(self, tmp_path: Path) -> None:
        """A stick has lost+found, which only root can list."""
        put(tmp_path / "cat", "0.png")
        for name in ("lost+found", "System Volume Information", ".Trash-1000"):
            put(tmp_path / name, "1.png")
        data = DeviceData.open(tmp_path)
        assert (data.classes, data.empty, data.problems()) == (("cat",), (), [])

    def test_train_and_test(self, tmp_path: Path) -> None:
        """Classes are those of both parts together, sorted: bird is in test only, dog in train only, cow is empty."""
        put(tmp_path / "train/cat", "1.png", "0.JPG")
        put(tmp_path / "train/dog", "0.png")
        put(tmp_path / "train/cow")
        put(tmp_path / "test/cat", "9.png")
        put(tmp_path / "test/bird", "0.png")
        data = DeviceData.open(tmp_path)
        assert (data.classes, data.empty) == (("bird", "cat", "dog"), ("cow",))
        assert [path.name for path in data.train.paths] == ["0.JPG", "1.png", "0.png"]
        np.testing.assert_array_equal(data.train.labels, [1, 1, 2])
        np.testing.assert_array_equal(data.test.labels, [0, 1])
        assert data.train.labels.dtype == np.int64
        assert (len(data.train), len(data.test)) == (3, 2)

    def test_an_empty_test_folder_means_no_test_images(self, tmp_path: Path) -> None:
        put(tmp_path / "train/cat", *make_numbered(10))
        put(tmp_path / "test/cat")
        data = DeviceData.open(tmp_path)
        assert (len(data.train), len(data.test)) == (10, 0)

    def test_plain_is_split_per_class(self, tmp_path: Path) -> None:
        """Share .2: 10 -> 2 test; 2 -> .4, but at least 1; a single image stays in train; an empty class has none."""
        put(tmp_path / "a", *make_numbered(10))
        put(tmp_path / "b", *make_numbered(2))
        put(tmp_path / "c", *make_numbered(1))
        put(tmp_path / "d")
        data = DeviceData.open(tmp_path)
        assert (data.classes, data.empty) == (("a", "b", "c"), ("d",))
        assert np.bincount(data.test.labels, minlength=3).tolist() == [2, 1, 0]
        assert np.bincount(data.train.labels, minlength=3).tolist() == [8, 1, 1]
        assert not set(data.train.paths) & set(data.test.paths)

    def test_the_seed_decides_the_split(self, tmp_path: Path) -> None:
        put(tmp_path / "a", *make_numbered(40))
        first, again, other = (DeviceData.open(tmp_path, split=RandomSplit(seed=seed)).test.paths for seed in (3, 3, 4))
        assert first == again
        assert first != other

    def test_train_without_test_is_split_too(self, tmp_path: Path) -> None:
        put(tmp_path / "train/a", *make_numbered(10))
        data = DeviceData.open(tmp_path, split=RandomSplit(0.3))
        assert (len(data.train), len(data.test)) == (7, 3)

    def test_a_class_may_be_named_train(self, tmp_path: Path) -> None:
        put(tmp_path / "car", "0.png")
        put(tmp_path / "train", "0.png")
        assert DeviceData.open(tmp_path).classes == ("car", "train")

    def test_hidden_and_other_files_do_not_count(self, tmp_path: Path) -> None:
        put(tmp_path / "a", "0.png", "._0.png")
        put(tmp_path / ".cache", "0.png")
        put(tmp_path / "a/deeper", "0.png")
        (tmp_path / "a/notes.txt").write_text("x")
        data = DeviceData.open(tmp_path)
        assert data.classes == ("a",)
        assert [path.name for path in data.train.paths] == ["0.png"]
        assert data.unusable == ()

    def test_a_share_that_is_none(self, tmp_path: Path) -> None:
        put(tmp_path / "a", *make_numbered(2))
        with pytest.raises(ConfigError, check=has_code("FV1408", "1.5")):
            DeviceData.open(tmp_path, split=RandomSplit(1.5))


class TestRefusals:
    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(DataError):
            DeviceData.open(tmp_path / "nowhere")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DataError):
            DeviceData.open(tmp_path / "file")

    @pytest.mark.parametrize("inside", ["", "train", "train/../test"])
    def test_no_class_folders(self, tmp_path: Path, inside: str) -> None:
        (tmp_path / inside).mkdir(exist_ok=True, parents=True)
        with pytest.raises(DataError):
            DeviceData.open(tmp_path)

    @pytest.mark.parametrize("inside", [".", "train"])
    def test_images_beside_where_class_folders_should_be(self, tmp_path: Path, inside: str) -> None:
        put(tmp_path / inside, "0.png")
        with pytest.raises(DataError):
            DeviceData.open(tmp_path)

    def test_no_images_to_train_with(self, tmp_path: Path) -> None:
        put(tmp_path / "train/cat")
        put(tmp_path / "test/dog", "0.png")
        with pytest.raises(DataError):
            DeviceData.open(tmp_path)

    def test_one_line_even_with_many_classes(self, tmp_path: Path) -> None:
        for number in range(11):
            put(tmp_path / f"c{number:02d}")
        with pytest.raises(DataError, check=has_code("FV1403")):
            DeviceData.open(tmp_path)

    def test_all_unreadable(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a/0.png").write_text("no image")
        (tmp_path / "a/1.png").touch()
        with pytest.raises(DataError):
            DeviceData.open(tmp_path)

    def test_a_link_to_itself_is_an_unreadable_image(self, tmp_path: Path) -> None:
        put(tmp_path / "a", "0.png")
        (tmp_path / "a/loop.png").symlink_to(tmp_path / "a/loop.png")
        data = DeviceData.open(tmp_path)
        assert [path.name for path, _ in data.unusable] == ["loop.png"]


def test_unreadable_headers_are_left_out_and_listed(tmp_path: Path) -> None:
    put(tmp_path / "train/a", "0.png", "2.png")
    (tmp_path / "train/a/1.png").write_text("no image")
    put(tmp_path / "test/a", "0.png")
    (tmp_path / "test/a/gone.png").symlink_to(tmp_path / "nowhere.png")
    data = DeviceData.open(tmp_path)
    assert [path.name for path in data.train.paths] == ["0.png", "2.png"]
    assert dict(data.unusable) == {
        tmp_path / "train/a/1.png": "not a PNG, JPEG, BMP, WebP, GIF, TIFF, PGM or PPM image",
        tmp_path / "test/a/gone.png": "No such file or directory",
    }


@pytest.mark.parametrize("cache_bytes", [0, 3 * 8 * 8 * 3 - 1, 3 * 8 * 8 * 3], ids=["none", "too small", "just fits"])
class TestLoad:
    """Three images at 8x8x3 bytes; what comes back is the same with and without a cache."""

    def open_folder(self, folder: Path, cache_bytes: int) -> DeviceData:
        for number, value in enumerate((10, 20, 30)):
            put(folder / "train/a", f"{number}.png", value=value, side=8)
        put(folder / "test/a")
        return DeviceData.open(folder, cache_bytes=cache_bytes)

    def test_in_the_order_asked_for_with_repeats(self, tmp_path: Path, cache_bytes: int) -> None:
        images, readable = self.open_folder(tmp_path, cache_bytes).train.load(np.array([2, 0, 2]), 8)
        assert images.shape == (3, 8, 8, 3)
        assert images.dtype == np.uint8
        assert images[:, 0, 0, 0].tolist() == [30, 10, 30]
        assert readable.tolist() == [True, True, True]

    def test_nothing_asked(self, tmp_path: Path, cache_bytes: int) -> None:
        images, readable = self.open_folder(tmp_path, cache_bytes).train.load(np.array([], dtype=np.int64), 8)
        assert images.shape == (0, 8, 8, 3)
        assert readable.shape == (0,)

    def test_late_failure_gives_zeros(self, tmp_path: Path, cache_bytes: int) -> None:
        data = self.open_folder(tmp_path, cache_bytes)
        broken = tmp_path / "train/a/1.png"
        break_late(broken)
        assert data.train.failed == {}
        for _ in range(2):
            images, readable = data.train.load(np.array([0, 1, 2]), 8)
            assert images[:, 0, 0, 0].tolist() == [10, 0, 30]
            assert not images[1].any()
            assert readable.tolist() == [True, False, True]
            assert readable.dtype == np.bool_
        assert set(data.train.failed) == {broken}
        assert data.test.failed == {}

    def test_what_comes_back_is_the_callers_own(self, tmp_path: Path, cache_bytes: int) -> None:
        train = self.open_folder(tmp_path, cache_bytes).train
        train.load(np.array([0]), 8)[0][:] = 99
        assert train.load(np.array([0]), 8)[0].max() == 10

    def test_another_size_later(self, tmp_path: Path, cache_bytes: int) -> None:
        train = self.open_folder(tmp_path, cache_bytes).train
        for size in (8, 4, 8):
            images, _ = train.load(np.array([1]), size)
            assert images.shape == (1, size, size, 3)
            assert (images == 20).all()

    def test_decoded_once_or_each_time(self, tmp_path: Path, cache_bytes: int) -> None:
        """With a cache that fits, a file may go after its first use; without one it is missed."""
        train = self.open_folder(tmp_path, cache_bytes).train
        train.load(np.array([0]), 8)
        (tmp_path / "train/a/0.png").unlink()
        _, readable = train.load(np.array([0]), 8)
        assert readable.tolist() == [cache_bytes >= 3 * 8 * 8 * 3]


class TestRelabelled:
    def test_labels_follow_the_runs_order(self, tmp_path: Path) -> None:
        """Here cat 0, dog 1; in the run dog 0, cat 2."""
        put(tmp_path / "train/cat", "0.png")
        put(tmp_path / "train/dog", "0.png", "1.png")
        put(tmp_path / "test/dog", "0.png")
        data = DeviceData.open(tmp_path)
        there = data.relabel(("dog", "emu", "cat"))
        assert there.classes == ("dog", "emu", "cat")
        np.testing.assert_array_equal(there.train.labels, [2, 0, 0])
        np.testing.assert_array_equal(there.test.labels, [0])
        np.testing.assert_array_equal(data.train.labels, [0, 1, 1])

    def test_decoded_images_are_shared(self, tmp_path: Path) -> None:
        put(tmp_path / "train/cat", "0.png")
        put(tmp_path / "test/cat")
        data = DeviceData.open(tmp_path)
        data.train.load(np.array([0]), 4)
        (tmp_path / "train/cat/0.png").unlink()
        assert data.relabel(("cat",)).train.load(np.array([0]), 4)[1].all()

    def test_an_unknown_class_without_images_does_no_harm(self, tmp_path: Path) -> None:
        put(tmp_path / "train/cat", "0.png")
        put(tmp_path / "train/ant")
        np.testing.assert_array_equal(DeviceData.open(tmp_path).relabel(("cat",)).train.labels, [0])

    def test_unknown_classes_with_images(self, tmp_path: Path) -> None:
        """Also when only the test part holds one; the run's first ten classes are named."""
        put(tmp_path / "train/cat", "0.png")
        put(tmp_path / "train/emu", "0.png")
        put(tmp_path / "test/ant", "0.png")
        run = ("cat", *(f"c{number}" for number in range(11)))
        with pytest.raises(DataError, check=has_code("FV1404")):
            DeviceData.open(tmp_path).relabel(run)


def test_decoded_images_are_forgotten_when_their_memory_is_needed(tmp_path: Path) -> None:
    """A file that changes is still what it was, until it is forgotten: also for those who share it."""
    put(tmp_path / "train/cat", "0.png", value=100)
    data = DeviceData.open(tmp_path)
    relabelled = data.relabel(("ant", "cat"))
    row = np.array([0])

    def gray() -> int:
        images, readable = relabelled.train.load(row, 4)
        assert readable.all()
        return int(images[0, 0, 0, 0])

    assert gray() == 100
    put(tmp_path / "train/cat", "0.png", value=200)
    assert gray() == 100
    data.forget()
    assert gray() == 200
