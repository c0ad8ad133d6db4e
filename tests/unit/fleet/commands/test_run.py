"""`fleet run`: flags that do not go together. tests/e2e/test_run.py runs it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fedvit.errors import ConfigError
from fleet.commands.run import run_command
from tests.support.codes import has_code


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ("--engine torch", "FV2102", "--engine torch"),
        ("--hosts 2", "FV2102", "--hosts"),
        ("--precision bf16", "FV2102", "--precision bf16"),
        ("--check-export", "FV2102", "--check-export"),
        ("--virtual 4 --devices 4", "FV2102", "--devices 4"),
        ("--virtual 4 --precision bf16", "FV2102", "--precision bf16"),
        ("--virtual 4 --check-export", "FV2102", "--check-export"),
        ("--virtual 4 --engine torch --ray local", "FV2123", "--ray"),
        ("--virtual 4 --engine torch --hosts 2", "FV2123", "--hosts"),
    ],
)
def test_flags_without_an_effect_are_refused(words: str, code: str, named: str, tmp_path: Path) -> None:
    """They would change neither the devices nor the products, and the run would look as if they had."""
    with pytest.raises(ConfigError, check=has_code(code, named)):
        CliRunner().invoke(run_command, [*words.split(), "--parts", str(tmp_path)], catch_exceptions=False)
