import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from PIL import Image

from fedvit.errors import DataError
from fleet.datasets.imagefolder import read_imagefolder
from tests.support.codes import has_code
from tests.support.pictures import png

Write = Callable[[Path, dict[str, bytes]], Path]


def in_folder(where: Path, members: dict[str, bytes]) -> Path:
    path = where / "set"
    for name, content in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (path / name).mkdir(exist_ok=True)
        else:
            (path / name).write_bytes(content)
    return path


def in_zip(where: Path, members: dict[str, bytes]) -> Path:
    path = where / "set.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture(params=[in_folder, in_zip])
def write(request: pytest.FixtureRequest) -> Write:
    return cast(Write, request.param)


@pytest.mark.parametrize("top", ["", "cats-and-dogs/"])
@pytest.mark.parametrize("train", ["", "train/"])
def test_layouts(tmp_path: Path, write: Write, top: str, train: str) -> None:
    """Sorted by class and name: cat/a 1, cat/b 2, dog/a 3; the class without images is a class too."""
    members = {"dog/a.png": png(3), "cat/b.PNG": png(2), "cat/a.png": png(1), "emu/": b"", "cat/readme.txt": b"x"}
    samples = read_imagefolder(
        write(tmp_path, {f"{top}{train}{name}": content for name, content in members.items()}), 4
    )
    assert samples.classes == ("cat", "dog", "emu")
    np.testing.assert_array_equal(samples.labels, [0, 0, 1])
    assert len(samples) == len(samples.images) == 3
    images = samples.images[np.array([2, 0])]
    assert images.shape == (2, 4, 4, 3)
    assert images.dtype == np.uint8
    assert images[:, 0, 0, 0].tolist() == [3, 1]
    assert samples.unreadable == ()
    assert samples.dataset in ("set", "set.zip")


def test_train_and_test_images_are_put_together(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path, {"train/b/0.png": png(1), "test/a/0.png": png(2), "test/b/0.png": png(3)})
    samples = read_imagefolder(path, 4)
    assert samples.classes == ("a", "b")
    np.testing.assert_array_equal(samples.labels, [1, 0, 1])
    assert samples.images[np.arange(3)][:, 0, 0, 0].tolist() == [1, 2, 3]


def test_a_single_class_is_no_wrapping_folder(tmp_path: Path, write: Write) -> None:
    assert read_imagefolder(write(tmp_path, {"cat/0.png": png(1)}), 4).classes == ("cat",)


def test_unreadable_images_are_left_out_and_listed(tmp_path: Path, write: Write) -> None:
    samples = read_imagefolder(write(tmp_path, {"cat/0.png": png(1), "cat/1.png": b"no image"}), 4)
    assert len(samples) == 1
    (line,) = samples.unreadable
    assert "1.png: not a PNG" in line


def test_an_image_that_breaks_late_is_named(tmp_path: Path, write: Write) -> None:
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(noise, "PNG")
    samples = read_imagefolder(write(tmp_path, {"cat/0.png": noise.getvalue()[:500]}), 4)
    with pytest.raises(DataError, check=has_code("FV1403")):
        samples.images[np.array([0])]


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({"cat/0.png": b"no image"}, "FV2008"),
        ({"cat/": b"", "dog/": b""}, "FV2008"),
        ({"0.png": png(1)}, "FV1402"),
    ],
)
def test_set_without_an_image_or_class_folders(
    tmp_path: Path, write: Write, members: dict[str, bytes], code: str
) -> None:
    with pytest.raises(DataError, check=has_code(code)):
        read_imagefolder(write(tmp_path, members), 4)


def test_path_that_is_no_folder_and_no_zip(tmp_path: Path) -> None:
    (tmp_path / "set.zip").write_text("not packed")
    for name in ("gone", "set.zip"):
        with pytest.raises(DataError, check=has_code("FV2001")):
            read_imagefolder(tmp_path / name, 4)


@pytest.mark.parametrize("name", ["../cat/0.png", "cat/../../0.png", "/cat/0.png", "..\\cat\\0.png", "C:\\cat\\0.png"])
def test_members_that_point_outside_are_refused(tmp_path: Path, name: str) -> None:
    path = in_zip(tmp_path, {"cat/0.png": png(1), name: png(2)})
    with pytest.raises(DataError, check=has_code("FV2009")):
        read_imagefolder(path, 4)


def test_what_macs_add_to_archives_does_not_count(tmp_path: Path) -> None:
    path = in_zip(tmp_path, {"top/cat/0.png": png(1), "__MACOSX/top/cat/0.png": b"x", ".DS_Store": b"x"})
    assert read_imagefolder(path, 4).classes == ("cat",)


def test_an_archive_packed_on_windows(tmp_path: Path) -> None:
    assert read_imagefolder(in_zip(tmp_path, {"train\\cat\\0.png": png(7)}), 4).classes == ("cat",)


def test_a_locked_member_is_left_out(tmp_path: Path) -> None:
    """Bit 0 of a member's flags says that a password is needed; it is written in the central directory too."""
    path = in_zip(tmp_path, {"cat/0.png": png(1), "cat/1.png": png(2)})
    raw = bytearray(path.read_bytes())
    raw[raw.rfind(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    samples = read_imagefolder(path, 4)
    assert len(samples) == 1
    assert "1.png" in samples.unreadable[0]
    assert "password" in samples.unreadable[0]


def test_a_damaged_member_is_left_out(tmp_path: Path) -> None:
    """The archive begins with the mark of its first member; the table at its end is still good."""
    path = in_zip(tmp_path, {"cat/0.png": png(5), "cat/1.png": png(6)})
    path.write_bytes(b"gone" + path.read_bytes()[4:])
    samples = read_imagefolder(path, 4)
    assert samples.unreadable == ("cannot read image cat/0.png: Bad magic number for file header",)
    assert samples.images[np.array([0])].max() == 6


def test_an_image_that_goes_away_is_named(tmp_path: Path) -> None:
    path = in_folder(tmp_path, {"cat/0.png": png(5)})
    samples = read_imagefolder(path, 4)
    (path / "cat/0.png").unlink()
    with pytest.raises(DataError, check=has_code("FV1403")):
        samples.images[np.array([0])]


@pytest.mark.parametrize("name", ["", ".", "./"])
def test_a_member_without_a_name_does_not_count(tmp_path: Path, name: str) -> None:
    path = in_zip(tmp_path, {"cat/0.png": png(1)})
    nameless = zipfile.ZipInfo()
    nameless.filename = name
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(nameless, b"x")
    assert len(read_imagefolder(path, 4)) == 1


@pytest.mark.parametrize(
    ("before", "after"), [("é".encode(), b"\xff\xfe"), (b"PK\x01\x02\x14\x03\x14", b"PK\x01\x02\x14\x03\x63")]
)
def test_an_archive_that_cannot_be_listed_is_named(tmp_path: Path, before: bytes, after: bytes) -> None:
    """A name is not UTF-8, or a later version of the format is needed."""
    path = in_zip(tmp_path, {"é/0.png": png(1)})
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(DataError, check=has_code("FV2001", "set.zip")):
        read_imagefolder(path, 4)
