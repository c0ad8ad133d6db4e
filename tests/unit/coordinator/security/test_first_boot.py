"""A boot partition is prepared, and what an imaging program wrote there is kept."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.security.first_boot import FORMER, TOKEN_FILE, USER_DATA, UpdateSource, make_commands, write_boot_files
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


def test_empty_partition(partition: Path, package: Path) -> None:
    """The second call, with another token, replaces the first one's."""
    write_boot_files(partition, "pi-1", "fedvit1-first", package)
    written = write_boot_files(partition, "pi-1", "fedvit1-abc", package)
    assert {file.name for file in written} == {USER_DATA, "meta-data", package.name}
    assert (partition / package.name).read_bytes() == b"a package"
    settings = read_user_data(partition)
    assert settings["hostname"] == "pi-1"
    assert settings["write_files"] == [{"path": TOKEN_FILE, "permissions": "0600", "content": "fedvit1-abc\n"}]
    assert settings["runcmd"] == make_commands(package.name)
    assert (partition / "meta-data").read_text() == "instance-id: fedvit-pi-1\n"


def test_board_that_updates_itself(partition: Path, package: Path) -> None:
    """Its root pins the key, before the device trains."""
    updates = UpdateSource("https://server/releases", "ed25519:" + 43 * "A")
    write_boot_files(partition, "pi-1", "fedvit1-abc", package, updates)
    *_, pin, timer = read_user_data(partition)["runcmd"]
    assert pin == ["edge-client", "update", updates.source, "--update-key", updates.key]
    assert timer == ["systemctl", "enable", "--now", "fedvit-update.timer"]


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
    assert settings["write_files"][0] == before["write_files"][0]
    assert [entry["content"] for entry in settings["write_files"][1:]] == ["fedvit1-second\n"]
    assert settings["runcmd"] == before["runcmd"] + make_commands(package.name)
    assert (partition / FORMER).read_text() == IMAGER
    assert (partition / "meta-data").read_text() == "instance-id: theirs\n"


@pytest.mark.parametrize(
    ("content", "named"),
    [("#!/bin/sh\necho\n", "#cloud-config"), ("#cloud-config\na: [", "YAML"), ("#cloud-config\nruncmd: x\n", "runcmd")],
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
