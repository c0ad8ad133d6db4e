"""Damaged blobs in the middle of a run: the numbers of a calm run come out, and the device names each file."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import fedvit.blobs
from edge_client.storage import integrity as integrity_module
from fedvit.blobs import is_whole
from fedvit.wire.messages import BlobNack, Result
from fleet.shared import SharedBlobs
from tests.support.agents import Device, World, run_rounds, start_again, with_a_patch, with_local_head
from tests.support.damage import flip
from tests.support.settings import Setting


def test_every_damaged_blob_is_fetched_anew(worlds: Callable[[], World], fedavg: Setting) -> None:
    """Graphs, the program, the round's weights, and the first values of the head: all at once, and told one by one."""
    program, spoilt = with_local_head(fedavg), list[Path]()

    def spoil(device: Device) -> None:
        for file in device.blobs.folder.glob("*/*"):
            flip(file, 0.9)
            spoilt.append(file)

    calm = run_rounds(worlds(), fedavg, program, lambda device: None)
    damaged = run_rounds(worlds(), fedavg, program, spoil)
    assert damaged[:2] == calm[:2], "bit for bit"
    assert calm.told == []
    needed = [*(graph.digest for graph in program.graphs.values()), program.groups["head"].initial]
    for digest in needed:
        assert any(str(digest).removeprefix("blake3:") in what for what in damaged.told), digest
    assert len(damaged.told) <= len(spoilt)


def test_bytes_count_even_if_another_device_that_shares_the_folder_has_them(
    worlds: Callable[[], World], fedavg: Setting
) -> None:
    alone = worlds()
    alone.device()
    fetched = alone.result(fedavg).use.fetched_bytes
    shared = worlds()
    folder = SharedBlobs(shared.state / "blobs")
    shared.device(blobs=folder.view())
    other, task = folder.view(), shared.task(fedavg)
    for manifest in task.blobs:
        other.put(shared.server.blobs.get(manifest.digest))
    shared.server.tell(task)
    assert shared.server.expect(Result).use.fetched_bytes == fetched == sum(one.size for one in task.blobs)


def test_damaged_frozen_weights_train_no_other_model(worlds: Callable[[], World], eftvit: Setting) -> None:
    """A number of them is another one: nothing but their digest can tell."""
    [*frozen] = [group.initial for group in eftvit.program.groups.values() if group.initial]
    assert frozen

    def spoil(device: Device) -> None:
        for digest in frozen:
            flip(device.blobs.path(digest), 0.9)

    calm = run_rounds(worlds(), eftvit, eftvit.program, lambda device: None)
    damaged = run_rounds(worlds(), eftvit, eftvit.program, spoil)
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
    again = start_again(world)
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
    again = start_again(world)
    world.server.tell(msgspec.structs.replace(task, instance=world.server.instance))
    world.server.expect(Result)
    assert is_whole(again.blobs.path(manifest.digest), manifest.digest)
