"""Files of a coordinator that are damaged while it runs: the tensors are those of a calm run, or it says what to do."""

import os
import shutil
import sqlite3
import subprocess
import sys
from binascii import a2b_base64
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import fedvit.blobs
from coordinator.cli import cli
from coordinator.compute.integrity import DamagedBlob, VerifiedBlobs
from coordinator.record.copies import is_whole
from coordinator.record.database import Database
from coordinator.record.record import open_record
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore
from fedvit.errors import Damaged
from fedvit.tensors import Tensors
from fedvit.wire.messages import Manifest, Task
from tests.support.codes import has_code
from tests.support.damage import flip
from tests.support.runs import Configure, Fake, Stage, by_round

pytestmark = pytest.mark.usefixtures("known")

ROUNDS = 3


def fetching(device: Fake, task: Task) -> None:
    """Answer as `by_round` when everything that the task describes was fetched; or say why it could not be."""
    missing = {manifest.digest for manifest in task.blobs}

    def finished(manifest: Manifest, error: Exception | None) -> None:
        missing.discard(manifest.digest)
        if error:
            device.fail(task, str(error))
        elif not missing:
            by_round(device, task)

    for manifest in task.blobs:
        topic = device.topics.broadcast(manifest.digest)
        device.exchange.fetch(manifest, "coordinator", topic, finished)


def until_round_two(device: Fake, task: Task) -> None:
    if task.round == 1:
        by_round(device, task)


class Scene:
    """Devices a and b; in round 2 of 3 the result of a is in and b has not begun."""

    def __init__(self, stage: Stage, **settings: object) -> None:
        self.stage = stage
        self.settings = {"devices": 2, "rounds": ROUNDS, **settings}
        self.a = stage.fake("a", by_round, samples=30)
        self.b = stage.fake("b", until_round_two, samples=40)

    def begin(self) -> "Scene":
        self.stage.start(**self.settings)  # type: ignore[arg-type]
        self.stage.drive(lambda: self.b.tasks() == [1, 2] and self.stage.accepted(2) == ["a"])
        return self

    def end(self) -> Tensors:
        """b does what it was asked for, and everything after it; its blobs have to come from the coordinator."""
        self.b.on_task = fetching
        fetching(self.b, [task for task in self.b.got(Task) if task.kind == "train"][-1])
        assert self.stage.finish() == "finished"
        return self.stage.model()

    def resume(self) -> None:
        self.stage.start(resume=True, **self.settings)  # type: ignore[arg-type]

    def blob(self, digest: str | None) -> Path:
        return BlobStore(self.stage.out / "r" / "blobs").path(digest or "")

    def log(self) -> str:
        return "\n".join(self.stage.lines)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, configure: Configure, graph_cache: Path) -> Callable[[str], Tensors]:
    """The tensors of a run to which nothing happened, by method."""
    made: dict[str, Tensors] = {}

    def run(method: str) -> Tensors:
        if method not in made:
            stage = Stage(tmp_path_factory.mktemp("calm"), configure, graph_cache)
            stage.fake("a", by_round, samples=30)
            stage.fake("b", by_round, samples=40)
            stage.start(method=method, devices=2, rounds=ROUNDS)
            assert stage.finish() == "finished"
            made[method] = stage.model()
            stage.stop()
        return made[method]

    return run


