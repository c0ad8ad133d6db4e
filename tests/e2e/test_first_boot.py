"""The script of a board's first start, with the real dpkg.

Without a network or room it continues later, and a new token on the card is used.
"""

import os
import subprocess
from pathlib import Path

import pytest

from coordinator.security.first_boot import make_command, write_boot_files
from tests.support.roots import Root, build_package

START = "start --no-block fedvit-join.service fedvit-edge.service"
ENABLE = "enable fedvit-join.service fedvit-edge.service"


class Board:
    """A board with a card that `coordinator enroll --boot` has written."""

    def __init__(self, root: Root, package: Path) -> None:
        self.root = root
        self.package = package
        (root.home / "var/lib/cloud/instance").mkdir(parents=True)
        root.add_program("apt-get", "echo 'Temporary failure resolving the archive' >&2; exit 100")
        self.give("fedvit1-first")

    def give(self, token: str) -> None:
        """Write the card."""
        write_boot_files(self.root.home / "boot", "pi-1", token, self.package)

    def start(self, before: str = "") -> "subprocess.CompletedProcess[str]":
        """Run what cloud-init starts, after commands of the test."""
        command = make_command()
        return self.root.run(before + subprocess.list2cmdline(command[command.index("find") :]))

    @property
    def token(self) -> str | None:
        """What fedvit-join.service would join with."""
        file = self.root.home / "etc/fedvit/token"
        return file.read_text().strip() if file.exists() else None

    def join(self) -> None:
        """Remove the token, as fedvit-join.service does when it has joined."""
        (self.root.home / "etc/fedvit/token").unlink()

    def is_installed(self) -> bool:
        return self.root.run("dpkg --status fedvit-edge").stdout.count("install ok installed") == 1


@pytest.fixture
def board(tmp_path: Path) -> Board:
    files = {"usr/bin/edge-client": b"", "opt/fedvit/graphs": os.urandom(3 << 20)}
    return Board(Root(tmp_path / "root"), build_package(tmp_path, "fedvit-edge", files))


def check_started(board: Board, token: str) -> None:
    done = board.start()
    assert done.returncode == 0, done.stderr
    assert board.root.take_calls() == [ENABLE, START]
    assert board.token == token


def test_new_token_is_used(board: Board) -> None:
    """Also after a first one that was used, or that expired without a network."""
    check_started(board, "fedvit1-first")
    assert (board.root.home / "etc/fedvit/token").stat().st_mode & 0o777 == 0o600
    assert board.is_installed()
    board.give("fedvit1-second")
    check_started(board, "fedvit1-second")
    board.join()
    board.give("fedvit1-third")
    check_started(board, "fedvit1-third")


def test_used_token_is_not_given_again(board: Board) -> None:
    """A later start does nothing, also if the owner has removed the token from the card."""
    check_started(board, "fedvit1-first")
    board.join()
    for _ in range(2):
        assert board.start().returncode == 0
        assert (board.token, board.root.take_calls()) == (None, [])
        (board.root.home / "boot/fedvit/token").unlink(missing_ok=True)


def test_start_that_fails_is_repeated(board: Board) -> None:
    """A power cut after the token was given: the services start at the next time."""
    board.root.add_program("dpkg", "exit 1")
    assert board.start().returncode != 0
    (board.root.home / "programs/dpkg").unlink()
    check_started(board, "fedvit1-first")


def test_missing_library_without_a_network(board: Board, tmp_path: Path) -> None:
    """The package is installed once the archive can be reached."""
    files = {"usr/bin/edge-client": b""}
    board.package = build_package(tmp_path, "fedvit-edge", files, Depends="fedvit-test-library")
    library = build_package(tmp_path, "fedvit-test-library", {"opt/library": b""})
    board.give("fedvit1-first")
    done = board.start()
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "Temporary failure resolving the archive"
    assert board.root.take_calls() == []
    board.root.add_program("apt-get", f'case "$*" in *install*) dpkg --install {library} && dpkg --configure -a;; esac')
    check_started(board, "fedvit1-first")
    assert board.is_installed()


def test_card_without_room(board: Board) -> None:
    """It says why in one line, and installs the package once there is room."""
    done = board.start("mount -t tmpfs -o size=1m tmpfs /opt\n")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("not enough free space: the package needs ")
    assert "/opt" in last
    assert board.root.take_calls() == []
    check_started(board, "fedvit1-first")
    assert board.is_installed()
