"""Backups keep every file once, restore what they kept to the last byte, and refuse what would lose something."""

import re
import shutil
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.record.record import open_record
from coordinator.record.tables import SavedState
from coordinator.serving import backup as backup_module
from coordinator.serving.backup import BackedUpFile, BackupFolder
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import ConfigError, Damaged, DiskFull, StorageFailed
from fedvit.files import WRITING
from tests.support.codes import has_code
from tests.support.damage import forbid_folder
from tests.support.deployments import make_deployment
from tests.support.postgresql import Postgresql
from tests.support.records import add_result, make_result

GROUP, UPLOAD = b"values of a group", b"an upload of the open round"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with a closed round, whose next round is open, and a file of its results."""
    folder = tmp_path / "runs"
    fill(folder)
    return folder


def fill(folder: Path, url: str | None = None) -> None:
    """Write a run, with blobs, into a folder of runs."""
    if url:
        folder.mkdir()
        (folder / "record.url").write_text(url)
    blobs = BlobStore(folder / "r" / "blobs")
    group, upload = blobs.put(GROUP), blobs.put(UPLOAD)
    with open_record(folder) as store:
        store.runs.create("r", {"method": "fedavg", "blobs": {"url": "s3://bucket/models", "mirror": True}})
        store.runs.update("r", status="running", broker={"deployment": "elsewhere"})
        store.rounds.open("r", 1, ["pi"], 1)
        store.rounds.close("r", 1, SavedState({"all": group.digest}, None, {}), {})
        store.rounds.open("r", 2, ["pi"], 1)
        add_result(store, "pi", make_result(2, upload=upload), used_in=2)
    (folder / "r" / "model.safetensors").write_bytes(b"tensors")
    (folder / "r" / "coordinator.log").write_text("a line")
    (folder / "r" / "lock").write_text("")


def make(folder: BackupFolder, runs: Path | None, name: str, deployment: Path | None = None) -> str:
    """Make a backup under a name of its own, as if it was made at another time."""
    made = folder.make(runs, deployment)
    (folder.folder / f"{made.name}.json").rename(folder.folder / f"{name}.json")
    renamed = msgspec.structs.replace(made, name=name)
    (folder.folder / f"{name}.json").write_bytes(msgspec.json.encode(renamed))
    return name


def test_restored_runs_are_the_same(runs: Path, tmp_path: Path) -> None:
    backups, target = BackupFolder(tmp_path / "backups"), tmp_path / "new" / "runs"
    backups.make(runs, None)
    backups.restore(backups.find(None), target, None, keep_mirrors=True)
    with open_record(runs) as before, open_record(target) as after:
        assert after.runs.read("r") == before.runs.read("r")
        assert after.rounds.read_all("r") == before.rounds.read_all("r")
        assert after.tasks.read_results("r") == before.tasks.read_results("r")
    blobs = BlobStore(target / "r" / "blobs")
    assert [blobs.get(digest_of(content)) for content in (GROUP, UPLOAD)] == [GROUP, UPLOAD]
    assert (target / "r" / "model.safetensors").read_bytes() == b"tensors"
    assert not (target / "r" / "coordinator.log").exists()
    assert not (target / "r" / "lock").exists()


def test_restored_run_does_not_write_the_mirror_of_its_original(runs: Path, tmp_path: Path) -> None:
    backups = BackupFolder(tmp_path / "backups")
    made = backups.make(runs, None)
    assert made.mirrors == {"r": "s3://bucket/models"}
    backups.restore(made, tmp_path / "new", None)
    with open_record(tmp_path / "new") as store:
        assert store.runs.read("r").config["blobs"] == {"url": None, "mirror": False}


def test_second_backup_takes_space_for_what_is_new(runs: Path, tmp_path: Path) -> None:
    backups = BackupFolder(tmp_path / "backups")
    first = backups.make(runs, None)
    assert first.new_bytes == sum({file.digest: file.size for file in first.files.values()}.values())
    BlobStore(runs / "r" / "blobs").put(b"one more")
    again = backups.make(runs, None)
    assert again.new_bytes < first.files["runs/fedvit.db"].size + 100


def test_old_backups_are_removed_and_the_others_stay_whole(runs: Path, tmp_path: Path) -> None:
    backups = BackupFolder(tmp_path / "backups")
    make(backups, runs, "1")
    (runs / "r" / "model.safetensors").write_bytes(b"other tensors")
    for name in ("2", "3"):
        make(backups, runs, name)
    assert backups.keep_newest(2) == ["1"]
    assert [backup.name for backup in backups.list_all()] == ["2", "3"]
    assert not backups.blobs.has(digest_of(b"tensors"))
    backups.restore(backups.find("2"), tmp_path / "new", None)
    assert (tmp_path / "new" / "r" / "model.safetensors").read_bytes() == b"other tensors"


def test_two_backups_at_once_are_both_whole(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_of_file, copied, released = backup_module.digest_of_file, threading.Event(), threading.Event()

    def wait_once(path: Path) -> str:
        if threading.current_thread() is first and path.read_bytes() == b"tensors":
            copied.set()
            released.wait(60)
        return digest_of_file(path)

    monkeypatch.setattr(backup_module, "digest_of_file", wait_once)
    made = list[backup_module.Backup]()
    first = threading.Thread(target=lambda: made.append(BackupFolder(tmp_path / "backups").make(runs, None)))

    def make_other() -> None:
        other = BackupFolder(tmp_path / "backups")
        other.make(runs, None)
        other.keep_newest(1)

    second = threading.Thread(target=make_other)
    first.start()
    assert copied.wait(60)
    second.start()
    second.join(1)  # it waits for the first one
    released.set()
    first.join(60)
    second.join(60)
    newest = BackupFolder(tmp_path / "backups").find(None)
    assert made[0].files.keys() == newest.files.keys()
    assert "runs/r/model.safetensors" in newest.files
    BackupFolder(tmp_path / "backups").restore(newest, tmp_path / "new", None)


def test_backups_of_one_second_are_both_kept(runs: Path, tmp_path: Path) -> None:
    backups, deployment = BackupFolder(tmp_path / "backups"), make_deployment(tmp_path / "deployment")
    names = [backups.make(runs, None).name, backups.make(None, deployment.folder).name]
    assert [backup.name for backup in backups.list_all()] == names


def test_newest_backup_is_the_last_one_also_if_the_clock_went_back(runs: Path, tmp_path: Path) -> None:
    backups = BackupFolder(tmp_path / "backups")
    for name in ("20970101T000000Z", "20980101T000000Z", "mine"):
        make(backups, runs, name)
    made = backups.make(runs, None)
    assert made.name == "20980101T000001Z"
    assert made.made_at < "2097"
    assert backups.keep_newest(2) == ["20970101T000000Z", "20980101T000000Z"]


def test_full_disk_of_backups_is_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record finds no room. Nothing is left of this attempt, and of one that was killed."""
    copy = shutil.copyfileobj

    def refuse(source: Any, target: Any, size: int) -> None:
        if source.name.endswith("fedvit.db"):
            raise OSError(28, "No space left on device")
        copy(source, target, size)

    backups = BackupFolder(tmp_path / "backups")
    (backups.folder / f"{WRITING}killed").mkdir(parents=True)
    monkeypatch.setattr(shutil, "copyfileobj", refuse)
    with pytest.raises(DiskFull, match=re.escape(str(backups.folder))):
        backups.make(runs, None)
    assert [*backups.folder.glob(f"{WRITING}*")] == [*backups.folder.glob("*.json")] == []


