"""What a device keeps of runs: its own model, what was not acknowledged, and as many vaults as it should."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from click.testing import Result as Done

import edge_client.owner.trained
import edge_client.storage.disk
from edge_client.cli import cli
from edge_client.storage.disk import DiskBudget
from edge_client.storage.features import FeatureFolder
from edge_client.storage.retention import find_least_run
from edge_client.storage.state import lock_state
from edge_client.storage.vault import Vault, finish_removals, list_removed, remove_run
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, OverBudget
from fedvit.files import WRITING, folder_bytes
from fedvit.policy import Policy, TrainPolicy
from fedvit.program import Role, encode_program
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors, pack
from fedvit.wire.messages import BlobNack, Failed, Manifest, Result, RunEnded, Task
from tests.support.agents import Device, World, with_kept, with_local_head
from tests.support.codes import has_code
from tests.support.power import after_power_cut, recorded, tree, write_tree
from tests.support.settings import Setting
from tests.support.waiting import wait_until


def digests(blobs: BlobStore) -> set[str]:
    return {f"blake3:{file.name}" for file in blobs.folder.glob("*/*")}


def keep_run(vault: Vault, run: str, *, upload: Manifest | None = None, **task: Any) -> None:
    """A run with a round and a result that waits; later calls are newer runs."""
    given: dict[str, Any] = {"kind": "train", "seed": 5, "program": "blake3:" + "0" * 64, "groups": {}, **task}
    vault.notes.write(Task(instance="i", epoch=1, run=run, round=1, blobs=(), deadline_s=1.0, **given))
    vault.commit(Result(run, 1, "train", 5, {}, ResourceUse(), upload), {"w": np.ones(4, np.float32)})
    newest = len(list(vault.folder.glob("*/TASK")))
    os.utime(vault.path(run) / "TASK", (newest, newest))  # before all that is written now


def over(vault: Vault, run: str) -> None:
    """A run that finished, whose result was acknowledged."""
    keep_run(vault, run)
    vault.settle(run, 1)
    vault.end(run)


def finish(world: World, device: Device, status: str = "finished") -> None:
    """The run ends, and the device leaves."""
    world.server.tell(RunEnded("run", status))
    assert device.ended() == f"run run {status}"


# --- a device whose run has ended ---------------------------------------------------------------------


def own_model(world: World, device: Device, digits: Path) -> Tensors:
    """As `edge-client export` puts it together."""
    state = device.vault.folder.parent
    made, _ = edge_client.owner.trained.load_own_model(
        "run", device="pi", state=state, data=DeviceData.open(digits), threads=1
    )
    return {name.removeprefix("tensor/"): value for name, value in made.values.items()}


@pytest.mark.parametrize("status", ["finished", "cancelled"])
def test_the_end_of_a_run_leaves_the_blobs_of_the_devices_own_model(
    world: World, fedavg: Setting, digits: Path, status: str
) -> None:
    """The training graph, first values of personal tensors, and the upload go."""
    device, program = world.device(once=True), with_local_head(fedavg)
    task = world.task(fedavg, program=program)
    world.server.tell(task)
    result = world.server.expect(Result)
    world.server.acknowledge(result)
    assert result.upload is not None
    finish(world, device, status)
    assert digests(device.blobs) == {task.program, program.graphs["predict"].digest, *task.groups.values()}
    model = own_model(world, device, digits)
    assert model["head.weight"].tobytes() == (device.vault.local("run") or {})["head.weight"].tobytes()
    assert model.keys() == fedavg.start().keys()


def test_the_end_of_a_run_leaves_nothing_that_the_vault_has(world: World, fedavg: Setting, digits: Path) -> None:
    """A model that is tested as the device trained it is in the vault whole."""
    device, program = world.device(once=True), with_kept(fedavg)
    task = world.task(fedavg, program=program)
    world.server.tell(task)
    world.server.acknowledge(world.server.expect(Result))
    finish(world, device)
    assert digests(device.blobs) == {task.program, program.graphs["predict"].digest}
    assert own_model(world, device, digits).keys() == fedavg.start().keys()


def test_the_end_of_a_run_leaves_frozen_weights(world: World, fedavg: Setting) -> None:
    """No vault has them, so an export reads them."""
    device, program = world.device(once=True), with_local_head(fedavg)
    head = msgspec.structs.replace(program.groups["head"], role=Role.FROZEN)
    program = msgspec.structs.replace(program, groups={**program.groups, "head": head}, train=())
    world.result(fedavg, program=program, kind="evaluate")
    finish(world, device)
    assert head.initial in digests(device.blobs)


def test_a_run_that_failed_keeps_its_blobs(world: World, fedavg: Setting) -> None:
    """It may be resumed, and then nothing is fetched again."""
    device = world.device(once=True)
    world.server.acknowledge(world.result(fedavg))
    before = digests(device.blobs)
    finish(world, device, "failed: no room")
    assert digests(device.blobs) == before
    assert not device.vault.is_over("run")


def test_a_result_that_nobody_will_acknowledge_goes_with_its_run_and_that_of_another_run_stays(
    world: World, fedavg: Setting
) -> None:
    device = world.device(once=True)
    other = world.result(fedavg, run="other")
    mine = world.result(fedavg, round=2)
    assert other.upload is not None
    assert mine.upload is not None
    finish(world, device)
    assert Vault(device.vault.folder).pending() == [other]
    assert device.blobs.has(other.upload.digest)
    assert not device.blobs.has(mine.upload.digest)


def test_a_result_that_is_done_just_when_its_run_ends_does_not_wait(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever acknowledge it, and the vault would stay for good."""
    device = world.device()
    commit = device.vault.commit

    def late(*arguments: Any, **named: Any) -> None:
        world.server.tell(RunEnded("run", "finished"))
        wait_until(lambda: device.vault.is_over("run"))
        commit(*arguments, **named)

    monkeypatch.setattr(device.vault, "commit", late)
    world.give(fedavg)
    world.server.wait(lambda: device.vault.round_of("run") == 1 and not device.vault.has_pending("run"))
    world.server.mark()
    assert world.server.count(Result) == 0


