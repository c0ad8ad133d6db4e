"""A device whose disk is full, and one whose disk becomes read-only, on a real ext4. Root runs it: make power-cuts."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.ext4 import CutDisk, run
from tests.support.programs import CONFIG, DEVICES, Stage, wait_for

pytestmark = pytest.mark.timeout(3600)

NAME = DEVICES[0]
VALUES = {**CONFIG, "rounds": 15, "devices": len(DEVICES), "deadline_s": 600.0, "rejoin_grace_s": 5.0}
BLOCK = bytes(1 << 20)


@pytest.fixture
def disk(stage: Stage, tmp_path: Path) -> Iterator[CutDisk]:
    """The disk of the first device; the others have another."""
    disk = CutDisk(tmp_path / "disk.img", stage.folder / "state" / NAME, seed=1, size_mb=64)
    yield disk
    stage.close()
    disk.unmount()


def wait_for_result(stage: Stage, after: int = 0) -> None:
    result = f"select 1 from results where device = '{NAME}' and kind = 'train' and round > {after}"
    wait_for(lambda: stage.query(result), "a result of the device")


def wait_for_reason(stage: Stage, words: str) -> int:
    """Wait until the device cannot train, for a reason with these words; return the round."""
    refused = f"select round, reason from refusals where device = '{NAME}' and reason like '%{words}%'"
    [(number, reason), *_] = wait_for(lambda: stage.query(refused), words)
    print(reason)
    return int(number)


def test_full_disk(stage: Stage, disk: CutDisk) -> None:
    """It says why, the others go on, and it takes part again by itself once there is room."""
    coordinator = stage.coordinator(values=VALUES)
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for_result(stage)
    filler = disk.folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(BLOCK)
    missed = wait_for_reason(stage, "no space left")
    filler.unlink()
    wait_for_result(stage, missed)
    stage.finish_run(coordinator, devices)


def test_disk_that_became_read_only(stage: Stage, disk: CutDisk) -> None:
    """Like a worn card. The device says why, and others go on; after a check of the disk it takes part again."""
    run("mount", "-o", "remount,errors=remount-ro", str(disk.folder))
    source = subprocess.run(["findmnt", "-no", "SOURCE", disk.folder], capture_output=True, text=True, check=True)
    coordinator = stage.coordinator(values=VALUES)
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for_result(stage)
    Path("/sys/fs/ext4", Path(source.stdout.strip()).name, "trigger_fs_error").write_text("1")
    missed = wait_for_reason(stage, "read-only")
    devices[NAME].kill()
    devices[NAME].wait()
    disk.unmount()
    checked = subprocess.run(["e2fsck", "-p", str(disk.file)], capture_output=True, text=True, check=False)
    assert checked.returncode in (0, 1), checked.stdout  # 1: it had errors, and has none now
    disk.mount()
    devices[NAME] = stage.device(NAME)
    wait_for_result(stage, missed)
    stage.finish_run(coordinator, devices)
