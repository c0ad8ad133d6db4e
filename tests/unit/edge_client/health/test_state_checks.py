"""Folders of state and of images."""

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image

from edge_client.health.doctor_context import DoctorContext
from edge_client.health.state_checks import check_data, check_files, check_state
from edge_client.health.status import Doing, Status, Unusable
from edge_client.storage.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.images import DAMAGED
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result
from fleet.partition import deal
from tests.support.damage import flip
from tests.support.doctors import levels


def test_damaged_files_are_named(context: DoctorContext) -> None:
    [nothing] = check_files(context)
    assert (nothing.level, nothing.what) == ("ok", "not checked: there is no state yet")
    assert context.state is not None
    digest = BlobStore(context.state / "blobs").put(b"weights").digest
    Vault(context.state / "vault").commit(Result("run", 1, "train", 5, {}, ResourceUse()), {"w": np.ones(4)})
    [fine] = check_files(context)
    assert (fine.level, fine.what) == ("ok", "all 3 files are undamaged")
    file = BlobStore(context.state / "blobs").path(digest)
    [local] = context.state.rglob("local.safetensors")
    flip(file)
    flip(local, 0.99)
    [found] = check_files(context)
    assert found.level == "warning"
    assert found.what.startswith("2 of 3 files are damaged: ")
    assert str(file) in found.what
    assert str(local) in found.what
    assert file.exists(), "who looks changes nothing"


def test_a_state_that_can_be_written_is_left_as_it_was(context: DoctorContext, tmp_path: Path) -> None:
    assert levels([*check_state(context)]) == [("state", "ok")]
    assert not (tmp_path / "state").exists()
    (tmp_path / "state").mkdir()
    assert levels([*check_state(context)]) == [("state", "ok")]
    assert list((tmp_path / "state").iterdir()) == []


def test_a_state_that_cannot_be_written(context: DoctorContext, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [found] = check_state(replace(context, state=tmp_path / "file" / "state"))
    assert found.level == "error"
    assert str(tmp_path / "file") in found.what
    assert "--state" in str(found.hint)


def test_images(context: DoctorContext, digits: Path) -> None:
    [found] = check_data(replace(context, data=digits))
    assert (found.level, found.what) == ("ok", "20 training and 12 test images of 3 classes: 0, 1, 2")


def test_images_all_that_is_left_out_is_named(context: DoctorContext, digits: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    cow = data / "train" / "cow"
    cow.mkdir()
    strays = [data / "readme.txt", data / "train" / "0" / "IMG_1.HEIC", data / "train" / "1" / "day2" / "a.png"]
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"x")
    damaged = [data / "train" / "0" / f"note{number}.png" for number in range(4)]
    for image in damaged:
        image.write_text("no image")
    _, unreadable, stray_files, empty = check_data(replace(context, data=data))
    assert all(str(image) in unreadable.what for image in damaged)
    assert stray_files.level == "warning"
    assert stray_files.what.startswith("not used: 3; ")
    for stray in (strays[0], strays[1], strays[2].parent):
        assert str(stray) in stray_files.what
    assert f"of an unknown type: .heic: {strays[1]}" in stray_files.what
    assert empty.what == "class folders without an image that can be read: cow; they do not count as classes"
    shutil.rmtree(data / "test")
    (data / "test").mkdir()
    assert "no test image" in " ".join(found.what for found in check_data(replace(context, data=data)))


def test_images_no_kind_of_unused_file_is_hidden_by_many_of_another(
    context: DoctorContext, digits: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    for number in range(20):
        (data / f"a{number:02}.txt").write_text("x")
    (data / "train" / "0" / "z.HEIC").write_text("x")
    _, stray_files = check_data(replace(context, data=data))
    assert "z.HEIC" in stray_files.what
    assert "a00.txt" in stray_files.what
    assert "and 15 more" in stray_files.what


def cut_off(path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def test_images_that_are_cut_off_are_found_and_named(context: DoctorContext, digits: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    broken = [cut_off(data / "train" / "1" / "zzz.jpg"), cut_off(data / "test" / "1" / "half.jpg")]
    [sampled] = check_data(replace(context, data=data, decoded_images=1))
    assert "; 1 of them were decoded on trial" in sampled.what
    whole, unreadable = check_data(replace(context, data=data, decoded_images=None))
    assert "on trial" not in whole.what
    assert (whole.level, unreadable.level) == ("ok", "warning")
    assert all(str(image) in unreadable.what for image in broken)
    assert DAMAGED in unreadable.what


def test_folder_of_several_devices_is_recognised(context: DoctorContext, digits: Path, tmp_path: Path) -> None:
    deal(str(digits), "iid", 2, tmp_path / "images" / "parts")
    for data in (tmp_path / "images", tmp_path / "images" / "parts"):
        [found] = check_data(replace(context, data=data))
        assert found.level == "error"
        assert str(tmp_path / "images" / "parts" / "device-0") in found.what


def test_images_that_the_device_could_not_decode_are_named(
    context: DoctorContext, digits: Path, tmp_path: Path
) -> None:
    """Their headers are good: only the running device has found out, and left it in its status."""
    state = tmp_path / "state"
    state.mkdir()
    unusable = {"damaged or cut off": Unusable(2, ("0/a.png", "1/b.png")), "an empty file": Unusable(1, ("0/c.png",))}
    status = Status(
        device="pi", federation="home", broker="b", software="1", process=1, started_s=0.0, written_s=0.0,
        doing=Doing(state="stopped", classes={}, unusable=unusable),
        rss_bytes=1, peak_rss_bytes=None, memory_budget_bytes=None,
    )  # fmt: skip
    (state / "status.json").write_bytes(msgspec.json.encode(status))
    _, found = check_data(replace(context, data=digits, state=state, decoded_images=1))
    assert found.level == "warning"
    assert found.what == ("images that could not be decoded in the last run: 2, damaged or cut off: 0/a.png, 1/b.png")


def test_no_images(context: DoctorContext, tmp_path: Path) -> None:
    [found] = check_data(replace(context, data=tmp_path / "nowhere"))
    assert found.level == "error"
    assert "no such folder" in found.what
    [found] = check_data(context)
    assert found.level == "warning"