def test_a_task_of_a_run_that_was_over_opens_it_again(world: World, fedavg: Setting) -> None:
    device = world.device()
    over(device.vault, "run")
    assert world.result(fedavg, round=2).round == 2
    assert not device.vault.is_over("run")


def test_a_device_keeps_the_newest_vaults_that_it_should(world: World, fedavg: Setting) -> None:
    """When a run is over, older ones go that are over, too; not one that was not, or whose result waits."""
    vault = Vault(world.state / "vault")
    for run in ("oldest", "older"):
        over(vault, run)
    keep_run(vault, "resumable")
    vault.settle("resumable", 1)
    keep_run(vault, "waiting", upload=BlobStore(world.state / "blobs").put(b"upload"))
    over(vault, "second")
    device = world.device(once=True, policy=Policy(train=TrainPolicy(keep_runs=2)))
    assert world.server.expect(Result).run == "waiting"
    world.server.acknowledge(world.result(fedavg))
    finish(world, device)
    assert vault.notes.list_runs() == ["run", "second", "waiting", "resumable"]
    assert [result.run for result in vault.pending()] == ["waiting"]


def test_device_keeps_all_vaults_by_default(world: World, fedavg: Setting) -> None:
    over(Vault(world.state / "vault"), "older")
    device = world.device(once=True)
    world.server.acknowledge(world.result(fedavg))
    finish(world, device)
    assert device.vault.notes.list_runs() == ["run", "older"]


# --- the disk budget ----------------------------------------------------------------------------------


def used(device: Device) -> int:
    return folder_bytes(device.vault.folder.parent)


def answers(world: World, run: str) -> list[Result | Failed]:
    return [message for message in world.server.heard if isinstance(message, Result | Failed) and message.run == run]


def test_invented_runs_stay_within_the_disk_budget(world: World, fedavg: Setting) -> None:
    """Each has its own personal tensors and an upload that nobody acknowledges. The run that the device takes part in
    goes on from its own tensors."""
    device, program = world.device(), with_local_head(fedavg)
    for number in (1, 2):
        world.server.acknowledge(world.result(fedavg, program=program, round=number))
    world.server.wait(lambda: device.vault.pending() == [])
    own = pack(device.vault.local("run") or {})
    before = used(device)
    device.agent.storage.disk.limit_bytes = limit_bytes = before + 100_000
    refused = ""
    for number in range(40):
        world.give(fedavg, program=program, run=f"invented-{number}")
        world.server.wait(lambda: answers(world, f"invented-{number}") != [])  # noqa: B023 - called now
        assert used(device) <= limit_bytes
        if refused := next((one.reason for one in answers(world, f"invented-{number}") if isinstance(one, Failed)), ""):
            break
    assert "raise --disk-budget" in refused
    assert pack(device.vault.local("run") or {}) == own
    device.agent.storage.disk.limit_bytes = 2 * limit_bytes
    world.give(fedavg, program=program, round=3)
    world.server.wait(lambda: device.vault.round_of("run") == 3)


