"""A process that gave up its rights, on the kernel that runs the tests."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

TRY_EVERYTHING = """
import json, os, socket, sys, threading
from pathlib import Path
from edge_client.sandbox.confine import confine
from edge_client.sandbox.worker import list_libraries

folder, secret = map(Path, sys.argv[1:])
missing = confine([folder, *list_libraries()], (), 200_000_000)

def can(act):
    try:
        act()
    except (OSError, MemoryError):
        return False
    return True

print(json.dumps({
    "missing": missing,
    "read": can(lambda: (folder / "image").read_bytes()),
    "list": can(lambda: os.listdir(folder)),
    "small block": can(lambda: bytearray(100_000_000)),
    "thread": can(lambda: threading.Thread(target=int).start()),
    "large block": can(lambda: bytearray(300_000_000)),
    "secret": can(lambda: secret.read_bytes()),
    "secret by its folder": can(lambda: os.listdir(secret.parent)),
    "parent's memory": can(lambda: open(f"/proc/{os.getppid()}/mem", "rb")),
    "parent's environment": can(lambda: open(f"/proc/{os.getppid()}/environ", "rb").read()),
    "write": can(lambda: (folder / "new").write_bytes(b"")),
    "remove": can(lambda: (folder / "image").unlink()),
    "tcp": can(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)),
    "udp": can(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
    "unix socket": can(lambda: socket.socket(socket.AF_UNIX)),
    "program": can(lambda: os.execv(sys.executable, [sys.executable, "-c", ""])),
    "signal": can(lambda: os.kill(os.getppid(), 0)),
}))
"""

ALLOWED = {"read", "list", "small block", "thread"}


@pytest.fixture(scope="module")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bool]:
    """Acts by name, each with True if a confined process can do it."""
    folder, secrets = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("secrets")
    (folder / "image").write_bytes(b"pixels")
    (secrets / "key").write_bytes(b"key")
    command = [sys.executable, "-P", "-c", TRY_EVERYTHING, str(folder), str(secrets / "key")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, bool] = json.loads(done.stdout)
    assert found.pop("missing") == [], f"{platform.release()} offers Landlock and seccomp"
    return found


def test_it_can_compute_and_read_what_it_needs(rights: Mapping[str, bool]) -> None:
    assert {name for name, allowed in rights.items() if allowed} == ALLOWED


@pytest.mark.parametrize(
    "act",
    [
        "large block",
        "secret",
        "secret by its folder",
        "parent's memory",
        "parent's environment",
        "write",
        "remove",
        "tcp",
        "udp",
        "unix socket",
        "program",
        "signal",
    ],
)
def test_it_cannot(rights: Mapping[str, bool], act: str) -> None:
    assert not rights[act]


SERVE = """
import json, os, socket, sys, threading
from edge_client.sandbox.confine import confine_server

confined = confine_server()
acts = {
    "connect": lambda: socket.create_connection(listener.getsockname()[:2]),
    "program": lambda: os.execv(sys.executable, [sys.executable, "-c", ""]),
    "signal": lambda: os.kill(os.getppid(), 0),
}
done = {"confined": confined}
with socket.create_server(("127.0.0.1", 0)) as listener:
    for name, act in acts.items():
        try:
            act()
            done[name] = True
        except OSError:
            done[name] = False
print(json.dumps(done))
"""


def test_process_that_answers_requests_starts_no_programs() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", SERVE], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {"confined": True, "connect": True, "program": False, "signal": False}
