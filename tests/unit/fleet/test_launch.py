"""`fleet run` before it starts anything."""

from pathlib import Path

import pytest

from fedvit.errors import ConfigError
from fleet.launch import run_fleet
from fleet.request import RunRequest
from tests.support.codes import has_code


@pytest.mark.parametrize("name", ["../elsewhere", "-rf", "."])
def test_a_run_whose_name_no_folder_should_have_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, check=has_code("FV1006")):
        run_fleet(RunRequest([tmp_path / "device-0"], {}, out=tmp_path / "runs", run=name))
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
