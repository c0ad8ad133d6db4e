"""The state that an update finds when it begins; whole updates: tests/e2e/test_updates.py."""

from pathlib import Path

import pytest

from edge_client.owner.update import Updater
from edge_client.storage.installed import CURRENT, Installation
from fedvit.errors import ConfigError
from tests.support.codes import has_code


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """An installation whose newest version is not the one that was started."""
    for name in ("0.2.0", "0.3.0"):
        python = tmp_path / "root" / "versions" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch(mode=0o755)
    installation = Installation(tmp_path / "root", "versions/0.2.0", tmp_path / "trial")
    installation.set_link(CURRENT, "versions/0.3.0")
    return installation


def test_version_that_another_update_has_just_installed_is_not_refused(installation: Installation) -> None:
    updater = Updater(installation)
    with pytest.raises(ConfigError, check=has_code("FV1461", "0.3.0")), updater.hold():
        pass
    assert updater.settings.refused == {}
    assert installation.read_link(CURRENT) == "versions/0.3.0"


def test_version_that_failed_its_trial_is_refused(installation: Installation) -> None:
    installation.marks.write_text("0.3.0 start\n" * 3)
    updater = Updater(installation)
    with updater.hold():
        pass
    assert list(updater.settings.refused) == ["0.3.0"]
    assert installation.read_link(CURRENT) == "versions/0.2.0"