def assert_equal(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    assert [name for name, value in want.items() if value.tobytes() != got[name].tobytes()] == []


KINDS: dict[str, tuple[str, Callable[[Scene], str | None], str]] = {
    "program": ("fedavg", lambda scene: scene.a.got(Task)[0].program, "the run's program"),
    "graph": (
        "fedavg",
        lambda scene: scene.stage.program(scene.a.got(Task)[0]).graphs["train"].digest,
        "graph 'train'",
    ),
    "first values": (
        "eftvit",
        lambda scene: scene.stage.program(scene.a.got(Task)[0]).groups["local"].initial,
        "initial values of tensors that devices keep",
    ),
    "state": ("fedavg", lambda scene: saved(scene).groups["model"], "group 'model' of the state after round 1"),
    "memory": ("eftvit", lambda scene: saved(scene).memory, "the memory of the server's rule after round 1"),
    "generator": ("generated", lambda scene: saved(scene).memory, "the memory of the server's rule after round 1"),
    "made for one device": (
        "generated",
        lambda scene: [task for task in scene.b.got(Task) if task.kind == "train"][-1].groups["bias"],
        "a file that devices fetch",
    ),
    "upload": (
        "fedavg",
        lambda scene: scene.stage.store.tasks.read_results("r", 2, "train")[0].upload,
        "the upload of a for round 2",
    ),
}
"""What is damaged: in a run of which method, which blob, and what is said of it."""


def saved(scene: Scene) -> SavedState:
    state = scene.stage.store.rounds.read_all("r")[0].state
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("kind", "restarted"),
    [
        *((kind, False) for kind in KINDS),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in ("graph", "memory", "upload")),
    ],
)
def test_a_damaged_blob_changes_no_tensor(
    stage: Stage, calm: Callable[[str], Tensors], kind: str, restarted: bool
) -> None:
    """It is named, made anew or asked for again, and no device is to blame."""
    method, which, held = KINDS[kind]
    scene = Scene(stage, method=method).begin()
    file = scene.blob(which(scene))
    if restarted:
        stage.stop()
        flip(file, keep_date=False)
        scene.resume()
        stage.drive(lambda: scene.b.tasks() == [1, 2, 2])
    else:
        flip(file, keep_date=False)
    assert_equal(scene.end(), calm(method))
    assert any(str(file) in line and held in line and "damaged" in line for line in stage.lines), stage.lines
    assert stage.store.strikes.read_all("r") == []
    assert stage.refusals("b") == []
    assert scene.a.tasks() == ([1, 2, 2, 3] if kind == "upload" else [1, 2, 3])
    about_a = stage.refusals("a")
    assert len(about_a) == (kind == "upload")
    assert all("damaged on the coordinator's disk" in reason for reason in about_a)
    assert [entry.cohort for entry in stage.store.rounds.read_all("r")] == [["a", "b"]] * ROUNDS


def test_without_a_damaged_patch_devices_get_the_whole_value(stage: Stage, calm: Callable[[str], Tensors]) -> None:
    scene = Scene(stage, method="eftvit", updates={"down": "int8"}).begin()
    [link, *_] = [link for reference in saved(scene).references.values() for link in reference.links]
    flip(scene.blob(link.patch), keep_date=False)
    stage.stop()
    scene.resume()
    stage.drive(lambda: scene.b.tasks() == [1, 2, 2])
    told = [task for task in scene.b.got(Task) if task.kind == "train"]
    before, after = ({delta_step.patch.digest for delta_step in task.recipes} for task in told[1:])
    assert before - after == {link.patch}
    assert_equal(scene.end(), calm("eftvit"))
    assert stage.refusals("a") == stage.refusals("b") == []


