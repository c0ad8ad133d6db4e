"""Which runs and devices are regions."""

from pathlib import Path

import pytest

from coordinator.config import CENTRE, REGION, check_kind, is_region
from fedvit.errors import ConfigError
from tests.support.codes import has_code


def test_region_is_known_by_its_label() -> None:
    assert is_region({**REGION, "site": "berlin"})
    assert not is_region({"site": "berlin", "role": "camera"})


def test_run_is_resumed_as_what_it_began(tmp_path: Path) -> None:
    home = tmp_path / "north"
    check_kind(home, is_region=False)
    with pytest.raises(ConfigError, check=has_code("FV2205")):
        check_kind(home, is_region=True)
    (home / CENTRE).mkdir(parents=True)
    check_kind(home, is_region=True)
    with pytest.raises(ConfigError, check=has_code("FV2205")):
        check_kind(home, is_region=False)
