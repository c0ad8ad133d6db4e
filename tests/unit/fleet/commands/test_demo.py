"""`fleet demo` from the command line; tests/e2e/test_run.py and test_loop.py run it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fedvit.errors import ConfigError
from fleet.commands.demo import demo_command
from tests.support.codes import has_code


@pytest.mark.parametrize(("command", "folder"), [([], "parts"), (["loop"], "loop")])
def test_folder_of_somebody_else_stays(tmp_path: Path, command: list[str], folder: str) -> None:
    """Also `fleet partition` writes to parts, by default."""
    file = tmp_path / folder / "device-0" / "train" / "cat" / "mine.png"
    file.parent.mkdir(parents=True)
    file.write_text("x")
    with pytest.raises(ConfigError, check=has_code("FV2007", str(tmp_path / folder))):
        CliRunner().invoke(demo_command, [*command, "--out", str(tmp_path)], catch_exceptions=False)
    assert file.read_text() == "x"
