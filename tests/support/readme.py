"""README's section "On real devices": its commands as they stand there, and programs that a person types."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.programs import query_record
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"}
PICTURES = 4
"""Images of each of two classes: the model of README is large for what emulates a board."""
ROUND_S = 2400.0


def read_commands() -> list[list[str]]:
    """Return the commands of the section's two blocks."""
    section = (ROOT / "README.md").read_text().split("On real devices")[1].split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [[line.split("#")[0].strip() for line in block.splitlines() if line.strip()] for block in blocks]


def fill(command: str, values: Mapping[str, str]) -> str:
    """Put values in the place of README's names."""
    for name, value in values.items():
        assert re.search(rf"\b{name}\b", command), f"{name} is not in: {command}"
        command = re.sub(rf"\b{name}\b", value, command)
    return command


def copy_pictures(source: Path, home: Path) -> None:
    """Put a few images of two classes into ~/images of a user."""
    for label in ("0", "1"):
        (home / "images" / label).mkdir(parents=True)
        for picture in sorted((source / label).iterdir())[:PICTURES]:
            (home / "images" / label / picture.name).write_bytes(picture.read_bytes())


@contextmanager
def start_command(command: str, folder: Path, home: Path | None = None) -> Iterator[Path]:
    """Type a command without an end; yield the file with its output."""
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


@contextmanager
def start_deployment(folder: Path, host: str, ports: Mapping[str, int] | None = None) -> Iterator[Path]:
    """Type the server's commands of a deployment; yield the coordinator's output, once its broker runs.

    It listens on loopback alone, and for a test beside others on other ports.
    """
    init, start = read_commands()[1][:2]
    subprocess.run(fill(init, {"SERVER": host}).split(), cwd=folder, env=ENVIRONMENT, check=True)
    settings = folder / "deployment" / "deployment.json"
    text = settings.read_text().replace("0.0.0.0", "127.0.0.1")
    for usual, port in (ports or {}).items():
        text = text.replace(usual, str(port))
    settings.write_text(text)
    with start_command(start, folder) as log:
        wait_until(lambda: "broker: " in log.read_text(), log.read_text)
        yield log


@contextmanager
def enroll_device(folder: Path, name: str) -> Iterator[str]:
    """Type the command that enrols a device; yield what it says to type on the device."""
    with start_command(read_commands()[1][2].replace("pi-1", name), folder) as log:
        token = wait_until(lambda: re.search(r"edge-client join (\S+)", log.read_text()), "there is no token")
        yield fill(read_commands()[1][3], {"TOKEN": token[1]})


def wait_for_round(folder: Path, log: Path, devices: int) -> None:
    """Wait until the first round of a run is closed with the results of so many devices."""

    def is_closed() -> bool:
        closed = query_record(folder / "runs", "select 1 from rounds where closed_at is not null")
        results = query_record(folder / "runs", "select 1 from results where kind = 'train' and round = 1")
        return bool(closed) and len(results) == devices

    wait_until(is_closed, lambda: log.read_text()[-3000:], wait_s=ROUND_S, pause_s=1)
