"""`edge-client join` without a token, and `coordinator adopt`: two people, two terminals, a network without others."""

import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.security.broker.process import claim_port
from tests.support.loopback import loopback_network
from tests.support.programs import Stage, program, wait_for
from tests.support.waiting import WAIT_S

CODE = re.compile(r"^    (\d{3} \d{3})$", re.MULTILINE)


class Terminal:
    """A program with a person in front of it, who sees its output and types."""

    def __init__(self, command: list[str], stage: Stage) -> None:
        self.text = ""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=stage.environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while piece := self._process.stdout.read1(4096):  # type: ignore[attr-defined]
            self.text += piece.decode()

    def wait_for(self, words: str, count: int = 1) -> None:
        wait_for(lambda: self.text.count(words) >= count or self._process.poll() is not None, words)
        assert self.text.count(words) >= count, self.text

    def type(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def finish(self) -> int:
        code = self._process.wait(WAIT_S)
        self._reader.join()
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Scene:
    """A deployment in a network of its own, and terminals."""

    def __init__(self, stage: Stage, enter: list[str]) -> None:
        self.stage, self.enter = stage, enter
        self.deployment = str(stage.folder / "deployment")
        self._terminals: list[Terminal] = []
        ports = [str(claim_port()) for _ in range(2)]
        init = self.open(
            "coordinator.cli", "init", self.deployment, "--listen", "127.0.0.1", "--host", "localhost",
            "--port", ports[0], "--enrolment-port", ports[1],
        )  # fmt: skip
        assert init.finish() == 0, init.text

    def open(self, module: str, *arguments: str) -> Terminal:
        self._terminals.append(Terminal([*self.enter, *program(module), *arguments], self.stage))
        return self._terminals[-1]

    def adopt(self, *arguments: str) -> Terminal:
        """An operator who waits for devices."""
        adopting = self.open(
            "coordinator.cli", "adopt", "--deployment", self.deployment, "--listen", "127.0.0.1", *arguments
        )
        adopting.wait_for("devices may ask")
        return adopting

    def join(self, name: str, *arguments: str) -> Terminal:
        return self.open(
            "edge_client.cli", "join", "--id", name, "--state", self.state(name), "--patience", f"{WAIT_S}s", *arguments
        )

    def state(self, name: str) -> str:
        return str(self.stage.folder / "state" / name)

    def close(self) -> None:
        for terminal in self._terminals:
            terminal.close()


@pytest.fixture
def scene(stage: Stage) -> Iterator[Scene]:
    with loopback_network() as enter:
        scene = Scene(stage, enter)
        yield scene
        scene.close()


def read_code(joining: Terminal) -> str:
    joining.wait_for("type this code")
    wait_for(lambda: CODE.search(joining.text), "a code")
    found = CODE.search(joining.text)
    assert found is not None
    return found[1]


def test_device_is_adopted_by_its_code(scene: Scene) -> None:
    """It finds the coordinator by itself. A wrong code does not admit it, the right one does."""
    adopting = scene.adopt()
    joining = scene.join("pi-3")
    code = read_code(joining)
    adopting.wait_for("code on the screen of pi-3")
    adopting.type(f"{(int(code.replace(' ', '')) + 1) % 10**6:06d}")
    adopting.wait_for("not the code of the device that asks")
    adopting.type(code)
    adopting.wait_for("the code is right")
    joining.wait_for("is right?")
    joining.type("y")
    assert joining.finish() == 0, joining.text + adopting.text
    assert adopting.finish() == 0, adopting.text
    assert "joined as 'pi-3'" in joining.text
    assert Path(scene.state("pi-3"), "identity", "membership.json").is_file()
    assert Path(scene.state("pi-3"), "publisher").read_text().startswith("ed25519:")


def test_owner_who_says_no_does_not_join(scene: Scene) -> None:
    adopting = scene.adopt()
    joining = scene.join("pi-3", "--from", "127.0.0.1")
    adopting.wait_for("code on the screen")
    adopting.type(read_code(joining))
    joining.wait_for("is right?")
    joining.type("")
    assert joining.finish() == 5
    assert "[FV1341]" in joining.text
    assert not Path(scene.state("pi-3"), "identity").exists()


@pytest.mark.slow
def test_nobody_adopts(scene: Scene) -> None:
    """Neither in the network nor at the named address; then an operator whose time is over."""
    joining = scene.join("pi-3")
    assert joining.finish() == 4
    assert "coordinator adopt" in joining.text
    assert "[FV1342]" in joining.text
    joining = scene.join("pi-3", "--from", "127.0.0.1:9")
    assert joining.finish() == 4
    assert "[FV1342]" in joining.text
    adopting = scene.adopt("--window", "1s")
    assert adopting.finish() == 2
    assert "0 of 1 devices were adopted" in adopting.text


@pytest.mark.slow
def test_owner_chooses_among_coordinators(scene: Scene, tmp_path: Path) -> None:
    """Two devices are adopted in one window, after one of two coordinators was chosen."""
    adopting = scene.adopt("--count", "2")
    other = scene.adopt("--listen", "127.0.0.1:8999")
    for name in ("pi-1", "pi-2"):
        joining = scene.join(name)
        joining.wait_for("which one")
        listed = [line for line in joining.text.splitlines() if re.match(r"\d  ", line)]
        assert len(listed) == 2
        [chosen] = [line.split()[0] for line in listed if line.endswith(":8886")]
        joining.type(chosen)
        code = read_code(joining)
        adopting.wait_for(f"code on the screen of {name}")
        adopting.type(code)
        joining.wait_for("is right?")
        joining.type("y")
        assert joining.finish() == 0, joining.text
    assert adopting.finish() == 0, adopting.text
    other.close()
