"""An agent whose images come and go."""

import shutil
from pathlib import Path

import pytest

from fedvit.wire.messages import Declined, Hello, Result, RunEnded
from tests.support.agents import World
from tests.support.settings import Setting


@pytest.fixture
def growing(tmp_path: Path, digits: Path) -> Path:
    """20 training and 12 test images of the classes 0, 1, 2, that a test may change."""
    folder = tmp_path / "images"
    shutil.copytree(digits, folder)
    return folder


def list_announced(world: World) -> list[tuple[int, int]]:
    """Training and test images of every hello."""
    hellos = [message for message in world.server.heard if isinstance(message, Hello)]
    return [(hello.train_samples, hello.test_samples) for hello in hellos]


def add(folder: Path, name: str, label: str = "0", like: str = "0") -> None:
    (folder / "train" / label).mkdir(exist_ok=True)
    shutil.copy(folder / "train" / like / "00.png", folder / "train" / label / name)


def test_changes_count_from_the_next_task_on_and_are_announced_before_its_result(
    world: World, fedavg: Setting, growing: Path
) -> None:
    world.device(digits=growing, growing=True)
    server = world.server
    first = world.result(fedavg)
    server.acknowledge(first)
    assert first.samples == 20
    assert list_announced(world)[-1] == (20, 12)
    add(growing, "new.png")
    add(growing, "newer.png")
    second = world.result(fedavg, round=2)
    server.acknowledge(second)
    assert second.samples == 22
    assert list_announced(world)[-1] == (22, 12)
    kinds = [type(message) for message in server.heard[server.heard.index(first) :]]
    assert kinds.index(Hello) < len(kinds) - kinds[::-1].index(Result) - 1
    (growing / "train/0/new.png").unlink()
    (growing / "test/0/00.png").unlink()
    assert world.result(fedavg, round=3).samples == 21
    assert list_announced(world)[-1] == (21, 11)


def test_same_images_are_announced_once(world: World, fedavg: Setting, growing: Path) -> None:
    world.device(digits=growing, growing=True)
    before = list_announced(world)
    for number in (1, 2):
        world.server.acknowledge(world.result(fedavg, round=number))
    assert list_announced(world) == before


def test_result_without_an_answer_keeps_the_numbers_that_were_announced_before_it(
    world: World, fedavg: Setting, growing: Path
) -> None:
    """The coordinator refuses a result of more images than the device has announced."""
    world.device(digits=growing, growing=True)
    server = world.server
    world.result(fedavg)
    (growing / "train/0/00.png").unlink()
    server.is_here(server.epoch + 1)
    server.welcome()
    assert list_announced(world)[-1] == (20, 12)
    server.acknowledge(server.expect(Result))  # sent again
    assert world.result(fedavg, round=2).samples == 19


def test_without_an_image_a_task_is_declined(world: World, fedavg: Setting, growing: Path) -> None:
    world.device(digits=growing, growing=True)
    server = world.server
    away = growing.parent / "away"
    (growing / "train").rename(away)
    (growing / "train/0").mkdir(parents=True)
    world.give(fedavg)
    declined = server.expect(Declined)
    assert declined.reason.startswith("images cannot be used: ")
    assert "no images for training" in declined.reason
    shutil.rmtree(growing / "train")
    away.rename(growing / "train")
    assert world.result(fedavg, round=2).samples == 20


def test_new_class_counts_from_the_next_run_on(world: World, fedavg: Setting, growing: Path) -> None:
    world.device(digits=growing, growing=True)
    server = world.server
    server.acknowledge(world.result(fedavg))
    add(growing, "new.png", label="9")
    result = world.result(fedavg, round=2)
    assert result.samples == 20
    server.acknowledge(result)
    server.tell(RunEnded("run", "finished"))
    server.is_here(server.epoch + 1)
    hello = server.expect(Hello)
    assert (hello.train_samples, hello.classes) == (21, ("0", "1", "2", "9"))


def test_image_that_cannot_be_decoded_is_named_in_the_log_and_ends_no_task(
    world: World, fedavg: Setting, growing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world.device(digits=growing, growing=True)
    add(growing, "short.png")
    short = growing / "train/0/short.png"
    short.write_bytes(short.read_bytes()[:-40])
    for number in (1, 2):
        result = world.result(fedavg, round=number)
        assert isinstance(result, Result)
        assert result.samples == 20
        world.server.acknowledge(result)
        world.server.mark()
    assert [record for record in caplog.messages if record == "file not used"] == ["file not used"]
