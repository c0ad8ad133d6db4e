"""A folder that changes while a device takes part in runs."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvit.data.folder import NEW_CLASS, DeviceData, why_passed_over
from fedvit.data.growing import GrowingFolder
from fedvit.errors import Damaged, DataError
from tests.support.codes import has_code

Images = Callable[..., None]


@pytest.fixture
def images(tmp_path: Path) -> Images:
    """`images("cat", "0.png", ..., value=100)`: write small gray images into a class folder."""

    def write(folder: str, *names: str, value: int = 100) -> None:
        (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            Image.new("RGB", (4, 4), (value,) * 3).save(tmp_path / "data" / folder / name)

    return write


def open_folder(tmp_path: Path, **options: float) -> GrowingFolder:
    return GrowingFolder(tmp_path / "data", split_file=tmp_path / "split.json", **options)


def make_numbered(first: int, last: int) -> list[str]:
    return [f"{number:03d}.png" for number in range(first, last)]


def values(data: DeviceData) -> list[int]:
    pixels, readable = data.train.load(np.arange(len(data.train)), 4)
    assert readable.all()
    return pixels[:, 0, 0, 0].tolist()


class TestLook:
    def test_nothing_new(self, tmp_path: Path, images: Images) -> None:
        images("train/cat", "0.png")
        images("test/cat", "1.png")
        folder = open_folder(tmp_path)
        before = folder.data
        assert not folder.look()
        assert folder.data is before

    def test_new_changed_and_removed_images(self, tmp_path: Path, images: Images) -> None:
        images("train/cat", "0.png", "1.png", value=10)
        images("test/cat", "0.png")
        folder = open_folder(tmp_path)
        assert values(folder.data) == [10, 10]
        images("train/cat", "1.png", value=20)
        os.utime(tmp_path / "data/train/cat/1.png", ns=(1, 1))  # its size is the same
        images("train/cat", "2.png", value=30)
        (tmp_path / "data/train/cat/0.png").unlink()
        assert folder.look()
        assert [path.name for path in folder.data.train.paths] == ["1.png", "2.png"]
        assert values(folder.data) == [20, 30]
        assert len(folder.data.test) == 1

    def test_image_that_was_damaged_is_tried_again_once_it_has_changed(self, tmp_path: Path, images: Images) -> None:
        images("train/cat", "0.png", "1.png")
        images("test/cat")
        damaged = tmp_path / "data/train/cat/0.png"
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-30])
        folder = open_folder(tmp_path)
        assert folder.data.train.load(np.array([0, 1]), 4)[1].tolist() == [False, True]
        images("train/cat", "2.png")
        assert folder.look()
        assert list(folder.data.train.failed) == [damaged]
        damaged.write_bytes(whole)
        assert folder.look()
        assert folder.data.train.load(np.array([0, 1, 2]), 4)[1].all()

    def test_only_new_images_are_decoded(self, tmp_path: Path, images: Images) -> None:
        images("train/cat", "0.png", "1.png", value=10)
        images("test/cat")
        folder = open_folder(tmp_path)
        assert values(folder.data) == [10, 10]
        changed = tmp_path / "data/train/cat/1.png"
        stamp = changed.stat()
        images("train/cat", "1.png", value=20)  # behind the device's back: size and time say that it is the same
        os.truncate(changed, stamp.st_size)
        os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        images("train/cat", "2.png", value=30)
        assert folder.look()
        assert values(folder.data) == [10, 10, 30]

    def test_new_class_waits_for_the_next_run(self, tmp_path: Path, images: Images) -> None:
        images("train/cat", "0.png")
        images("test/cat")
        folder = open_folder(tmp_path)
        images("train/ant", "0.png")
        assert folder.look(("cat", "dog"))
        assert folder.data.classes == ("cat",)
        assert folder.data.train.labels.tolist() == [0]
        assert folder.data.problems() == [(tmp_path / "data/train/ant/0.png", NEW_CLASS)]
        assert folder.look(None)
        assert folder.data.classes == ("ant", "cat")
        assert folder.data.train.labels.tolist() == [0, 1]

    def test_class_of_the_run_counts_at_once(self, tmp_path: Path, images: Images) -> None:
        images("train/cat", "0.png")
        images("test/cat")
        folder = open_folder(tmp_path)
        images("train/dog", "0.png")
        assert folder.look(("cat", "dog"))
        assert folder.data.classes == ("cat", "dog")

    def test_folder_without_images_leaves_the_data_as_they_were(self, tmp_path: Path, images: Images) -> None:
        images("train/cat", "0.png")
        images("test/cat")
        folder = open_folder(tmp_path)
        (tmp_path / "data/train/cat/0.png").unlink()
        with pytest.raises(DataError):
            folder.look()
        assert len(folder.data.train) == 1

    def test_unlabelled_images_are_no_class(self, tmp_path: Path, images: Images) -> None:
        images("cat", "0.png", "1.png")
        images("unlabelled", "0.png")
        data = open_folder(tmp_path).data
        assert data.classes == ("cat",)
        assert data.problems() == []


class TestSplit:
    def sides(self, data: DeviceData) -> dict[str, bool]:
        """Image -> whether it tests."""
        named = [(str(path.relative_to(data.folder)), False) for path in data.train.paths]
        return dict(named + [(str(path.relative_to(data.folder)), True) for path in data.test.paths])

    def test_first_start_splits_as_before(self, tmp_path: Path, images: Images) -> None:
        images("cat", *make_numbered(0, 20))
        images("dog", *make_numbered(0, 7))
        assert self.sides(open_folder(tmp_path).data) == self.sides(DeviceData.open(tmp_path / "data"))

    def test_images_stay_on_their_side(self, tmp_path: Path, images: Images) -> None:
        """Also after a restart; of 200 new images about a fifth tests: 20 to 60 are five standard deviations."""
        images("cat", *make_numbered(0, 20))
        images("dog", *make_numbered(0, 7))
        folder = open_folder(tmp_path)
        first = self.sides(folder.data)
        images("cat", *make_numbered(20, 220))
        assert folder.look()
        grown = self.sides(folder.data)
        assert {name: grown[name] for name in first} == first
        assert 20 <= sum(grown.values()) - sum(first.values()) <= 60
        for name in list(grown)[::2]:
            (tmp_path / "data" / name).unlink()
        after_restart = self.sides(open_folder(tmp_path).data)
        assert after_restart == {name: grown[name] for name in list(grown)[1::2]}

    def test_another_share_splits_anew(self, tmp_path: Path, images: Images) -> None:
        images("cat", *make_numbered(0, 20))
        open_folder(tmp_path)
        halves = open_folder(tmp_path, test_share=0.5)
        assert len(halves.data.test) == 10
        assert self.sides(open_folder(tmp_path, test_share=0.5).data) == self.sides(halves.data)

    def test_damaged_file_is_written_again_from_its_copy(
        self, tmp_path: Path, images: Images, caplog: pytest.LogCaptureFixture
    ) -> None:
        images("cat", *make_numbered(0, 20))
        first = self.sides(open_folder(tmp_path).data)
        files = [tmp_path / "split.json", tmp_path / "split.copy.json"]
        content = files[0].read_bytes()
        images("cat", *make_numbered(20, 40))
        for file in files:
            file.write_bytes(b"\xff{")
            folder = open_folder(tmp_path)
            assert self.sides(folder.data).items() >= first.items()
            assert len(folder.damaged) == (file == files[0])
            assert [each.read_bytes() for each in files] == [content] * 2
        assert "damaged" in caplog.text

    def test_images_are_not_split_anew_where_file_and_copy_are_damaged(self, tmp_path: Path, images: Images) -> None:
        images("cat", *make_numbered(0, 20))
        open_folder(tmp_path)
        for name in ("split.json", "split.copy.json"):
            (tmp_path / name).write_bytes(b"\xff{")
        with pytest.raises(Damaged, check=has_code("FV1704", "split.json is damaged")):
            open_folder(tmp_path)

    def test_file_of_an_older_version_gets_digest_and_copy(self, tmp_path: Path, images: Images) -> None:
        images("cat", *make_numbered(0, 20))
        first = self.sides(open_folder(tmp_path).data)
        file, copy = tmp_path / "split.json", tmp_path / "split.copy.json"
        content = file.read_bytes()
        copy.unlink()
        file.write_bytes(content.rpartition(b',"digest"')[0] + b"}")
        assert self.sides(open_folder(tmp_path).data) == first
        assert file.read_bytes() == copy.read_bytes() == content

    def test_file_says_nothing_about_the_images(self, tmp_path: Path, images: Images) -> None:
        images("cat", *make_numbered(0, 20))
        open_folder(tmp_path)
        text = (tmp_path / "split.json").read_text()
        assert "cat" not in text
        assert "png" not in text

    def test_folder_with_a_test_folder_has_none(self, tmp_path: Path, images: Images) -> None:
        images("train/cat", "0.png")
        images("test/cat", "0.png")
        open_folder(tmp_path)
        assert not (tmp_path / "split.json").exists()


def test_each_problem_is_logged_once(tmp_path: Path, images: Images, caplog: pytest.LogCaptureFixture) -> None:
    images("train/cat", "0.png")
    images("test/cat")
    (tmp_path / "data/train/cat/empty.png").touch()
    (tmp_path / "data/train/cat/film.mp4").write_text("x")
    os.mkfifo(tmp_path / "data/train/cat/pipe.png")
    folder = open_folder(tmp_path)
    assert {path.name: reason for path, reason in folder.data.problems()} == {
        "empty.png": "an empty file",
        "pipe.png": "not a regular file",
        "film.mp4": why_passed_over(Path("film.mp4")),
    }
    caplog.set_level(logging.WARNING)
    folder.log_problems()
    assert len(caplog.records) == 3
    (tmp_path / "data/train/cat/text.png").write_text("x")
    assert folder.look()
    folder.log_problems()
    folder.log_problems()
    assert len(caplog.records) == 4
