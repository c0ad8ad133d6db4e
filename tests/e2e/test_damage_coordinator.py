"""Damage to a coordinator's files, with real processes: the same tensors, or a run that stops and says what to do."""

import os
import resource
import shutil
from pathlib import Path

import pytest

from fedvit.program import decode_program
from fedvit.wire.messages import Progress
from tests.support.damage import flip
from tests.support.programs import DEVICES, ROUNDS, Stage, wait_for

pytestmark = pytest.mark.slow


def blob(stage: Stage, digest: str) -> Path:
    name = digest.partition(":")[2]
    return stage.out / "run" / "blobs" / name[:2] / name


def test_files_are_damaged_in_the_middle_of_a_run(stage: Stage, undisturbed: bytes) -> None:
    """In round 2, which lasts as long as device-1 trains: a byte of each graph and of the newest state is flipped,
    device-2 loses its blobs and fetches them again, and descriptors are used up for a while. In round 3 the coordinator
    is killed, its record cut off, and put back from the copy that is named. No device is to blame, and the numbers are
    those of the undisturbed run."""
    coordinator = stage.coordinator()
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    wait_for(observer.find(Progress, since_start=True, round=2, kind="train", device="device-1"), "round 2")
    [(program,)] = stage.query("select program from runs")
    named = decode_program(blob(stage, program).read_bytes())
    [(state,)] = stage.query("select json_extract(state, '$.groups.norm') from rounds where round = 1")
    damaged = [blob(stage, digest) for digest in (*(graph.digest for graph in named.graphs.values()), state)]
    for file in damaged:
        flip(file, keep_date=False)
    accepted = "select 1 from results where round = 2 and kind = 'train' and device = 'device-2'"
    wait_for(lambda: stage.query(accepted), "device-2's result: what it brings is not to be lost with its blobs")
    shutil.rmtree(stage.folder / "state" / "device-2" / "blobs")
    hard = resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE, (4, hard))
    wait_for(lambda: "4 are allowed" in stage.log("coordinator"), "the coordinator to say what it lacks")
    resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE, (hard, hard))
    wait_for(lambda: "run resumed" in stage.log("coordinator"), "the run to be resumed")
    wait_for(lambda: stage.query("select 1 from results where round = 3 and kind = 'train'"), "a result of round 3")
    coordinator.kill()
    coordinator.wait()
    said = stage.log("coordinator")
    assert all(f"{file} is damaged on the coordinator's disk: it held" in said for file in damaged)

    database = stage.out / "fedvit.db"
    for file in (database, Path(f"{database}-wal")):  # the one would be mended from the other
        os.truncate(file, 6000)
    assert stage.finish(stage.coordinator(resume=True), "coordinator") == 10
    [line] = [line for line in stage.log("coordinator").splitlines() if line.startswith("coordinator: ")]
    copy = stage.out / "record.copies" / "copy-2.db"
    for step in (f"mv {database} {database}.damaged", f"rm -f {database}-wal {database}-shm", f"cp {copy} {database}"):
        assert step in line
    database.rename(f"{database}.damaged")
    for beside in ("-wal", "-shm"):
        Path(f"{database}{beside}").unlink(missing_ok=True)
    shutil.copy(copy, database)
    stage.finish_run(stage.coordinator(resume=True), devices)
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [3] * ROUNDS
    assert shown["refusals"] == []
    assert stage.query("select 1 from strikes") == []
    assert stage.model() == undisturbed
