"""A bit of a device's files flips in the middle of a run: the numbers of a calm run come out, or the device says what
is damaged and what it does about it. Never anything else.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import fedvit.blobs
from edge_client.link import resending
from edge_client.storage import integrity as integrity_module
from fedvit.blobs import is_whole
from fedvit.program import Program
from fedvit.tensors import pack
from fedvit.wire.messages import BlobNack, Failed, Result
from tests.support.agents import Device, World, with_a_patch, with_local_head
from tests.support.damage import flip
from tests.support.settings import Setting

ROUNDS = 3


class Run(NamedTuple):
    uploads: list[bytes]
    local: bytes
    told: list[str]


@pytest.fixture
def worlds(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], World]]:
    """Makes federations of one device."""
    monkeypatch.setattr(resending, "AGAIN_S", 600.0)
    made: list[World] = []

    def make() -> World:
        made.append(World(digits, tmp_path / f"world-{len(made)}"))
        return made[-1]

    yield make
    for world in made:
        world.stop()


def run(world: World, setting: Setting, program: Program, spoil: Callable[[Device], object]) -> Run:
    """Three rounds. After the second the device is stopped, `spoil` is done to its disk, and it starts again."""
    device = world.device()
    uploads, told = list[bytes](), list[str]()
    for number in range(1, ROUNDS + 1):
        result = world.result(setting, program=program, round=number)
        told += result.damaged
        uploads.append(pack(world.server.fetch(result.upload)))
        world.server.acknowledge(result)
        world.server.wait(lambda: device.vault.pending() == [])  # noqa: B023 - called now
        if number == 2:
            device.stop()
            spoil(device)
            device = started_again(world)
    local = device.vault.local("run")
    assert local is not None
    return Run(uploads, pack(local), told)


def started_again(world: World) -> Device:
    """Without a word to it that would make it tidy up."""
    world.server.heard.clear()
    world.server._read = 0
    device = world.device(joined=False)
    world.server.welcome()
    return device


def home(device: Device) -> Path:
    return device.vault.folder / "run"


def newest(device: Device) -> Path:
    return home(device) / (home(device) / "CURRENT").read_text()


def before(device: Device) -> Path:
    [folder] = set(home(device).glob("round-*")) - {newest(device)}
    return folder


# --- blobs --------------------------------------------------------------------------------------------


def test_every_damaged_blob_is_fetched_anew(worlds: Callable[[], World], fedavg: Setting) -> None:
    """Graphs, the program, the round's weights, and the first values of the head: all at once, and told one by one."""
    program, spoilt = with_local_head(fedavg), list[Path]()

    def spoil(device: Device) -> None:
        for file in device.blobs.folder.glob("*/*"):
            flip(file, 0.9)
            spoilt.append(file)

    calm = run(worlds(), fedavg, program, lambda device: None)
    damaged = run(worlds(), fedavg, program, spoil)
    assert damaged[:2] == calm[:2], "bit for bit"
    assert calm.told == []
    needed = [*(graph.digest for graph in program.graphs.values()), program.groups["head"].initial]
    for digest in needed:
        assert any(str(digest).removeprefix("blake3:") in what for what in damaged.told), digest
    assert len(damaged.told) <= len(spoilt)


def test_damaged_frozen_weights_train_no_other_model(worlds: Callable[[], World], eftvit: Setting) -> None:
    """A number of them is another one: nothing but their digest can tell."""
    [*frozen] = [group.initial for group in eftvit.program.groups.values() if group.initial]
    assert frozen

    def spoil(device: Device) -> None:
        for digest in frozen:
            flip(device.blobs.path(digest), 0.9)

    calm = run(worlds(), eftvit, eftvit.program, lambda device: None)
    damaged = run(worlds(), eftvit, eftvit.program, spoil)
    assert damaged[:2] == calm[:2]
    assert len(damaged.told) == len(frozen)


