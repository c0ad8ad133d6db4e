"""Flags of `coordinator export` and `edge-client export`."""

from pathlib import Path

import pytest
from click import Command
from click.testing import CliRunner

import edge_client.commands.export
from coordinator.commands.export import export as of_coordinator


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (of_coordinator, ["--precision", "int8"]),
        (of_coordinator, ["--data", "images"]),
        (of_coordinator, ["--json"]),
        (edge_client.commands.export.command, ["--precision", "int8"]),
        (edge_client.commands.export.command, ["--json"]),
    ],
)
def test_flags_of_a_bundle_are_refused_for_another_format(command: Command, flags: list[str], tmp_path: Path) -> None:
    words = ["RUN", "--format", "timm", "--out", str(tmp_path / "out"), *flags]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2, done.output
    assert f"{flags[0]} is for --format onnx" in done.output
