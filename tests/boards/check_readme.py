"""The commands of README's "On real devices", as they stand there: for the server here, for devices on a board."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.boards.board import HOST, ROOT, Board
from tests.boards.scene import Scene
from tests.boards.site import BIN
from tests.support.brokers import mosquitto
from tests.support.programs import query_record
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(7200)

PASSWORD = "correct-horse"
PICTURES = 4
"""Images of each of two classes: the model of README is large for an emulated board."""
ROUND_S = 2400.0
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin"}


def read_commands() -> list[list[str]]:
    """Return the commands of the section's two blocks."""
    section = (ROOT / "README.md").read_text().split("On real devices")[1].split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [[line.split("#")[0].strip() for line in block.splitlines() if line.strip()] for block in blocks]


@pytest.fixture(scope="module")
def board(scene: Scene) -> Iterator[Board]:
    """The scene's board with memory for three devices, each of a user with pictures at home."""
    board, usual = scene.board, scene.board.machine
    board.switch_off()
    board.machine = replace(usual, memory_mb=3072)
    board.switch_on()
    board.run("systemctl stop fedvit-edge")
    for user in ("one", "two", "three"):
        board.run(f"useradd -m {user} && mkdir ~{user}/images ~{user}/images/0 ~{user}/images/1")
        for label in ("0", "1"):
            board.run(f"cd /srv/fedvit/images/train/{label} && cp $(ls | head -{PICTURES}) ~{user}/images/{label}/")
    yield board
    board.switch_off()
    board.machine = usual
    board.switch_on()


def run_as(board: Board, user: str, command: str) -> str:
    """Run a command of a user to its end; return its output."""
    done = board.try_run(f"runuser -l {user} -c '{command}'")
    print(f"{user}$ {command}\n{done.stdout}{done.stderr}")
    assert done.returncode < 2
    return done.stdout


def start_as(board: Board, user: str, name: str, command: str) -> None:
    """Start a command of a user that has no end."""
    board.run(f"systemd-run --quiet --collect --unit {name} runuser -l {user} -c '{command}'")


@contextmanager
def start_command(command: str, folder: Path, home: Path | None = None) -> Iterator[Path]:
    """Type a command without an end here; yield the file with its output."""
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    with log.open("wb") as file:
        program = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=ENVIRONMENT | ({"HOME": str(home)} if home else {}),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        yield log
    finally:
        program.terminate()
        program.wait(120)
        print(f"$ {command}\n{log.read_text()[-1500:]}")


def wait_for_round(folder: Path, log: Path, devices: int) -> None:
    """Wait until the first round of a run is closed with the results of so many devices."""

    def is_closed() -> bool:
        closed = query_record(folder / "runs", "select 1 from rounds where closed_at is not null")
        results = query_record(folder / "runs", "select 1 from results where kind = 'train' and round = 1")
        return bool(closed) and len(results) == devices

    wait_until(is_closed, lambda: log.read_text()[-3000:], wait_s=ROUND_S, pause_s=1)


def test_broker_that_is_there(board: Board, pictures: Path, tmp_path: Path) -> None:
    start, device = read_commands()[0]
    with mosquitto(tmp_path, password=PASSWORD) as broker:
        names = {"USER": broker.address.user, "PASSWORD": PASSWORD, "HOST": f"127.0.0.1:{broker.address.port}"}
        here, there = fill(start, names), fill(device, {**names, "HOST": f"{HOST}:{broker.address.port}"})
        home = tmp_path / "home"
        for label in ("0", "1"):
            (home / "images" / label).mkdir(parents=True)
            for picture in sorted((pictures / "pi-2" / "train" / label).iterdir())[:PICTURES]:
                (home / "images" / label / picture.name).write_bytes(picture.read_bytes())
        with start_command(here, tmp_path) as log, start_command(fill(device, names), tmp_path, home):
            start_as(board, "one", "readme", there)
            wait_for_round(tmp_path, log, 2)
        board.run("systemctl stop readme")


def test_deployment(board: Board, tmp_path: Path) -> None:
    init, start, enroll, join, doctor, train, page = read_commands()[1]
    subprocess.run(fill(init, {"SERVER": HOST}).split(), cwd=tmp_path, env=ENVIRONMENT, check=True)
    settings = tmp_path / "deployment" / "deployment.json"
    settings.write_text(settings.read_text().replace("0.0.0.0", "127.0.0.1"))  # boards come from there
    with start_command(start, tmp_path) as log:
        for number, user in enumerate(("one", "two", "three"), start=1):
            with start_command(enroll.replace("pi-1", f"pi-{number}"), tmp_path) as said:
                wait_until(lambda: "join" in said.read_text(), "there is no token")
                token = re.search(r"edge-client join (\S+)", said.read_text())
                assert token
                run_as(board, user, fill(join, {"TOKEN": token[1]}))
            run_as(board, user, doctor)
            start_as(board, user, f"readme-{user}", train)
        start_as(board, "one", "readme-page", page)
        board.wait_for("journalctl -u readme-page -o cat --no-pager | grep http://", "the page says no address")
        url = board.run("journalctl -u readme-page -o cat --no-pager | grep -o 'http://[^ ]*' | head -1").strip()
        read = f"import urllib.request as r; print(r.urlopen('{url}').read().decode())"
        assert "<html" in board.run(f'python3 -c "{read}"')
        wait_for_round(tmp_path, log, 3)
    board.run("systemctl stop 'readme-*'")


def fill(command: str, values: dict[str, str]) -> str:
    """Put values in the place of README's names."""
    for name, value in values.items():
        assert name in command or name == "HOST"
        command = re.sub(rf"\b{name}\b", value, command)
    return command
