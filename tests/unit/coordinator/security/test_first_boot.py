"""A boot partition is prepared, and what an imaging program wrote there is kept."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.security.first_boot import (
    FOLDER,
    FORMER,
    SCRIPT,
    TOKEN,
    USER_DATA,
    UpdateSource,
    make_command,
    write_boot_files,
)
from fedvit.errors import ConfigError
from tests.support.codes import has_code

IMAGER = """#cloud-config
hostname: kitchen
users:
  - name: pi
write_files:
  - {path: /etc/motd, content: hello}
runcmd:
  - [raspi-config, nonint, do_ssh, "0"]
bootcmd:
  - [rfkill, unblock, wifi]
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    file = tmp_path / "fedvit-edge_1.0+py311_arm64.deb"
    file.write_bytes(b"a package")
    return file


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    folder = tmp_path / "bootfs"
    folder.mkdir()
    return folder


def read_user_data(partition: Path) -> dict[str, Any]:
    text = (partition / USER_DATA).read_text()
    assert text.startswith("#cloud-config\n")
    return dict(yaml.safe_load(text))


def read_script(partition: Path) -> str:
    """Return the script of the first start, after a check of its grammar."""
    script = partition / FOLDER / SCRIPT
    subprocess.run(["sh", "-n", script], check=True)
    return script.read_text()


def test_empty_partition(partition: Path, package: Path) -> None:
    """The second call, with another token and package, replaces what the first one wrote."""
    write_boot_files(partition, "pi-1", "fedvit1-first", package)
    newer = package.rename(package.with_name("fedvit-edge_1.1+py311_arm64.deb"))
    written = write_boot_files(partition, "pi-1", "fedvit1-abc", newer)
    assert {file.name for file in written} == {USER_DATA, TOKEN, SCRIPT, newer.name}
    assert {file.name for file in (partition / FOLDER).iterdir()} == {TOKEN, SCRIPT, newer.name}
    assert (partition / FOLDER / newer.name).read_bytes() == b"a package"
    assert (partition / FOLDER / TOKEN).read_text() == "fedvit1-abc\n"
    assert f'dpkg --install "$card"/{newer.name} &&' in read_script(partition)
    assert read_user_data(partition) == {"hostname": "pi-1", "bootcmd": [make_command()]}
    assert (partition / "meta-data").read_text() == "instance-id: fedvit-pi-1\n"


def test_board_that_updates_itself(partition: Path, package: Path) -> None:
    """Its root pins the key, then starts the timer."""
    updates = UpdateSource("https://server/releases", "ed25519:" + 43 * "A")
    write_boot_files(partition, "pi-1", "fedvit1-abc", package, updates)
    pin, timer = read_script(partition).split("follow_updates() {")[1].splitlines()[1:3]
    assert pin.split() == ["edge-client", "update", updates.source, "--update-key", updates.key]
    assert timer.split() == ["systemctl", "enable", "--now", "fedvit-update.timer"]


def test_settings_of_an_imaging_program_stay(partition: Path, package: Path) -> None:
    """The second call, with another token, replaces what the first one added."""
    (partition / USER_DATA).write_text(IMAGER)
    (partition / "meta-data").write_text("instance-id: theirs\n")
    for token in ("fedvit1-first", "fedvit1-second"):
        write_boot_files(partition, "pi-1", token, package)
    settings = read_user_data(partition)
    before = yaml.safe_load(IMAGER)
    assert settings["hostname"] == "kitchen"
    assert settings["users"] == before["users"]
    assert settings["write_files"] == before["write_files"]
    assert settings["runcmd"] == before["runcmd"]
    assert settings["bootcmd"] == [*before["bootcmd"], make_command()]
    assert (partition / FOLDER / TOKEN).read_text() == "fedvit1-second\n"
    assert (partition / FORMER).read_text() == IMAGER
    assert (partition / "meta-data").read_text() == "instance-id: theirs\n"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("#!/bin/sh\necho\n", "#cloud-config"),
        ("#cloud-config\na: [", "YAML"),
        ("#cloud-config\nbootcmd: x\n", "bootcmd"),
    ],
)
def test_user_data_of_another_kind_is_left_alone(partition: Path, package: Path, content: str, named: str) -> None:
    (partition / USER_DATA).write_text(content)
    with pytest.raises(ConfigError, check=has_code("FV1330", named)):
        write_boot_files(partition, "pi-1", "fedvit1-abc", package)
    assert (partition / USER_DATA).read_text() == content
    assert [file.name for file in partition.iterdir()] == [USER_DATA]


def test_missing_folder_and_package_are_named(partition: Path, package: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1330", str(partition / "no"))):
        write_boot_files(partition / "no", "pi-1", "fedvit1-abc", package)
    with pytest.raises(ConfigError, check=has_code("FV1330", "other.txt")):
        write_boot_files(partition, "pi-1", "fedvit1-abc", package.with_name("other.txt"))