def test_blobs_that_exceed_the_disk_budget_are_not_fetched(world: World, fedavg: Setting) -> None:
    device = world.device()
    device.agent.storage.disk.limit_bytes = 1000
    reason = world.failure(fedavg)
    assert "--disk-budget" in reason
    assert digests(device.blobs) == set()
    assert world.server.count(BlobNack) == 0


def test_a_program_that_would_fill_the_memory_is_not_fetched(world: World, fedavg: Setting) -> None:
    world.device()
    task = world.task(fedavg)
    large = [
        msgspec.structs.replace(manifest, size=10**9) if manifest.digest == task.program else manifest
        for manifest in task.blobs
    ]
    world.server.tell(msgspec.structs.replace(task, blobs=tuple(large), inline=()))
    assert "exceeds the limit" in world.server.expect(Failed).reason
    assert world.server.count(BlobNack) == 0


def test_finished_runs_make_room_the_oldest_first(world: World, fedavg: Setting) -> None:
    vault = Vault(world.state / "vault")
    for run in ("oldest", "older"):
        over(vault, run)
        (vault.path(run) / "large").write_bytes(bytes(10**7))
    keep_run(vault, "resumable")
    vault.settle("resumable", 1)
    device = world.device()
    device.agent.storage.disk.limit_bytes = used(device) - 10**6
    world.result(fedavg)
    assert set(device.vault.notes.list_runs()) == {"run", "older", "resumable"}


def test_features_make_room_before_any_run(tmp_path: Path) -> None:
    vault, features = Vault(tmp_path / "vault"), FeatureFolder(tmp_path / "features")
    over(vault, "older")
    disk = DiskBudget(vault, BlobStore(tmp_path / "blobs"), None, features=features)
    assert disk.find_feature_room() is None
    file = features.find_file("a" * 64, 10, 5, None)
    assert file
    file.write_bytes(bytes(10**6))
    disk.limit_bytes = disk.used_bytes() + 10**6
    assert disk.find_feature_room() == 10**6, "half of what the others leave"
    disk.make_room("run", lambda: 10**6)
    assert file.exists()
    disk.make_room("run", lambda: 10**6 + 1)
    assert not file.exists()
    assert vault.notes.list_runs() == ["older"]


# --- a removal that is cut ----------------------------------------------------------------------------


