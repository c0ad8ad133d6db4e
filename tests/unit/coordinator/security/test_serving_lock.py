"""One process serves a deployment."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from coordinator.security.serving_lock import LOCK, exclusively_served, is_wanted
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.waiting import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def test_a_process_that_has_just_got_the_lock_is_waited_for(folder: Path) -> None:
    """Who it is, and whether it would hand the lock over, is written an instant later."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)

    def name_itself() -> None:
        wait_until(lambda: is_wanted(folder), "nobody waits for the lock")
        os.pwrite(handle, b"4711", 0)

    owner = threading.Thread(target=name_itself)
    owner.start()
    with pytest.raises(ConfigError, match="by process 4711"), exclusively_served(folder):
        pass
    owner.join()
    os.close(handle)


@pytest.mark.parametrize("for_now", [False, True])
def test_one_process_serves_and_is_named(folder: Path, for_now: bool) -> None:
    with exclusively_served(folder):
        with pytest.raises(ConfigError, check=has_code("FV1314")), exclusively_served(folder, for_now=for_now):
            pass
        assert not is_wanted(folder)
    with exclusively_served(folder):
        pass


def test_the_lock_for_now_is_handed_over(folder: Path) -> None:
    has_it, ends = threading.Event(), threading.Event()

    def serve() -> None:
        with exclusively_served(folder):
            has_it.set()
            ends.wait()

    server = threading.Thread(target=serve)
    with exclusively_served(folder, for_now=True):
        assert not is_wanted(folder)
        server.start()
        wait_until(lambda: is_wanted(folder), "nobody waits for the lock")
        assert not has_it.is_set()
    wait_until(has_it.is_set, "the lock was not handed over")
    assert not is_wanted(folder)
    with pytest.raises(ConfigError, check=has_code("FV1314")), exclusively_served(folder, for_now=True):
        pass
    ends.set()
    server.join()
