"""The status that an agent writes while it works."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import edge_client.health.status as status_module
from edge_client.cli import cli
from edge_client.health.status import Status, read_status
from edge_client.storage.pause import OwnerPause
from edge_client.storage.state import lock_state
from fedvit.errors import ConfigError
from tests.support.agents import World
from tests.support.codes import has_code
from tests.support.owner_pages import make_home, write_status
from tests.support.settings import Setting
from tests.support.waiting import wait_until


@pytest.fixture
def status(world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Status]:
    """Reads the status of a device with 20 + 12 digits, one of which is cut off, one empty, and a film."""
    monkeypatch.setattr(status_module, "LEAST_INTERVAL_S", 0.0)
    folder = tmp_path / "images"
    shutil.copytree(digits, folder)
    short = folder / "train/0/00.png"
    short.write_bytes(short.read_bytes()[:-40])
    (folder / "train/1/empty.png").touch()
    (folder / "train/1/film.mp4").write_text("x")
    world.device(digits=folder, growing=True)
    return lambda: read_status(world.state / "status.json")


def test_what_the_device_did(world: World, fedavg: Setting, status: Callable[[], Status]) -> None:
    result = world.result(fedavg)
    world.server.acknowledge(result)
    wait_until(lambda: status().doing.last is not None and status().doing.state == "waiting for a task")
    found = status()
    last = found.doing.last
    assert last is not None
    assert (last.run, last.round, last.kind, last.outcome, last.samples) == ("run", 1, "train", "done", 19)
    assert last.metrics == result.metrics
    assert {name: (count.train, count.test) for name, count in found.doing.classes.items()} == {
        "0": (8, 4), "1": (8, 4), "2": (4, 4),
    }  # fmt: skip
    assert {reason: (files.count, files.examples) for reason, files in found.doing.unusable.items()} == {
        "an empty file": (1, ("train/1/empty.png",)),
        "damaged or cut off": (1, ("train/0/00.png",)),
        "of an unknown type": (1, ("train/1/film.mp4",)),
    }
    assert (found.device, found.federation, found.process) == ("pi", "home", os.getpid())
    assert found.rss_bytes > 0
    assert found.peak_rss_bytes == result.use.peak_rss_bytes


def test_pause_of_the_owner_is_shown(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    write_status(home)

    def show(*flags: str) -> str:
        arguments = ["status", "--state", str(home.state), *flags]
        return CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout

    assert json.loads(show("--json"))["paused"] is False
    assert "paused" not in show()
    OwnerPause(home.state).begin()
    assert json.loads(show("--json"))["paused"] is True
    assert re.search("^paused +by its owner: takes no task$", show(), re.MULTILINE)


def test_why_the_last_task_failed(world: World, fedavg: Setting, status: Callable[[], Status]) -> None:
    reason = world.failure(fedavg, groups={})

    def what() -> str | None:
        error = status().doing.last_error
        return error and error.what

    wait_until(lambda: what() == f"round 1 of run: {reason}", lambda: f"the last error is {what()}")
    last = status().doing.last
    assert last is not None
    assert last.outcome == "failed"


def test_command_shows_it_with_no_network(
    world: World, fedavg: Setting, status: Callable[[], Status], tmp_path: Path
) -> None:
    world.server.acknowledge(world.result(fedavg))
    world.server.mark()
    wait_until(lambda: status().doing.unusable.keys() >= {"damaged or cut off"})

    def show(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["status", "--state", str(world.state), *arguments], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert "not running, since" in show()
    handle = lock_state(world.state)
    text = show()
    assert "not running" not in text
    assert "20 for training, 12 for testing" in text
    assert "1 damaged or cut off: train/0/00.png" in text
    assert '"running": true' in show("--json")
    os.close(handle)


def test_state_of_no_device(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1412", "status.json")):
        read_status(tmp_path / "status.json")


@pytest.mark.parametrize("content", [b"", b'{"device": "\xef"}'])
def test_file_after_a_power_cut(tmp_path: Path, content: bytes) -> None:
    """It is not synced: the name may be there and the content may not."""
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(ConfigError, check=has_code("FV1412", "status.json")):
        read_status(tmp_path / "status.json")