def test_copies_need_no_other_disk(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = make_deployment(tmp_path / "deployment")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not-there"))
    made = BackupFolder(tmp_path / "backups").make(runs, deployment.folder)
    assert {"runs/fedvit.db", "deployment/registry.db"} <= made.files.keys()


def test_damaged_registry_is_named(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path / "deployment")
    (deployment.folder / "registry.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StorageFailed, match=r"registry\.db"):
        BackupFolder(tmp_path / "backups").make(None, deployment.folder)


def test_folder_of_another_user_is_left_out(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / "lost+found").mkdir()
    forbid_folder(monkeypatch, "lost+found")
    assert "runs/r/model.safetensors" in BackupFolder(tmp_path / "backups").make(runs, None).files


def test_folder_that_a_run_removes_meanwhile_is_left_out(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, keep = runs / "r" / "old", BackupFolder._keep
    old.mkdir()
    (old / "model.safetensors").write_bytes(b"tensors")

    def keep_then_remove(self: BackupFolder, path: Path, digest: str | None = None) -> BackedUpFile:
        shutil.rmtree(old, ignore_errors=True)
        return keep(self, path, digest)

    monkeypatch.setattr(BackupFolder, "_keep", keep_then_remove)
    files = BackupFolder(tmp_path / "backups").make(runs, None).files
    assert "runs/r/model.safetensors" in files
    assert "runs/r/old/model.safetensors" not in files


@pytest.mark.parametrize("name", ["run", "broker", "notes", "lock"])
def test_run_with_the_name_of_a_file_of_ours_is_kept(name: str, runs: Path, tmp_path: Path) -> None:
    (runs / "r").rename(runs / name)
    made = BackupFolder(tmp_path / "backups").make(runs, None)
    assert f"runs/{name}/model.safetensors" in made.files


def test_deployment_is_restored_while_its_registry_is_open(tmp_path: Path) -> None:
    deployment, backups = make_deployment(tmp_path / "deployment"), BackupFolder(tmp_path / "backups")
    with closing(sqlite3.connect(deployment.folder / "registry.db")) as registry:
        registry.execute("BEGIN")
        registry.execute("SELECT count(*) FROM sqlite_master").fetchone()
        made = backups.make(None, deployment.folder)
    target = tmp_path / "new"
    backups.restore(made, None, target)
    restored = type(deployment).open(target)
    assert (restored.settings, restored.publisher) == (deployment.settings, deployment.publisher)
    assert restored.fingerprint == deployment.fingerprint
    assert (target / "registry.db").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, check=has_code("FV1634", "has no runs")):
        backups.restore(made, tmp_path / "runs", None)


def test_run_that_prunes_meanwhile_is_copied_again(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the copy of blobs and that of the record a round closes: its new state is fetched afterwards."""
    blobs, keep_files = BlobStore(runs / "r" / "blobs"), BackupFolder._keep_files

    def keep_then_close(self: BackupFolder, folder: Path, root: str) -> dict[str, BackedUpFile]:
        kept = keep_files(self, folder, root)
        with open_record(runs) as store:
            number = store.rounds.read_newest_closed("r").round + 1  # type: ignore[union-attr]
            state = SavedState({"all": blobs.put(f"state {number}".encode()).digest}, None, {})
            store.rounds.close("r", number, state, {})
            store.rounds.open("r", number + 1, ["pi"], 1)
        blobs.prune(keep=set(state.groups.values()))
        return kept

    monkeypatch.setattr(BackupFolder, "_keep_files", keep_then_close)
    backups = BackupFolder(tmp_path / "backups")
    backups.restore(backups.make(runs, None), tmp_path / "new", None)
    with open_record(tmp_path / "new") as store:
        newest = store.rounds.read_newest_closed("r")
    assert newest is not None
    assert newest.state is not None
    assert (
        BlobStore(tmp_path / "new" / "r" / "blobs").get(newest.state.groups["all"]) == f"state {newest.round}".encode()
    )


def test_run_that_always_prunes_is_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(backup_module, "is_served", lambda folder: True)
    shutil.rmtree(runs / "r" / "blobs")
    backups = BackupFolder(tmp_path / "backups")
    with pytest.raises(StorageFailed, check=has_code("FV1633", "run r")):
        backups.make(runs, None, lines.append)
    assert len(lines) == backup_module.ATTEMPTS
    assert backups.list_all() == []


def test_damaged_run_is_backed_up_with_a_warning(runs: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    shutil.rmtree(runs / "r" / "blobs")
    made = BackupFolder(tmp_path / "backups").make(runs, None, lines.append)
    assert lines == ["warning: run r lacks files of its own, and could not continue: it is kept as it is"]
    assert "runs/r/model.safetensors" in made.files


def test_damaged_backup_restores_nothing(runs: Path, tmp_path: Path) -> None:
    backups, target = BackupFolder(tmp_path / "backups"), tmp_path / "new"
    made = backups.make(runs, None)
    backups.blobs.path(digest_of(b"tensors")).write_bytes(b"tensorz")
    with pytest.raises(Damaged, check=has_code("FV1635", "model.safetensors")):
        backups.restore(made, target, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backups", "runs"]


def test_backup_that_lacks_a_file_is_named(runs: Path, tmp_path: Path) -> None:
    backups = BackupFolder(tmp_path / "backups")
    made = backups.make(runs, None)
    backups.blobs.path(digest_of(b"tensors")).unlink()
    with pytest.raises(Damaged, check=has_code("FV1635", "model.safetensors")):
        backups.restore(made, tmp_path / "new", None)


def test_damaged_blob_of_a_run_is_not_kept_under_its_digest(runs: Path, tmp_path: Path) -> None:
    BlobStore(runs / "r" / "blobs").path(digest_of(GROUP)).write_bytes(b"values of a grouq")
    backups, lines = BackupFolder(tmp_path / "backups"), list[str]()
    backups.make(runs, None, lines.append)
    assert not backups.blobs.has(digest_of(GROUP))
    assert len(lines) == 1


@pytest.mark.parametrize("path", ["runs/../../outside", "runs//etc/outside"])
def test_backup_writes_nothing_outside_of_its_folder(runs: Path, tmp_path: Path, path: str) -> None:
    backups = BackupFolder(tmp_path / "backups")
    made = backups.make(runs, None)
    hostile = msgspec.structs.replace(made, files={path: made.files["runs/r/model.safetensors"]})
    with pytest.raises(Damaged, check=has_code("FV1635", "leaves its folder")):
        backups.restore(hostile, tmp_path / "new", None)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"v": 9, "name": "1", "made_at": "", "software": "9", "files": {}}']
)
def test_unreadable_backups_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1.json").write_bytes(content)
    with pytest.raises(ConfigError, check=has_code("FV1632", "1.json")):
        BackupFolder(tmp_path).find(None)


def test_missing_backups_and_used_folders_are_named(runs: Path, tmp_path: Path) -> None:
    backups = BackupFolder(tmp_path / "backups")
    with pytest.raises(ConfigError, check=has_code("FV1631", "there is no backup in")):
        backups.find(None)
    made = backups.make(runs, None)
    with pytest.raises(ConfigError, check=has_code("FV1631", made.name)):
        backups.find("yesterday")
    with pytest.raises(ConfigError, check=has_code("FV1634", str(runs))):
        backups.restore(made, runs, None)
    with pytest.raises(ConfigError, check=has_code("FV1601")):
        backups.make(tmp_path / "nothing", None)


def test_record_moves_from_and_to_postgresql(tmp_path: Path, postgresql: Postgresql) -> None:
    """A backup holds a file, whatever the record was in, and can be restored into another empty database."""
    fill(tmp_path / "runs", postgresql.schema())
    backups = BackupFolder(tmp_path / "backups")
    made = backups.make(tmp_path / "runs", None)
    assert "runs/record.url" not in made.files
    url = postgresql.schema()
    backups.restore(made, tmp_path / "file", None, keep_mirrors=True)
    backups.restore(made, tmp_path / "database", None, url=url, keep_mirrors=True)
    found: list[Any] = []
    for folder in ("runs", "file", "database"):
        with open_record(tmp_path / folder) as store:
            found.append((store.runs.read("r"), store.rounds.read_all("r"), store.tasks.read_results("r")))
    assert found[0] == found[1] == found[2]
    assert not list((tmp_path / "database").glob("fedvit.db*"))
    with pytest.raises(ConfigError, check=has_code("FV1634", "has runs already")):
        backups.restore(made, tmp_path / "again", None, url=url)
