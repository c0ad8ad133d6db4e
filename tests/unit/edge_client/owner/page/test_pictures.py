import io
from pathlib import Path

import pytest
from PIL import Image

from edge_client.owner.page.pictures import LARGE, SMALL, PictureFolder
from fedvit.errors import ConfigError, DataError
from tests.support.codes import has_code
from tests.support.owner_pages import Home, add_image, make_home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path)


def test_label_moves_as_edge_client_label_does(home: Home) -> None:
    """An image of the same name stays, and undo brings back each of the newest ones."""
    add_image(home.images / "cat" / "0000.png", 7)
    before, pictures = home.files(), PictureFolder(home.images)
    pictures.label("0000.png", "cat")
    pictures.label("0001.png", "dog")
    assert {"cat/0000-2.png", "cat/0000.png", "dog/0001.png"} < set(home.files())
    assert [pictures.undo(), pictures.undo(), pictures.undo()] == ["0001.png", "0000.png", None]
    assert home.files() == before


def test_undo_overwrites_no_picture_that_arrived_since(home: Home) -> None:
    pictures = PictureFolder(home.images)
    pictures.label("0000.png", "cat")
    add_image(home.images / "unlabelled" / "0000.png", 7)
    before = home.files()
    with pytest.raises(DataError, check=has_code("FV1413", "0000.png")):
        pictures.undo()
    assert home.files() == before
    (home.images / "unlabelled" / "0000.png").unlink()
    assert pictures.undo() == "0000.png"


def test_picture_that_is_gone_and_class_that_does_not_exist(home: Home) -> None:
    pictures = PictureFolder(home.images)
    with pytest.raises(DataError, check=has_code("FV1403")):
        pictures.label("gone.png", "cat")
    with pytest.raises(ConfigError, check=has_code("FV1413", "'bird'")):
        pictures.label("0000.png", "bird")
    with pytest.raises(DataError):
        pictures.label("../cat/known.png", "dog")
    assert pictures.newest is None


def test_new_class_folder_is_found(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = PictureFolder(home.images)
    assert pictures.open_classes().classes == ("cat", "dog")
    (home.images / "bird").mkdir()
    monkeypatch.setattr("edge_client.owner.page.pictures._CLASSES_S", 0.0)
    assert pictures.open_classes().classes == ("bird", "cat", "dog")


def test_picture_is_drawn_small_upright_and_without_its_exif_data(home: Home) -> None:
    file = home.images / "cat" / "camera.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by the camera
    exif[0x010E] = "at home"
    Image.new("RGB", (2000, 1000), (200, 10, 10)).save(file, exif=exif)
    drawn = PictureFolder(home.images).draw(file, LARGE)
    assert b"at home" not in drawn
    with Image.open(io.BytesIO(drawn)) as shown:
        assert (shown.format, shown.size, dict(shown.getexif())) == ("JPEG", (LARGE // 2, LARGE), {})


def test_changed_picture_is_drawn_again(home: Home) -> None:
    file, pictures = home.images / "cat" / "known.png", PictureFolder(home.images)
    before = pictures.draw(file, SMALL)
    assert pictures.draw(file, SMALL) is before
    Image.new("RGB", (9, 9)).save(file)
    assert pictures.draw(file, SMALL) != before


def test_picture_that_takes_too_much_memory_or_is_damaged(home: Home) -> None:
    file = home.images / "cat" / "large.png"
    Image.new("RGB", (600, 600)).save(file)
    with pytest.raises(DataError, check=has_code("FV1403", "too large")):
        PictureFolder(home.images, decoded_bytes=1_000_000).draw(file, SMALL)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, check=has_code("FV1403")):
        PictureFolder(home.images).draw(file, SMALL)
    file.unlink()
    with pytest.raises(DataError):
        PictureFolder(home.images).draw(file, SMALL)
