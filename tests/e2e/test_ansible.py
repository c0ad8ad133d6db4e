"""The playbook of `deploy/ansible`, with the real Ansible and dpkg: a device joins once, and is upgraded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.children import run_child
from tests.support.deployments import make_deployment
from tests.support.roots import Root, build_package

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
DEPLOY = Path(__file__).parents[2] / "deploy"
SYSTEMCTL = """
echo "$*" >> {0}/systemctl.log
for word; do case $word in *.service) unit=$word ;; esac; done
case "$*" in
  *" show "*) echo LoadState=loaded; test -e {0}/active-$unit && echo ActiveState=active || echo ActiveState=inactive ;;
  *is-enabled*) test -e {0}/enabled-$unit ;;
  *" enable "*) touch {0}/enabled-$unit ;;
  *start*) touch {0}/active-$unit ;;
esac
"""
"""Answers as systemd does for units that are there."""
UNITS = {f"usr/lib/systemd/system/{file.name}": file.read_bytes() for file in (DEPLOY / "systemd").glob("*.service")}


class Board:
    """A board with Debian, and the operator's machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = Root(folder / "root")
        self.root.add_program("systemctl", SYSTEMCTL.format(self.root.home))
        self.package = build_package(folder, "fedvit-edge", {"usr/bin/edge-client": b"", **UNITS})

    def run(self, **inventory: str) -> "subprocess.CompletedProcess[str]":
        """Run the playbook with these variables of the board."""
        host = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        file = self.folder / "inventory.json"
        file.write_text(json.dumps({"devices": {"hosts": {"pi-1": {**host, **inventory}}}}))
        return self.root.run(
            f"export HOME={self.folder} USER=root LC_ALL=C.UTF-8\n"
            f"{BIN}/ansible-playbook -i {file} {DEPLOY}/ansible/devices.yaml -e package={self.package}"
        )

    def set_up(self, **inventory: str) -> set[str]:
        """Run it; return the tasks that changed something."""
        done = self.run(**inventory)
        assert done.returncode == 0, done.stdout + done.stderr
        tasks = re.split(r"^(?:TASK|RUNNING HANDLER) \[", done.stdout, flags=re.MULTILINE)[1:]
        return {task.split("]")[0] for task in tasks if "changed: [pi-1]" in task}

    def read(self, name: str) -> str:
        """Return a file below /etc/fedvit, which is for root alone."""
        file = self.root.home / "etc/fedvit" / name
        assert file.stat().st_mode & 0o777 == 0o600
        return file.read_text()


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


@pytest.mark.parametrize("names", [["pi-1"], ["pi-0", "pi-1"]], ids=["one", "two"])
def test_device_joins_once_and_is_upgraded(board: Board, names: list[str]) -> None:
    deployment = make_deployment(board.folder / "deployment")
    command = [BIN / "coordinator", "enroll", *names, "--deployment", deployment.folder, "--no-wait", "--json"]
    made = run_child(command).stdout
    (board.folder / "enrolled.json").write_text(made)
    invitations = json.loads(made) if len(names) > 1 else [json.loads(made)]
    enrolled = {"enrolled": str(board.folder / "enrolled.json")}

    assert {"It is installed", "Its token"} < board.set_up(**enrolled)
    assert board.read("token") == invitations[-1]["token"] + "\n"
    assert "FEDVIT_BROKER" not in board.read("edge.env")
    assert "--id" not in board.read("edge.env")
    started = [call.split()[-1] for call in board.root.take_calls() if " start " in f" {call} "]
    assert started == ["fedvit-join.service", "fedvit-edge.service"]

    # as fedvit-join.service does
    (board.root.home / "var/lib/private/fedvit-edge/identity").mkdir(parents=True)
    (board.root.home / "etc/fedvit/token").unlink()
    assert board.set_up(**enrolled) == set()
    assert not (board.root.home / "etc/fedvit/token").exists()

    files = {"usr/bin/edge-client": b"newer", **UNITS}
    board.package = build_package(board.folder, "fedvit-edge", files, Version="2.0")
    assert board.set_up(**enrolled) == {"The package", "It is installed", "Restart"}
    assert (board.root.home / "usr/bin/edge-client").read_text() == "newer"


def test_device_with_a_password(board: Board) -> None:
    board.set_up(fedvit_broker="mqtt://fedvit:secret@server", fedvit_labels="room=kitchen", fedvit_jetson="true")
    settings = dict(line.split("=", 1) for line in board.read("edge.env").splitlines())
    assert settings["FEDVIT_BROKER"] == "mqtt://fedvit:secret@server"
    assert settings["FEDVIT_LABELS"] == "room=kitchen"
    assert settings["FEDVIT_OPTIONS"].startswith("--id pi-1 --federation home --memory-budget ")
    assert not (board.root.home / "etc/fedvit/token").exists()
    drop_in = board.root.home / "etc/systemd/system/fedvit-edge.service.d/jetson.conf"
    assert "PrivateDevices=no" in drop_in.read_text()


def test_host_that_is_not_enrolled_is_named(board: Board) -> None:
    file = board.folder / "enrolled.json"
    file.write_text('{"device": "pi-2", "token": "secret"}')
    done = board.run(enrolled=str(file))
    assert done.returncode != 0
    assert f"{file} has no token of pi-1: coordinator enroll pi-1" in done.stdout
    assert "secret" not in done.stdout + done.stderr
    assert not (board.root.home / "etc/fedvit/token").exists()
