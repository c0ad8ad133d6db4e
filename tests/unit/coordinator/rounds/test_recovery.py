"""Damaged files of a run are not sent, excuse the devices that got them, and end the run when nothing helps."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.compute.integrity import DamagedBlob, VerifiedBlobs
from coordinator.config import BlobsConfig
from coordinator.rounds.object_store import ObjectStore
from coordinator.rounds.preparation import fetch_mirrored
from coordinator.rounds.recovery import DAMAGES
from coordinator.rounds.tasks import TaskState
from fedvit.errors import Damaged
from fedvit.wire.messages import Failed
from tests.support.codes import has_code
from tests.support.damage import flip
from tests.support.parts import Parts


@pytest.fixture
def weights(parts: Parts) -> str:
    """The blob with the tensors of a task that `pi` has."""
    parts.arrive("pi")
    parts.open("pi")
    return parts.work.planned.groups["model"]


def damage(parts: Parts, digest: str) -> None:
    flip(parts.state.blobs.path(digest), keep_date=False)


def test_recovery_lets_whole_blobs_be_sent(parts: Parts, weights: str) -> None:
    assert parts.recovery.can_serve("pi", weights)
    damage(parts, weights)
    with pytest.raises(DamagedBlob):
        parts.recovery.can_serve("pi", weights)
    assert parts.recovery.can_serve("other", weights), "it may not read it: the exchange says so"


def test_recovery_lets_devices_wait_while_it_lasts(parts: Parts, weights: str) -> None:
    damage(parts, weights)
    with pytest.raises(DamagedBlob) as found:
        parts.state.blobs.check(weights)
    parts.recovery.begin(found.value)
    assert parts.recovery.restoring
    assert not parts.recovery.can_serve("pi", weights)
    [line] = [line for line in parts.lines if "is damaged on the coordinator's disk" in line]
    assert str(parts.state.blobs.path(weights)) in line


def test_recovery_ends_the_run_where_a_file_is_damaged_again_and_again(parts: Parts, weights: str) -> None:
    error = DamagedBlob(weights, parts.state.blobs.path(weights))
    for _ in range(DAMAGES):
        parts.recovery.begin(error)
    with pytest.raises(Damaged, match=rf"it was damaged {DAMAGES} times.*coordinator start --resume r"):
        parts.recovery.begin(error)


def test_recovery_excuses_a_device_once_for_a_blob_that_was_damaged_here(parts: Parts, weights: str) -> None:
    failed = Failed("r", 1, "train", f"blob {weights} was damaged")
    assert not parts.recovery.is_excused("pi", failed), "the blob is whole"
    damage(parts, weights)
    with pytest.raises(DamagedBlob) as found:
        parts.recovery.is_excused("pi", failed)
    parts.recovery.begin(found.value)
    assert parts.recovery.is_excused("pi", failed)
    assert not parts.recovery.is_excused("pi", failed)
    assert not parts.recovery.is_excused("pi", Failed("r", 1, "train", "out of memory"))


def test_recovery_asks_again_for_an_upload_that_was_damaged_here(parts: Parts, weights: str) -> None:
    """Without a strike, and not for ever."""
    result = parts.result()
    assert result.upload is not None
    parts.collector.on_result("pi", result)
    parts.collector.commit(now=True)
    stored = parts.state.store.tasks.read_results("r")
    assert parts.recovery.damaged_of(stored) == []
    damage(parts, result.upload.digest)
    assert parts.recovery.damaged_of(stored) == stored
    parts.recovery.ask_again_for(stored, 1)
    assert parts.state.store.tasks.read_results("r") == []
    assert parts.state.store.strikes.read_all("r") == []
    [refusal] = parts.refusals("pi")
    assert refusal.endswith("it is asked again")
    with pytest.raises(Damaged, check=has_code("FV1621")):
        parts.recovery.ask_again_for(stored, DAMAGES + 1)


def test_recovery_keeps_the_blobs_of_current_tasks(parts: Parts, weights: str) -> None:
    assert parts.recovery.still_needed(1) >= parts.work.offered()


def test_recovery_keeps_an_upload_that_is_being_checked(parts: Parts, weights: str) -> None:
    """Its round may close meanwhile."""
    task, result = parts.task("pi"), parts.result()
    assert result.upload is not None
    task.result = result
    task.to(TaskState.UPLOADING)
    assert parts.recovery.still_needed(1) >= {result.upload.digest, weights}


def test_files_of_the_run_that_it_starts_from_come_from_its_mirror(tmp_path: Path) -> None:
    """That run was served on another machine."""
    (tmp_path / "mirror").mkdir()
    blobs: dict[str, Any] = {"url": f"file://{tmp_path}/mirror", "mirror": True}
    earlier = ObjectStore(BlobsConfig(**blobs), "monday", VerifiedBlobs(tmp_path / "elsewhere"))
    state = earlier.blobs.put(b"a state").digest
    earlier.mirror.put([state])
    earlier.close()
    parts = Parts(tmp_path / "runs", start_from="monday")
    parts.state.store.runs.create("monday", {"method": "fedavg", "blobs": blobs})
    fetch_mirrored(parts)
    parts.close()
    assert VerifiedBlobs(tmp_path / "runs" / "monday" / "blobs").get(state) == b"a state"
