"""The camera example: the script as it is, with a program in the place of the camera's."""

import os
import shlex
import subprocess
from pathlib import Path

from PIL import Image

from fedvit.data.layout import read_tree

SCRIPT = Path(__file__).parents[2] / "deploy" / "camera" / "take-picture.sh"


def take(folder: Path, camera: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FEDVIT_CAMERA": camera}
    return subprocess.run(["sh", str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True)


def test_picture_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    """While it is written, the folder holds nothing that a device would read."""
    photo, seen = tmp_path / "photo.jpg", tmp_path / "seen"
    Image.new("RGB", (8, 8)).save(photo)
    camera = tmp_path / "camera.sh"
    camera.write_text(f'cp {shlex.quote(str(photo))} "$1"\nls {shlex.quote(str(tmp_path / "images"))} > {seen}\n')
    done = take(tmp_path / "images", f"sh {camera}")
    assert done.returncode == 0, done.stderr
    assert seen.read_text() == ""
    [name] = read_tree(tmp_path / "images", 0).images
    assert (tmp_path / "images" / name).read_bytes() == photo.read_bytes()
    assert len(os.listdir(tmp_path / "images")) == 1


def test_camera_that_fails_leaves_nothing(tmp_path: Path) -> None:
    camera = tmp_path / "camera.sh"
    camera.write_text('printf half > "$1"\nexit 3\n')
    assert take(tmp_path / "images", f"sh {camera}").returncode == 3
    assert os.listdir(tmp_path / "images") == []
