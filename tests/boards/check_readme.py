"""The commands of README's "On real devices", as they stand there: for the server here, for a device on a board.

The other devices run here: emulated, one core takes two minutes for a step of README's model, which misses the deadline
of a round. tests/e2e/test_readme.py runs the same without a board.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.boards.board import HOST, Board
from tests.boards.scene import NAMES, Scene
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

USER, PASSWORD, SERVER = "one", "correct-horse", "server"
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
    """The scene's board with two cores, more memory, and a user with pictures at home."""
    board, usual = scene.board, scene.board.machine
    board.switch_off()
    board.machine = replace(usual, memory_mb=2048, cores=2)
    board.switch_on()
    board.run("systemctl stop fedvit-edge")
    board.run(
        f"id {USER} || useradd -m {USER}; cd /srv/fedvit/images/train; for label in 0 1; do "
        f"mkdir -p ~{USER}/images/$label; "
        f"for file in $(ls $label | head -{PICTURES}); do cp $label/$file ~{USER}/images/$label/; done; done"
    )
    yield board
    board.switch_off()
    board.machine = usual
    board.switch_on()


def run_as_user(board: Board, command: str) -> str:
    """Run a command of the board's user to its end, which may be with warnings; return its output."""
    done = board.try_run(f"runuser -l {USER} -c '{command}'")
    print(f"{USER}$ {command}\n{done.stdout}{done.stderr}")
    assert done.returncode < 2
    return done.stdout


def start_as_user(board: Board, name: str, command: str) -> None:
    """Start a command of the board's user that has no end."""
    board.run(f"systemd-run --quiet --collect --unit {name} runuser -l {USER} -c '{command}'")


def name_server(command: str, hosts: Path) -> str:
    """Return a command for here that knows the server's name, as the board knows it by another address."""
    hosts.write_text(f"127.0.0.1 localhost {SERVER}\n")
    return f"unshare --mount sh -c 'mount --bind {hosts} /etc/hosts && exec {command}'"


def make_home(pictures: Path, folder: Path) -> Path:
    """Make the home of a user here; return it."""
    copy_pictures(pictures / folder.name / "train", folder)
    return folder


def test_broker_that_is_there(board: Board, pictures: Path, tmp_path: Path) -> None:
    start, device = read_commands()[0]
    home = make_home(pictures, tmp_path / "pi-2")
    with mosquitto(tmp_path, password=PASSWORD) as broker:
        user, port = broker.address.user or "", broker.address.port
        here = {"USER": user, "PASSWORD": PASSWORD, "HOST": f"127.0.0.1:{port}"}
        with start_command(fill(start, here), tmp_path) as log:
            with start_command(fill(device, here), tmp_path, home):
                start_as_user(board, "readme", fill(device, {**here, "HOST": f"{HOST}:{port}"}))
                wait_for_round(tmp_path, log, 2)
            board.run("systemctl stop readme")


def test_deployment(board: Board, pictures: Path, tmp_path: Path) -> None:
    *_, doctor, train, page = read_commands()[1]
    board.run(f"echo {HOST} {SERVER} >> /etc/hosts")
    with start_deployment(tmp_path, SERVER) as log, ExitStack() as devices:
        for name in NAMES[1:]:
            home, hosts = make_home(pictures, tmp_path / name), tmp_path / "hosts"
            with enroll_device(tmp_path, name) as join:
                command = ["bash", "-c", name_server(join, hosts)]
                subprocess.run(command, env=ENVIRONMENT | {"HOME": str(home)}, check=True)
            devices.enter_context(start_command(name_server(train, hosts), tmp_path, home))
        with enroll_device(tmp_path, NAMES[0]) as join:
            run_as_user(board, join)
        run_as_user(board, doctor)
        start_as_user(board, "readme-device", train)
        start_as_user(board, "readme-page", page)
        said = "journalctl -u readme-page -b -o cat --no-pager | grep -o '/[^ ]*page-[0-9]*.url'"
        board.wait_for(said, "the page says no address")
        board.run(f"cat > /tmp/read.py << 'END'\n{READ_PAGE}\nEND")
        assert NAMES[0] in board.run(f"python3 /tmp/read.py $({said} | tail -1)")
        wait_for_round(tmp_path, log, 3)
        board.run("systemctl stop 'readme-*'")
