"""Command lines of our programs, as pages show them, and whether the programs understand them."""

import os
import re
import shlex
from pathlib import Path
from unittest import mock

import click

import coordinator.cli
import edge_client.cli
import fleet.cli

PROGRAMS: dict[str, click.Group] = {
    "coordinator": coordinator.cli.cli,
    "edge-client": edge_client.cli.cli,
    "fleet": fleet.cli.cli,
}


def shown_in(page: Path) -> list[list[str]]:
    """Lines of the shell blocks of a page that run one of our programs, as words."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for words in lines:
        while words and re.fullmatch(r"[A-Z_]+=.*|sudo|\$", words[0]):
            words = words[1:]
        if ">" in words:  # into a file
            words = words[: words.index(">")]
        if words and Path(words[0]).name in PROGRAMS:
            found.append([word for word in words if word != "&"])
    return found


def parse(words: list[str]) -> None:
    """As the program would, without running anything. Raises click's errors."""
    with mock.patch.dict(os.environ):  # --log-format sets a variable for child processes
        _parse(words)


def _parse(words: list[str]) -> None:
    command: click.Command = PROGRAMS[Path(words[0]).name]
    context, words = None, words[1:]
    while True:
        context = command.make_context(command.name, list(words), parent=context)
        if not isinstance(command, click.Group) or not (rest := [*context._protected_args, *context.args]):
            return
        _, inner, words = command.resolve_command(context, rest)
        assert inner is not None
        command = inner
