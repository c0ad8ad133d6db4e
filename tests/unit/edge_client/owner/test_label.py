"""`edge-client label` in a real terminal, and what it moves."""

import codecs
import os
import pty
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_client.owner.label import draw_image
from tests.support.programs import program
from tests.support.waiting import WAIT_S, wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Classes cat and dog, and three images without a label: a black, a gray and a white one."""
    folder = tmp_path / "images"
    for name in ("cat", "dog", "unlabelled"):
        (folder / name).mkdir(parents=True)
    for number, value in enumerate((0, 128, 255)):
        Image.new("RGB", (8, 8), (value,) * 3).save(folder / "unlabelled" / f"{number}.png")
    Image.new("RGB", (8, 8)).save(folder / "cat" / "0.png")
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._end, other = pty.openpty()
        os.set_blocking(self._end, False)
        self._process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.shown = ""
        self._seen = 0

    def _read(self) -> None:
        try:
            self.shown += self._decoder.decode(os.read(self._end, 65536))
        except (BlockingIOError, OSError):  # nothing new, or the program has ended
            return

    def wait(self, text: str) -> None:
        """Wait until the program shows the text, behind what was waited for before."""

        def is_shown() -> bool:
            self._read()
            return text in self.shown[self._seen :]

        wait_until(is_shown, lambda: f"{text!r} was not shown: {self.shown[-500:]!r}", pause_s=0.02)
        self._seen = self.shown.index(text, self._seen) + len(text)

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def finish(self) -> int:
        code: int = wait_until(lambda: (self._read(), self._process.poll() is not None)[1]) and self._process.wait()
        self._read()
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_S)
        os.close(self._end)


@contextmanager
def labelling(folder: Path, tmp_path: Path) -> Iterator[Terminal]:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "COLORTERM": ""}
    with closing(Terminal([*program("edge_client.cli"), "label", "--data", str(folder)], environment)) as terminal:
        yield terminal


def test_one_key_for_each_class_with_undo_and_skip(folder: Path, tmp_path: Path) -> None:
    """Black is a dog at first, then a cat, whose folder has an image of this name already; gray is skipped; white is a
    dog. An arrow key, which a terminal sends as several characters, is none of them."""
    with labelling(folder, tmp_path) as terminal:
        terminal.wait("1 of 3: 0.png; no guess")
        terminal.wait("[1] cat  [2] dog")
        terminal.type("2")
        terminal.wait("2 of 3: 1.png")
        assert files(folder) == ["cat/0.png", "dog/0.png", "unlabelled/1.png", "unlabelled/2.png"]
        terminal.type("u")
        terminal.wait("1 of 3: 0.png")
        assert files(folder)[1:] == ["unlabelled/0.png", "unlabelled/1.png", "unlabelled/2.png"]
        terminal.type("\x1b[1")
        terminal.wait("1 of 3: 0.png")
        terminal.type("1")
        terminal.wait("2 of 3")
        terminal.type(" ")
        terminal.wait("3 of 3")
        terminal.type("2")
        terminal.wait("labelled 2 images, 1 left")
        assert terminal.finish() == 0
    assert files(folder) == ["cat/0-2.png", "cat/0.png", "dog/2.png", "unlabelled/1.png"]


def test_quit_leaves_the_rest(folder: Path, tmp_path: Path) -> None:
    before = files(folder)
    with labelling(folder, tmp_path) as terminal:
        terminal.wait("1 of 3")
        terminal.type("q")
        terminal.wait("labelled 0 images, 3 left")
        assert terminal.finish() == 0
    assert files(folder) == before


def test_without_a_terminal(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*program("edge_client.cli"), "label", "--data", str(folder)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "label needs a terminal" in done.stderr


@pytest.mark.parametrize(("colours", "white"), [("truecolor", "2;255;255;255"), ("", "5;231")])
def test_two_pixels_in_one_character(colours: str, white: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """White above black; an odd last line has black below it. 231 = 16 + 36 * 5 + 6 * 5 + 5."""
    monkeypatch.setenv("COLORTERM", colours)
    pixels = np.zeros((3, 1, 3), np.uint8)
    pixels[0] = 255
    first, second = draw_image(pixels).splitlines()
    assert first.startswith(f"\x1b[38;{white};48;")
    assert white not in second
    assert re.sub(r"\x1b\[[0-9;]*m", "", first) == "\u2580"
