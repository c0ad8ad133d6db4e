"""Damaged results and tensors in the middle of a run: the device names them and how it goes on, and sends none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedvit.tensors import pack
from fedvit.wire.messages import Failed, Result
from tests.support.agents import Device, World, run_rounds, start_again, with_local_head
from tests.support.damage import flip
from tests.support.settings import Setting


def home(device: Device) -> Path:
    return device.vault.folder / "run"


def newest(device: Device) -> Path:
    return home(device) / (home(device) / "CURRENT").read_text()


def before(device: Device) -> Path:
    [folder] = set(home(device).glob("round-*")) - {newest(device)}
    return folder


@pytest.mark.parametrize("kind", ["result", "upload"])
def test_a_damaged_result_is_lost_and_never_sent(worlds: Callable[[], World], fedavg: Setting, kind: str) -> None:
    """Said once, with the file; the device goes on with its personal tensors."""
    world = worlds()
    program = with_local_head(fedavg)
    device = world.device()
    result = world.result(fedavg, program=program)
    assert result.upload is not None
    device.stop()
    local = device.vault.local("run")
    file = newest(device) / "result.msgpack" if kind == "result" else device.blobs.path(result.upload.digest)
    flip(file)
    again = start_again(world)
    failed = world.server.expect(Failed)
    assert (failed.run, failed.round, failed.kind) == ("run", 1, "train")
    assert "damaged" in failed.reason
    assert world.server.count(Result) == 0
    world.server.wait(lambda: again.vault.pending() == [])
    assert local is not None
    assert pack(again.vault.local("run") or {}) == pack(local)
    told = world.result(fedavg, program=program, round=2).damaged
    assert len(told) == 1
    assert str(file) in told[0]
    again.stop()
    start_again(world)
    world.server.mark()
    assert world.server.count(Failed) == 0, "told once"


def test_an_upload_that_was_damaged_while_it_was_sent_is_found_when_it_is_refused(
    worlds: Callable[[], World], fedavg: Setting
) -> None:
    world = worlds()
    device = world.device()
    result = world.result(fedavg)
    assert result.upload is not None
    flip(device.blobs.path(result.upload.digest))
    world.server.acknowledge(result, accepted=False)
    world.server.roll_call()
    assert device.vault.pending() == []
    [told] = world.result(fedavg, round=2).damaged
    assert result.upload.digest.removeprefix("blake3:") in told


def test_damaged_personal_tensors_are_those_of_the_round_before_and_the_run_says_so(
    worlds: Callable[[], World], fedavg: Setting
) -> None:
    """The third round then begins where the second had begun."""
    program = with_local_head(fedavg)

    def spoil(device: Device) -> None:
        flip(newest(device) / "local.safetensors", 0.99)

    calm = run_rounds(worlds(), fedavg, program, lambda device: None)
    damaged = run_rounds(worlds(), fedavg, program, spoil)
    assert damaged.uploads[:2] == calm.uploads[:2]
    [told] = damaged.told
    assert "local.safetensors damaged: run 'run' returns to the tensors of round 1" in told
    assert damaged.local != calm.local, "else this test tests nothing"


def test_personal_tensors_that_are_lost_begin_anew_and_the_run_says_so(
    worlds: Callable[[], World], fedavg: Setting
) -> None:
    program = with_local_head(fedavg)

    def spoil(device: Device) -> None:
        for folder in (newest(device), before(device)):
            flip(folder / "local.safetensors", 0.99)

    [told] = run_rounds(worlds(), fedavg, program, spoil).told
    assert "personal tensors of run 'run' are lost, and start from the server's initial values" in told
    assert told.count("local.safetensors") == 2


@pytest.mark.parametrize("name", ["CURRENT", "TASK", "result.msgpack", "before"])
def test_what_is_not_needed_or_is_there_twice_changes_no_number(
    worlds: Callable[[], World], fedavg: Setting, name: str
) -> None:
    program = with_local_head(fedavg)

    def spoil(device: Device) -> None:
        match name:
            case "before":
                for file in before(device).iterdir():
                    if file.stat().st_size:
                        flip(file, 0.9)
            case "result.msgpack":
                flip(newest(device) / name, 0.9)
            case _:
                flip(home(device) / name, 0.9)

    calm = run_rounds(worlds(), fedavg, program, lambda device: None)
    damaged = run_rounds(worlds(), fedavg, program, spoil)
    assert damaged[:2] == calm[:2]
    assert ["CURRENT" in what for what in damaged.told] == ([True] if name == "CURRENT" else [])
