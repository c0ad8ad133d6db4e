"""Commands that messages name: the programs understand each of them. `tests/e2e/test_hints.py` runs those of a first
deployment."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_lines import PROGRAMS, parse

SOURCES = [path for package in ("coordinator", "edge_client", "export", "fedvit", "fleet", "profiles")
           for path in sorted(Path(package).rglob("*.py"))]  # fmt: skip
MENTION = re.compile(r"`(coordinator|edge-client|fleet) |\bcommand\(")
"""Stands in every file with a command; the others need no parser, which takes seconds for all of them."""
VALUE = "value"
"""Stands for what is only known when the program runs."""


def shown() -> Iterator[tuple[str, list[str]]]:
    """Each command in backticks in a string, and each call of `fedvit.hints.command`, with its place."""
    for path in SOURCES:
        content = path.read_text()
        if not MENTION.search(content):
            continue
        nodes = list(ast.walk(ast.parse(content)))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command" and node.args:
                words = [text(word) for word in node.args if not isinstance(word, ast.Starred)]
                if words[:1] and words[0] in PROGRAMS:
                    words += [word for option in node.keywords for word in (f"--{option.arg}", VALUE)]
                    yield f"{path}:{node.lineno}", words
            elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in documentation:
                for line in re.findall(r"`((?:coordinator|edge-client|fleet) [a-z-][^`]*)`", text(node)):
                    if line.split()[1] != VALUE:
                        yield f"{path}:{node.lineno}", line.split()


def text(node: ast.expr) -> str:
    """A string as its program prints it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    return VALUE


SHOWN = list(shown())


@pytest.mark.parametrize(("place", "words"), [pytest.param(*each, id=each[0]) for each in SHOWN])
def test_every_command_that_a_message_names_is_understood(place: str, words: list[str]) -> None:
    parse(words)


def test_every_extra_that_a_message_or_a_page_names_exists() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    pages = [*SOURCES, *Path("docs").glob("*.md"), Path("README.md"), Path("fedvit/explanations.toml")]
    named = {(name, path) for path in pages for names in re.findall(r"fedvit\[([a-z0-9,]+)\]", path.read_text())
             for name in names.split(",")}  # fmt: skip
    assert [(name, path) for name, path in named if name not in extras] == []
    assert ("server", Path("README.md")) in named


def test_commands_are_found() -> None:
    places = [place for place, _ in SHOWN]
    assert any(place.startswith("coordinator/serving/run.py") for place in places)
    assert len(places) > 40