def test_a_run_whose_removal_is_cut_is_whole_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill or a power cut at any call; what was not deleted yet is deleted at the next start."""
    state = tmp_path.resolve() / "state"
    state.mkdir()
    vault = Vault(state / "vault")
    over(vault, "run")
    over(vault, "other")
    before = tree(state)
    with recorded(state) as ops:
        remove_run(vault, "run")
    assert {"rename", "syncdir", "remove", "rmdir"} <= {op.kind for op in ops}

    def of(run: str, left: dict[str, bytes | None]) -> dict[str, bytes | None]:
        return {path: content for path, content in left.items() if f"{path}/".startswith(f"vault/{run}/")}

    monkeypatch.setattr(os, "fsync", lambda handle: None)
    seen = set()
    for number, (done, left) in enumerate(after_power_cut(before, ops)):
        assert of("other", left) == of("other", before)
        assert of("run", left) in ({}, of("run", before)), f"half of it is left after {done} of {len(ops)} calls"
        seen.add(bool(of("run", left)))
        folder = tmp_path / f"cut-{number}"
        write_tree(left, folder)
        again = Vault(folder / "vault")
        finish_removals(again)
        assert list_removed(again) == []
        remove_run(again, "run")
        assert tree(folder).keys() - {"vault/.removed"} == of("other", before).keys() | {"vault"}
    assert seen == {True, False}


def test_what_an_interrupted_removal_left_is_deleted_at_the_start(world: World) -> None:
    left = world.state / "vault" / ".removed" / "0123"
    left.mkdir(parents=True)
    (left / "CURRENT").write_text("round-1-00")
    device = world.device()
    assert not left.exists()
    assert device.vault.notes.list_runs() == []


# --- edge-client gc and rm ----------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, fedavg: Setting) -> Path:
    """Of a device that took part in five runs; blobs of the newest are here, and others."""
    folder = tmp_path / "device"
    vault, blobs = Vault(folder / "vault"), BlobStore(folder / "blobs")
    over(vault, "oldest")
    over(vault, "older")
    keep_run(vault, "waiting", upload=blobs.put(b"upload that waits"))
    keep_run(vault, "unheard")
    vault.settle("unheard", 1)
    program = fedavg.program
    for digest in program.list_fetched_once():
        blobs.put(fedavg.blobs.get(digest))
    shipped, model = blobs.put(encode_program(program)), blobs.put(pack(fedavg.start()))
    keep_run(vault, "newest", program=shipped.digest, groups={"model": model.digest})
    vault.settle("newest", 1)
    blobs.put(b"of a task that is over")
    (blobs.folder / "ab").mkdir(exist_ok=True)
    (blobs.folder / "ab" / f"{WRITING}1").write_bytes(b"half a blob")
    (vault.path("newest") / f"{WRITING}2").write_bytes(b"half a note")
    return folder


def call(*arguments: object) -> Done:
    return CliRunner().invoke(cli, [*map(str, arguments)])


def report(*arguments: object) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusal(*arguments: object) -> str:
    done = call(*arguments)
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


def test_gc_removes_what_it_said_it_would(state: Path) -> None:
    before = tree(state)
    planned = report("gc", "--state", state, "--dry-run")
    assert tree(state).keys() - {"lock"} == before.keys()
    assert [entry["run"] for entry in planned["removed"] if entry["what"] == "run"] == ["older", "oldest"]
    assert {entry["run"]: entry["why"] for entry in planned["kept"]} == {
        "newest": "among the newest 1",
        "unheard": "this device was not informed that the run is over",
        "waiting": "a result is not acknowledged yet",
    }
    takes = folder_bytes(state)
    done = report("gc", "--state", state)
    assert {**done, "dry_run": True, "kept": []} == {**planned, "kept": []}
    assert done["removed_bytes"] == takes - folder_bytes(state)
    vault = Vault(state / "vault")
    assert vault.notes.list_runs() == ["newest", "unheard", "waiting"]
    assert [result.upload is not None and BlobStore(state / "blobs").has(result.upload.digest)
            for result in vault.pending()] == [True]  # fmt: skip
    assert not list(state.rglob(f"{WRITING}*"))
    assert report("gc", "--state", state)["removed"] == []


def test_gc_keeps_all_blobs_of_a_run_that_may_go_on_and_of_one_that_is_over_its_model(
    state: Path, fedavg: Setting
) -> None:
    vault, blobs = Vault(state / "vault"), BlobStore(state / "blobs")
    noted = vault.notes.find_newest("newest")
    assert noted is not None
    program, graphs = fedavg.program, fedavg.program.graphs
    waits = {result.upload.digest for result in vault.pending() if result.upload}
    report("gc", "--state", state)
    assert digests(blobs) == {noted.program, *noted.groups.values(), *program.list_fetched_once(), *waits}
    vault.end("newest")
    report("gc", "--state", state)
    assert digests(blobs) == {noted.program, *noted.groups.values(), graphs["predict"].digest, *waits}


def test_gc_removes_features(state: Path) -> None:
    """Also the device that never runs again has them; they are made again where they are needed."""
    file = FeatureFolder(state / "features").find_file("a" * 64, 10, 5, None)
    assert file
    file.write_bytes(bytes(1000))
    [entry] = [entry for entry in report("gc", "--state", state)["removed"] if entry["what"] == "features"]
    assert (entry["path"], entry["why"]) == (str(file.parent), "the next task makes them again")
    assert not file.exists()


def test_gc_removes_states_that_no_run_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one in use, nor one with a run, nor what is no state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    base = tmp_path / "fedvit"
    for name in ("stray", "used", "busy"):
        os.close(lock_state(base / name))
        (base / name / "vault").mkdir()
    Vault(base / "used" / "vault").commit(Result("run", 1, "train", 5, {}, ResourceUse()), {"w": np.ones(4)})
    for name in ("identity", "other"):
        (base / name).mkdir()
    lock = lock_state(base / "busy")
    try:
        planned = report("gc", "--strays", "--dry-run")
        assert [entry["path"] for entry in planned["removed"]] == [str(base / "stray")]
        assert (base / "stray").is_dir()
        assert report("gc", "--strays")["removed"] == planned["removed"]
    finally:
        os.close(lock)
    assert sorted(path.name for path in base.iterdir()) == ["busy", "identity", "other", "used"]


def test_gc_keeps_as_many_runs_as_it_should(state: Path) -> None:
    assert len(report("--keep-runs", 5, "gc", "--state", state)["kept"]) == 5, "the option may stand before the command"
    report("gc", "--state", state, "--keep-runs", 4)
    assert Vault(state / "vault").notes.list_runs() == ["newest", "unheard", "waiting", "older"]


def test_gc_of_a_device_that_runs_is_refused(state: Path) -> None:
    handle = lock_state(state)
    try:
        assert str(os.getpid()) in refusal("gc", "--state", state)
        assert str(os.getpid()) in refusal("rm", "--state", state, "oldest")
    finally:
        os.close(handle)
    assert len(Vault(state / "vault").notes.list_runs()) == 5


def test_gc_of_a_virtual_device_leaves_the_blobs_of_its_host(state: Path, tmp_path: Path) -> None:
    """Its neighbours need them; and while the host runs, nothing is removed."""
    host = tmp_path / "host-0"
    host.mkdir()
    (state / "blobs").rename(host / "blobs")
    (state / "blobs").symlink_to(host / "blobs")
    before = tree(host)
    handle = lock_state(host)
    try:
        assert str(host) in refusal("gc", "--state", state)
    finally:
        os.close(handle)
    removed = report("gc", "--state", state)["removed"]
    assert {entry["what"] for entry in removed} == {"run", "file"}
    assert tree(host).keys() - {"lock"} == before.keys()


def test_gc_names_a_folder_without_a_device(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal("gc", "--state", tmp_path)
    assert "--state" in refusal("gc")
    assert list(tmp_path.iterdir()) == []


def test_rm_removes_runs_that_are_over(state: Path) -> None:
    done = report("rm", "--state", state, "oldest")
    assert [entry["run"] for entry in done["removed"] if entry["what"] == "run"] == ["oldest"]
    assert Vault(state / "vault").notes.list_runs() == ["newest", "unheard", "waiting", "older"]


@pytest.mark.parametrize(
    ("run", "reason"),
    [("nothing", "no run 'nothing'"), ("a/b", "'a/b'"), ("waiting", "acknowledged"), ("unheard", "--force")],
)
def test_rm_refuses_before_anything_is_removed(state: Path, run: str, reason: str) -> None:
    assert reason in refusal("rm", "--state", state, "oldest", run)
    assert len(Vault(state / "vault").notes.list_runs()) == 5


def test_rm_removes_a_run_whose_end_was_not_heard_where_that_is_wanted(state: Path) -> None:
    report("rm", "--state", state, "--force", "unheard")
    assert "unheard" not in Vault(state / "vault").notes.list_runs()
    assert "acknowledged" in refusal("rm", "--state", state, "--force", "waiting")


# --- more runs than a vault may have ------------------------------------------------------------------


def test_the_run_that_costs_the_least_gives_its_place_to_a_new_one(tmp_path: Path) -> None:
    """First one that is over, then one without a round, then the oldest with one; no result that waits is lost."""
    vault = Vault(tmp_path)
    for run in ("waits", "longer", "once", "once-more", "ended"):
        keep_run(vault, run)
        if run != "waits":
            vault.settle(run, 1)
    keep_run(vault, "longer")
    vault.settle("longer", 1)
    vault.end("ended")
    (tmp_path / "begun").mkdir()
    removed = []
    while run := find_least_run(vault):
        removed.append(run)
        remove_run(vault, run)
    assert removed == ["ended", "begun", "once", "once-more"]
    assert set(vault.folders()) == {"waits", "longer"}


def test_vault_has_at_most_so_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_client.storage.disk, "MAX_RUNS", 2)
    vault = Vault(tmp_path / "vault")
    disk = DiskBudget(vault, BlobStore(tmp_path / "blobs"), None)
    disk.make_place("first")
    for run in ("first", "second"):
        keep_run(vault, run)
    disk.make_place("second")
    with pytest.raises(OverBudget, check=has_code("FV1507", "'third'")):
        disk.make_place("third")
    vault.settle("second", 1)
    disk.make_place("third")
    assert vault.folders() == ["first"]