def test_damage_that_only_a_receiver_sees_is_not_charged_to_it(
    stage: Stage, calm: Callable[[str], Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the size and dates of before. The device finds a wrong digest until it gives up; it is asked again,
    and its report has the file looked at."""
    monkeypatch.setattr("fedvit.transport.blob_receiver.MAX_RESTARTS", 0)
    scene = Scene(stage).begin()
    file = scene.blob(next(iter(stage.program(scene.a.got(Task)[0]).graphs.values())).digest)
    flip(file)
    assert_equal(scene.end(), calm("fedavg"))
    assert any(str(file) in line and "damaged" in line for line in stage.lines)
    assert stage.refusals("b") == stage.refusals("a") == []
    assert stage.store.strikes.read_all("r") == []


def test_a_device_whose_own_disk_fails_is_not_excused(stage: Stage) -> None:
    """It names a blob that is whole here."""

    def complain(device: Fake, task: Task) -> None:
        device.fail(task, f"blob of 5 bytes has digest blake3:0, expected {task.program}")

    stage.fake("a", by_round)
    stage.fake("b", complain)
    stage.start(devices=2)
    assert stage.finish() == "finished"
    assert [reason.startswith("train: blob of 5 bytes") for reason in stage.refusals("b")] == [True]


def test_features_of_an_earlier_round_that_are_damaged_are_left_out_and_named(stage: Stage) -> None:
    """Device b is not asked in round 2, where the server would have trained on what it brought in round 1."""
    stage.fake("a", by_round)
    b = stage.fake("b", by_round)
    scene = stage
    a = stage.fakes[0]
    a.on_task = until_round_two
    scene.start(method="eftvit", devices=2, rounds=2, evaluate_every=9)
    scene.drive(lambda: a.tasks() == [1, 2] and scene.accepted(2) == ["b"])
    state = scene.store.rounds.read_all("r")[0].state
    assert state is not None
    scene.stop()
    flip(BlobStore(scene.out / "r" / "blobs").path(state.uploads["b"]), keep_date=False)
    with sqlite3.connect(scene.out / "fedvit.db") as database:  # as if only a had been drawn
        database.execute("DELETE FROM results WHERE round = 2")
        database.execute("UPDATE rounds SET cohort = '[\"a\"]', needed = 1, seal = NULL WHERE round = 2")
    database.close()
    for note in (scene.out / "r" / "notes").glob("since-1.notes"):
        note.unlink()
    a.on_task = by_round
    scene.start(method="eftvit", resume=True, devices=2, rounds=2, evaluate_every=9)
    assert scene.finish() == "finished"
    assert b.tasks() == [1, 2]
    [refusal] = scene.refusals("b")
    assert "its upload of an earlier round is damaged on the coordinator's disk" in refusal
    assert scene.store.rounds.read_all("r")[1].figures["stored_devices"] == 1.0
    assert scene.store.strikes.read_all("r") == []


def test_a_state_that_cannot_be_made_anew_stops_the_run(stage: Stage, calm: Callable[[str], Tensors]) -> None:
    """Without copies of the record nothing older is kept. With the file put back the run goes on."""
    scene = Scene(stage, backup_every=0)
    scene.b.on_task = lambda device, task: None if task.round == 3 else by_round(device, task)
    stage.start(**scene.settings)  # type: ignore[arg-type]
    stage.drive(lambda: scene.b.tasks() == [1, 2, 3] and stage.accepted(3) == ["a"])
    state = stage.store.rounds.read_all("r")[1].state
    assert state is not None
    file = scene.blob(state.groups["model"])
    whole = file.read_bytes()
    stage.stop()
    flip(file, keep_date=False)
    scene.resume()
    ended = stage.finish()
    assert isinstance(ended, Damaged)
    for said in (str(file), "run r", "group 'model' of the state after round 2", "--resume r", "--start-from"):
        assert said in str(ended)
    assert stage.refusals("a") == stage.refusals("b") == []
    stage.stop()
    file.write_bytes(whole)
    scene.b.on_task = by_round
    scene.resume()
    assert stage.finish() == "finished"
    assert_equal(stage.model(), calm("fedavg"))


def test_a_run_does_not_begin_from_a_damaged_one(stage: Stage, configure: Configure) -> None:
    stage.fake("a", by_round)
    stage.start()
    assert stage.finish() == "finished"
    state = stage.store.rounds.read_all("r")[0].state
    assert state is not None
    file = BlobStore(stage.out / "r" / "blobs").path(state.groups["model"])
    stage.stop()
    flip(file, keep_date=False)
    with open_record(stage.out) as store:
        store.runs.create("next", {})
    stage.start(run="next", start_from="r")
    ended = stage.finish()
    assert isinstance(ended, Damaged)
    assert "start_from = 'r'" in str(ended)
    assert str(file) in str(ended)


# --- the store of blobs -------------------------------------------------------------------------------


def test_sound_blobs_give_no_damaged_one(tmp_path: Path) -> None:
    """Not by any way; and to put it again mends it, also among others."""
    blobs = VerifiedBlobs(tmp_path)
    content = bytes(range(200))
    digest = blobs.put(content).digest
    assert blobs.get(digest) == content
    flip(blobs.path(digest), keep_date=False)
    for ask in (blobs.get, blobs.manifest, blobs.check, lambda digest: blobs.small([digest], 1000)):
        with pytest.raises(DamagedBlob, check=has_code("FV1704")) as caught:
            ask(digest)
        assert caught.value.digest == digest
    assert not blobs.has(digest)
    assert blobs.found() == [digest]
    assert blobs.found() == []
    blobs.put(content)
    assert blobs.get(digest) == content
    flip(blobs.path(digest), keep_date=False)
    with blobs.commit_together() as batched_commit:
        batched_commit.put(content)
    assert blobs.manifest(digest).size == 200
    blobs.path(digest).unlink()
    with pytest.raises(DamagedBlob):
        blobs.get(digest)


def test_a_blob_is_read_once_until_its_file_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = VerifiedBlobs(tmp_path)
    digest = blobs.put(b"content").digest
    read = []
    whole = fedvit.blobs.is_whole
    monkeypatch.setattr(fedvit.blobs, "is_whole", lambda path, name: read.append(name) or whole(path, name))
    for _ in range(3):
        assert blobs.is_intact(digest)
    assert len(read) == 1
    os.utime(blobs.path(digest), ns=(1, 1))
    assert blobs.is_intact(digest)
    assert blobs.is_intact(digest, anew=True)
    assert len(read) == 3


# --- the record ---------------------------------------------------------------------------------------


def put_back(out: Path, copy: Path) -> None:
    """What the error says."""
    database = out / "fedvit.db"
    database.rename(out / "fedvit.db.damaged")
    for name in ("fedvit.db-wal", "fedvit.db-shm"):
        (out / name).unlink(missing_ok=True)
    shutil.copy(copy, database)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "no database", "journal"])
def test_a_damaged_record_is_named_with_its_newest_good_copy(
    stage: Stage, calm: Callable[[str], Tensors], damage: str
) -> None:
    """Every command says which file it is, which copy is good and how to put it back; after that the run goes on, and
    nobody is asked again for what was accepted since the copy was made."""
    scene = Scene(stage, method="eftvit").begin()
    stage.stop()
    database, copy = stage.out / "fedvit.db", stage.out / "record.copies" / "copy-1.db"
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if damage == "journal":  # all that was in it is gone, and what is left is a database as it was before
        database.unlink()
        Database(f"sqlite:///{stage.folder / 'before'}").close()
        (stage.folder / "before").rename(database)
    elif damage == "flipped":
        content = database.read_bytes()
        place = content.index(b'"method":"eftvit"') + 11
        database.write_bytes(content[:place] + bytes([content[place] ^ 0x20]) + content[place + 1 :])
    elif damage == "cut":
        os.truncate(database, 5000)
    else:
        database.write_bytes(b"" if damage == "empty" else b"no database" * 1000)
    commands = [
        ["runs", "--runs"], ["show", "r", "--runs"], ["status", "r", "--runs"], ["report", "r", "--runs"],
        ["start", "--resume", "r", "--runs"],
    ]  # fmt: skip
    for command in commands:
        ended = CliRunner().invoke(cli, [*command, str(stage.out)], standalone_mode=False).exception
        assert isinstance(ended, Damaged), (command, ended)
        for said in (f"{database} is damaged", f"cp {copy} {database}", "--resume r"):
            assert said in str(ended)
    put_back(stage.out, copy)
    scene.resume()
    stage.drive(lambda: scene.b.tasks() == [1, 2, 2])
    assert_equal(scene.end(), calm("eftvit"))
    assert scene.a.tasks() == [1, 2, 3], "its result of round 2 came after the copy was made, and is there"


def test_a_record_that_is_damaged_under_a_running_coordinator_stops_it_or_nothing(
    stage: Stage, calm: Callable[[str], Tensors]
) -> None:
    """What SQLite has in memory may do; other numbers never come of it."""
    scene = Scene(stage).begin()
    database = stage.out / "fedvit.db"
    with open(database, "r+b") as opened:
        opened.seek(4096)
        opened.write(b"?" * (database.stat().st_size - 4096))
    os.truncate(f"{database}-wal", 5000)
    scene.b.on_task = by_round
    by_round(scene.b, [task for task in scene.b.got(Task) if task.kind == "train"][-1])
    ended = stage.finish()
    if ended == "finished":
        assert_equal(stage.model(), calm("fedavg"))
    else:
        assert isinstance(ended, Damaged)
        assert f"cp {stage.out / 'record.copies' / 'copy-1.db'} {database}" in str(ended)
    assert stage.coordinator is not None
    stage.store.close()
    stage.coordinator = None


def test_older_copy_of_the_record_continues_with_the_same_numbers(stage: Stage, calm: Callable[[str], Tensors]) -> None:
    """Of two rounds ago: they are closed again, from the results that were accepted then and in the open one."""
    scene = Scene(stage, method="eftvit")
    scene.b.on_task = lambda device, task: None if task.round == 3 else by_round(device, task)
    stage.start(**scene.settings)  # type: ignore[arg-type]
    stage.drive(lambda: scene.b.tasks() == [1, 2, 3] and stage.accepted(3) == ["a"])
    stage.stop()
    copies = stage.out / "record.copies"
    assert sorted(file.name for file in copies.glob("*.db")) == ["copy-1.db", "copy-2.db"]
    database = stage.out / "fedvit.db"
    os.truncate(database, 3000)
    with closing(sqlite3.connect(copies / "copy-2.db")) as copy, copy:
        copy.execute("UPDATE rounds SET figures = replace(figures, '1', '2')")
    with pytest.raises(Damaged, check=has_code("FV1621")):
        open_record(stage.out)
    put_back(stage.out, copies / "copy-1.db")
    scene.b.on_task = by_round
    scene.resume()
    assert stage.finish() == "finished"
    assert_equal(stage.model(), calm("eftvit"))
    assert scene.a.tasks() == [1, 2, 3]
    assert all(map(is_whole, copies.glob("*.db"))), "newer copies replace the damaged one"


def test_a_record_that_lost_a_round_is_not_gone_on_with(stage: Stage) -> None:
    """What stood in a damaged journal is gone, and SQLite says nothing: the copies know more than the record."""
    scene = Scene(stage)
    scene.b.on_task = lambda device, task: None if task.round == 3 else by_round(device, task)
    stage.start(**scene.settings)  # type: ignore[arg-type]
    stage.drive(lambda: scene.b.tasks() == [1, 2, 3])
    stage.stop()
    copies = stage.out / "record.copies"
    put_back(stage.out, copies / "copy-1.db")
    scene.resume()
    ended = stage.finish()
    assert isinstance(ended, Damaged)
    assert "it has 1 closed rounds" in str(ended)
    assert f"cp {copies / 'copy-2.db'}" in str(ended)


def test_a_damaged_note_of_results_has_them_asked_again(stage: Stage, calm: Callable[[str], Tensors]) -> None:
    """The record is lost, and so is what was accepted since its copy: a is asked again, which is said."""
    scene = Scene(stage).begin()
    stage.stop()
    copies = stage.out / "record.copies"
    note = stage.out / "r" / "notes" / "since-1.notes"
    *others, last = note.read_bytes().splitlines(keepends=True)
    note.write_bytes(b"".join([*others, last[:50], bytes([last[50] ^ 0x20]), last[51:]]))
    put_back(stage.out, copies / "copy-1.db")
    scene.resume()
    stage.drive(lambda: scene.b.tasks() == [1, 2, 2])
    assert_equal(scene.end(), calm("fedavg"))
    assert any(str(note) in line and "damaged" in line for line in stage.lines)
    assert scene.a.tasks() == [1, 2, 2, 3]


def test_a_damaged_note_of_the_newest_state_has_its_round_closed_again(
    stage: Stage, calm: Callable[[str], Tensors]
) -> None:
    """The record is lost, and of round 2 only the results are noted: the state before and the uploads are there."""
    scene = Scene(stage)
    scene.b.on_task = lambda device, task: None if task.round == 3 else by_round(device, task)
    stage.start(**scene.settings)  # type: ignore[arg-type]
    stage.drive(lambda: scene.b.tasks() == [1, 2, 3] and stage.accepted(3) == ["a"])
    stage.stop()
    copies = stage.out / "record.copies"
    note = stage.out / "r" / "notes" / "since-1.notes"
    lines = note.read_bytes().splitlines(keepends=True)
    assert b"figures" in a2b_base64(lines[-1])
    note.write_bytes(b"".join(lines[:-1]) + lines[-1][:60])
    (copies / "copy-2.db").unlink()
    put_back(stage.out, copies / "copy-1.db")
    scene.b.on_task = by_round
    scene.resume()
    assert stage.finish() == "finished"
    assert_equal(stage.model(), calm("fedavg"))
    assert scene.a.tasks() == [1, 2, 3]


def test_a_record_is_read_as_a_whole_before_a_task_is_given(stage: Stage) -> None:
    """A part that nothing asks for is damaged: the coordinator says so while it waits for devices."""
    Scene(stage).begin()
    stage.stop()
    database = stage.out / "fedvit.db"
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        [(page,)] = opened.execute("SELECT rootpage FROM sqlite_master WHERE name = 'strikes_by_device'").fetchall()
        [(size,)] = opened.execute("PRAGMA page_size").fetchall()
    with open(database, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\x0a\x00\x00\x00\x63")  # an index page of 99 entries
    command = [
        sys.executable,
        "-c",
        "from coordinator.cli import main; main()",
        "start",
        "--resume",
        "r",
        "--broker.port",
        "0",
    ]
    ended = subprocess.run([*command, "--runs", str(stage.out)], capture_output=True, text=True, check=False)
    assert ended.returncode == 10, ended.stderr
    assert f"{database} is damaged" in ended.stderr
    assert "waiting for 2 devices" in ended.stderr


def test_no_flipped_byte_of_a_record_goes_unnoticed(stage: Stage) -> None:
    """Wherever it is: what is read is what was written, or the file is named."""
    Scene(stage).begin()
    stage.stop()
    database = stage.out / "fedvit.db"
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = database.read_bytes()

    def read(folder: Path) -> object:
        with open_record(folder) as store:
            return (
                store.runs.read_all(),
                store.rounds.read_all("r"),
                store.tasks.read_results("r"),
                store.strikes.read_all("r"),
                store.strikes.read_quarantines("r"),
            )

    want, said = read(stage.out), list[str]()
    draw = np.random.default_rng(7)
    used = [place for place in range(len(content)) if content[place]]
    for number, place in enumerate(draw.choice(used, 100, replace=False)):
        folder = stage.folder / f"flipped-{number}"
        folder.mkdir()
        flipped = bytes([content[place] ^ (1 << int(draw.integers(8)))])
        (folder / "fedvit.db").write_bytes(content[:place] + flipped + content[place + 1 :])
        try:
            got = read(folder)
        except Damaged as error:
            said.append(str(error))
        else:
            assert got == want, place
    assert len(said) > 20
    assert all("fedvit.db is damaged: " in text for text in said)


def test_a_copy_of_the_record_is_one_of_the_last_two(stage: Stage) -> None:
    stage.fake("a", by_round)
    stage.start(rounds=5, backup_every=2)
    assert stage.finish() == "finished"
    copies = stage.out / "record.copies"
    assert sorted(file.name for file in copies.glob("*.db*")) == ["copy-1.db", "copy-2.db"]
    assert all(map(is_whole, copies.glob("*.db")))
    assert {file.name for file in (stage.out / "r" / "notes").iterdir()} == {"since-2.notes", "since-4.notes"}
    assert list(copies.glob(".*")) == []
