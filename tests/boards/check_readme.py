"""The commands of README's "On real devices", as they stand there: for the server here, for devices on a board.

tests/e2e/test_readme.py runs the same without a board.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.boards.board import HOST, Board
from tests.boards.scene import Scene
from tests.support.brokers import mosquitto
from tests.support.readme import (
    ENVIRONMENT,
    PICTURES,
    copy_pictures,
    enroll_device,
    fill,
    read_commands,
    start_command,
    start_deployment,
    wait_for_round,
)

pytestmark = pytest.mark.timeout(7200)

PASSWORD = "correct-horse"
READ_PAGE = """
import sys, urllib.request as r
address = open(sys.argv[1]).read().strip()
print(r.build_opener(r.HTTPCookieProcessor()).open(address).read().decode())
"""


@pytest.fixture(autouse=True)
def _cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="module")
def board(scene: Scene) -> Iterator[Board]:
    """The scene's board with memory for three devices, each of a user with pictures at home."""
    board, usual = scene.board, scene.board.machine
    board.switch_off()
    board.machine = replace(usual, memory_mb=3072)
    board.switch_on()
    board.run("systemctl stop fedvit-edge")
    for user in ("one", "two", "three"):
        board.run(
            f"id {user} || useradd -m {user}; cd /srv/fedvit/images/train; for label in 0 1; do "
            f"mkdir -p ~{user}/images/$label; "
            f"for file in $(ls $label | head -{PICTURES}); do cp $label/$file ~{user}/images/$label/; done; done"
        )
    yield board
    board.switch_off()
    board.machine = usual
    board.switch_on()


def run_as(board: Board, user: str, command: str) -> str:
    """Run a command of a user to its end, which may be with warnings; return its output."""
    done = board.try_run(f"runuser -l {user} -c '{command}'")
    print(f"{user}$ {command}\n{done.stdout}{done.stderr}")
    assert done.returncode < 2
    return done.stdout


def start_as(board: Board, user: str, name: str, command: str) -> None:
    """Start a command of a user that has no end."""
    board.run(f"systemd-run --quiet --collect --unit {name} runuser -l {user} -c '{command}'")


def test_broker_that_is_there(board: Board, pictures: Path, tmp_path: Path) -> None:
    start, device = read_commands()[0]
    copy_pictures(pictures / "pi-2" / "train", tmp_path / "home")
    with mosquitto(tmp_path, password=PASSWORD) as broker:
        user, port = broker.address.user or "", broker.address.port
        here = {"USER": user, "PASSWORD": PASSWORD, "HOST": f"127.0.0.1:{port}"}
        with start_command(fill(start, here), tmp_path) as log:
            with start_command(fill(device, here), tmp_path, tmp_path / "home"):
                start_as(board, "one", "readme", fill(device, {**here, "HOST": f"{HOST}:{port}"}))
                wait_for_round(tmp_path, log, 2)
            board.run("systemctl stop readme")


def test_deployment(board: Board, tmp_path: Path) -> None:
    *_, doctor, train, page = read_commands()[1]
    with start_deployment(tmp_path, HOST) as log:
        for number, user in enumerate(("one", "two", "three"), start=1):
            with enroll_device(tmp_path, f"pi-{number}") as join:
                run_as(board, user, join)
            run_as(board, user, doctor)
            start_as(board, user, f"readme-{user}", train)
        start_as(board, "one", "readme-page", page)
        said = "journalctl -u readme-page -b -o cat --no-pager | grep -o '/[^ ]*page-[0-9]*.url'"
        board.wait_for(said, "the page says no address")
        board.run(f"cat > /tmp/read.py << 'END'\n{READ_PAGE}\nEND")
        assert "pi-1" in board.run(f"python3 /tmp/read.py $({said} | tail -1)")
        wait_for_round(tmp_path, log, 3)
        board.run("systemctl stop 'readme-*'")
