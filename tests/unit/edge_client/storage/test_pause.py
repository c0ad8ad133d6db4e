import time
from pathlib import Path

from edge_client.storage.pause import OwnerPause


def test_pause_begins_once_and_ends(tmp_path: Path) -> None:
    """Also of a device that has no state yet; another process sees it."""
    state = tmp_path / "new" / "state"
    pause = OwnerPause(state)
    pause.end()
    assert (pause.is_on(), pause.began_s()) == (False, None)
    pause.begin()
    began_s = pause.began_s()
    assert began_s is not None
    assert abs(began_s - time.time()) < 3600
    pause.begin()
    assert OwnerPause(state).began_s() == began_s
    assert pause.file.stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    pause.end()
    pause.end()
    assert not OwnerPause(state).is_on()
