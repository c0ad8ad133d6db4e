"""docs/write-a-method.md, followed literally in a copy of the source: a new method trains on three processes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from coordinator.security.broker.process import claim_port
from tests.support.programs import WAIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "write-a-method.md"
PACKAGES = ("fedvit", "export", "profiles", "edge_client", "coordinator", "fleet")
PORT = "1884"
"""As the page has it; another program may have it here."""
SIDE_BY_SIDE = "each in its own terminal"


class Block(NamedTuple):
    """A block of code, and the paragraph before it."""

    before: str
    language: str
    text: str


def blocks() -> list[Block]:
    found = re.findall(r"([^\n]*(?:\n[^\n]+)*)\n\n```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [Block(before, language, text) for before, language, text in found]


def add_lines(text: str, change: str) -> str:
    """`text` with the lines that a block in the form of a diff adds between its other lines."""
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if not line.startswith("+"))
    assert text.count(before) == 1, before
    return text.replace(before, "".join(line[1:] for line in lines))


class Clone:
    """A copy of the source in which commands are run as in a checkout."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        state, self._installed = str(folder / "state"), str(folder / "installed")
        paths = f"{folder}:{self._installed}"
        self._environment = {**os.environ, "PATH": programs, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache)}
        self._environment |= {"XDG_STATE_HOME": state, "COLUMNS": "100"}

    def run(self, *commands: str) -> list[str]:
        """What commands print that run side by side, when all have ended well."""
        started = [self._start(command) for command in commands]
        try:
            printed = [process.communicate(timeout=WAIT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [process.returncode for process in started] == [0] * len(commands), "\n".join(printed)
        return printed

    def _start(self, command: str) -> "subprocess.Popen[str]":
        words = shlex.split(command)
        if words[0] == "pip":  # beside the copy, and without the network
            words = [sys.executable, "-m", *words, "--target", self._installed, "--no-deps", "--no-build-isolation"]
        return subprocess.Popen(
            words, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def test_page_leads_from_an_empty_file_to_a_table(tmp_path: Path, cache: Path) -> None:
    clone = Clone(tmp_path, cache)
    port, printed, runs = str(claim_port()), "", ""
    for before, language, shown in blocks():
        text = shown.replace(PORT, port)
        if language in ("python", "toml", "ini"):
            [name] = re.findall(r"`([\w/.]+)`:$", before)
            assert not (tmp_path / name).exists(), name
            (tmp_path / name).write_text(text)
        elif language == "diff":
            file = tmp_path / "fedvit/methods/__init__.py"
            file.write_text(add_lines(file.read_text(), text))
        elif language == "sh":
            lines = text.splitlines()
            for group in [lines] if SIDE_BY_SIDE in before else [[line] for line in lines]:
                printed = "".join(clone.run(*group))
                runs += printed
        else:
            assert language == "text"
            # what the page shows of the output: the same lines, whatever numbers this machine computes
            for line in shown.splitlines():
                assert words(line) <= words(printed), line
    assert "run norms: layer_norms on vit_small_images, finished, 5 of 5 rounds" in runs
    assert "norms_alone on vit_small_images, 10 classes" in printed


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{2,}", text))