def test_what_is_damaged_while_the_device_runs_is_found_in_idle_time(
    worlds: Callable[[], World], fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither size nor date of the file change, and this process has found it whole before."""
    world = worlds()
    device = world.device()
    first = world.result(fedavg)
    world.server.acknowledge(first)
    graph = device.blobs.path(fedavg.program.graphs["train"].digest)
    flip(graph)
    device.agent.storage.integrity._due = 0.0
    monkeypatch.setattr(integrity_module, "SCRUB_EVERY_S", 0.0)
    monkeypatch.setattr(integrity_module, "SCRUB_AGAIN_S", 0.0)
    world.server.wait(lambda: not graph.exists())
    told = world.result(fedavg, round=2)
    assert [str(graph) in what for what in told.damaged] == [True]
    assert is_whole(device.blobs.path(f"blake3:{graph.name}"), f"blake3:{graph.name}")


@pytest.mark.parametrize("next_run", ["run", "another"])
def test_what_is_damaged_while_the_device_runs_is_found_by_a_task(
    worlds: Callable[[], World], fedavg: Setting, monkeypatch: pytest.MonkeyPatch, next_run: str
) -> None:
    """The next task of the same run, when the file was read an hour ago, or the first task of another run."""
    if next_run == "run":
        monkeypatch.setattr(integrity_module, "VALID_S", 0.0)
    monkeypatch.setattr(integrity_module, "SCRUB_EVERY_S", 1e9)
    world = worlds()
    device = world.device()
    world.server.acknowledge(world.result(fedavg))
    graph = device.blobs.path(fedavg.program.graphs["train"].digest)
    before = graph.stat()
    flip(graph)
    assert (graph.stat().st_mtime_ns, graph.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    told = world.result(fedavg, round=2, run=next_run)
    assert [str(graph) in what for what in told.damaged] == [True]
    assert is_whole(graph, f"blake3:{graph.name}")


def test_a_damaged_base_is_not_patched(worlds: Callable[[], World], fedavg: Setting) -> None:
    """The target is fetched whole instead, within the same task; recipes are followed again afterwards."""
    world = worlds()
    device = world.device()
    old, new, delta_step = with_a_patch(world, fedavg, honest=True)
    world.server.acknowledge(world.result(fedavg, kind="evaluate", group_values={"model": old}))
    device.stop()
    flip(device.blobs.path(delta_step.base), 0.9)
    again = started_again(world)
    result = world.result(fedavg, round=2, kind="evaluate", group_values={"model": new}, recipes=(delta_step,))
    assert len(result.damaged) == 1
    assert delta_step.base.removeprefix("blake3:") in result.damaged[0]
    assert is_whole(again.blobs.path(delta_step.target), delta_step.target)
    assert again.agent.worker.accepts_delta_chains


def test_a_base_that_is_damaged_after_it_was_read_is_found_by_what_comes_out(
    worlds: Callable[[], World], fedavg: Setting
) -> None:
    world = worlds()
    device = world.device()
    old, new, delta_step = with_a_patch(world, fedavg, honest=True)
    world.server.acknowledge(world.result(fedavg, kind="evaluate", group_values={"model": old}))
    flip(device.blobs.path(delta_step.base), 0.9)
    result = world.result(fedavg, round=2, kind="evaluate", group_values={"model": new}, recipes=(delta_step,))
    assert [delta_step.base.removeprefix("blake3:") in what for what in result.damaged] == [True]
    assert is_whole(device.blobs.path(delta_step.target), delta_step.target)
    assert device.agent.worker.accepts_delta_chains


def test_a_disk_that_keeps_nothing_is_named_and_the_task_ends(
    worlds: Callable[[], World], fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blob that is damaged as often as it comes is not fetched for ever."""
    world = worlds()
    graph = fedavg.program.graphs["train"].digest
    real = fedvit.blobs.is_whole
    monkeypatch.setattr(fedvit.blobs, "is_whole", lambda path, digest: digest != graph and real(path, digest))
    world.device()
    reason = world.failure(fedavg)
    assert graph in reason
    assert "replace the disk" in reason
    wants = [message for message in world.server.heard if isinstance(message, BlobNack) and message.digest == graph]
    assert len(wants) >= 3
    monkeypatch.setattr(fedvit.blobs, "is_whole", real)
    assert len(world.result(fedavg, round=2).damaged) == 3


@pytest.mark.parametrize("suffix", ["part", "map"])
def test_what_was_half_received_and_damaged_is_fetched_again_and_ends(
    worlds: Callable[[], World], fedavg: Setting, suffix: str
) -> None:
    """The digest of the whole tells; then it begins from scratch."""
    world = worlds()
    device = world.device()
    task = world.task(fedavg)
    manifest = next(manifest for manifest in task.blobs if manifest.digest == task.groups["model"])
    content = world.server.blobs.get(manifest.digest)
    device.stop()
    partial = device.blobs.receive(manifest)
    partial.write(0, content[: manifest.chunk])
    partial.leave()
    file = device.blobs.path(manifest.digest)
    # in the map: of the byte that says whether the second chunk is here
    flip(file.with_name(f"{file.name}.{suffix}"), 0.5 if suffix == "part" else (4 + 4 + 8 + 36 + 1) / 56, mask=1)
    again = started_again(world)
    world.server.tell(msgspec.structs.replace(task, instance=world.server.instance))
    world.server.expect(Result)
    assert is_whole(again.blobs.path(manifest.digest), manifest.digest)


# --- results ------------------------------------------------------------------------------------------


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
    again = started_again(world)
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
    started_again(world)
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


# --- the vault ----------------------------------------------------------------------------------------


def test_damaged_personal_tensors_are_those_of_the_round_before_and_the_run_says_so(
    worlds: Callable[[], World], fedavg: Setting
) -> None:
    """The third round then begins where the second had begun."""
    program = with_local_head(fedavg)

    def spoil(device: Device) -> None:
        flip(newest(device) / "local.safetensors", 0.99)

    calm = run(worlds(), fedavg, program, lambda device: None)
    damaged = run(worlds(), fedavg, program, spoil)
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

    [told] = run(worlds(), fedavg, program, spoil).told
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

    calm = run(worlds(), fedavg, program, lambda device: None)
    damaged = run(worlds(), fedavg, program, spoil)
    assert damaged[:2] == calm[:2]
    assert ["CURRENT" in what for what in damaged.told] == ([True] if name == "CURRENT" else [])
