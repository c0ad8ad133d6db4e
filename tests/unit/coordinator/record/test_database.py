"""The database of a record: what was written is there after any end of the process, in SQLite or PostgreSQL."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.record.backups import Backups, Struck
from coordinator.record.database import Database, use_database
from coordinator.record.record import Record, open_record
from coordinator.record.tables import RefusalRecord, SavedState
from coordinator.security.broker.process import claim_port
from fedvit.errors import ConfigError, DatabaseGone, StorageFailed
from tests.support.postgresql import PASSWORD, Postgresql
from tests.support.records import CONFIG
from tests.support.waiting import WAIT_S

WRITER = """
# Write round after round, saying each call that has returned, until killed.
import pathlib, sys
from coordinator.record.record import Record, open_record
from coordinator.record.tables import SavedState
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result

store = open_record(pathlib.Path(sys.argv[1]))
store.runs.create("r", {"method": "fedavg"})
for number in range(1, 1_000_000):
    store.rounds.open("r", number, ["a", "b"])
    print("open", number, flush=True)
    for device in ("a", "b"):
        store.tasks.add_results([(device, Result("r", number, "train", number, {"loss": 0.5}, ResourceUse()), None)])
        print("result", number, flush=True)
    store.rounds.close("r", number, SavedState({"g": f"state {number}"}, None, {}), {"took": number})
    print("close", number, flush=True)
"""


def test_two_processes_may_read_and_write(store: Record) -> None:
    """`coordinator show` while a run is going."""
    assert store.database.folder
    with open_record(store.database.folder) as reader:
        assert reader.runs.read_all()[0].id == "r"
        store.rounds.open("r", 1, ["a"])
        assert [record.round for record in reader.rounds.read_all("r")] == [1]
        reader.devices.add_refusal("r", RefusalRecord(1, "a", "train", "late"))
        assert len(store.devices.read_refusals("r")) == 1


@pytest.mark.parametrize("content", [b"this is no database, but it is quite a bit of text" * 50, b"short"])
def test_a_file_that_is_no_database_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fedvit.db").write_bytes(content)
    with pytest.raises(StorageFailed):
        open_record(tmp_path)
    assert (tmp_path / "fedvit.db").read_bytes() == content


def test_what_stands_in_the_place_of_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fedvit.db").mkdir()
    with pytest.raises(StorageFailed):
        open_record(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError):
        open_record(tmp_path / "runs")


def test_a_tables_loss_is_named(store: Record) -> None:
    with store.database._engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE results")
    with pytest.raises(StorageFailed):
        store.tasks.read_results("r")


def test_what_a_killed_process_had_written_is_there(tmp_path: Path) -> None:
    """kill -9 after some hundred calls: every call that had returned is in the record, and at most one more."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        lines = [writer.stdout.readline() for _ in range(151)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()  # communicate() would lose what was read ahead
    writer.wait(timeout=WAIT_S)
    said = [line.split() for line in lines if line.endswith("\n")]
    assert len(said) >= 151
    store = open_record(tmp_path)
    rounds, results = store.rounds.read_all("r"), store.tasks.read_results("r")
    written = {
        "open": len(rounds),
        "result": len(results),
        "close": sum(record.closed_at is not None for record in rounds),
    }
    counts = {kind: sum(word == kind for word, _ in said) for kind in written}
    assert all(0 <= written[kind] - counts[kind] <= 1 for kind in written), (written, counts)
    assert sum(written.values()) - sum(counts.values()) <= 1
    for record in rounds[:-1]:
        assert record.state == SavedState({"g": f"state {record.round}"}, None, {})
        assert [entry.samples for entry in results if entry.round == record.round] == [record.round] * 2
    store.rounds.open("r", len(rounds) + 1, ["a"])
    store.close()


def test_two_processes_may_make_the_tables_at_the_same_time(tmp_path: Path, postgresql: Postgresql) -> None:
    url = postgresql.schema()
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: Record(Database(url)), range(4)))
    assert [store.runs.read_all() for store in made] == [[]] * 4


def test_record_in_postgresql_needs_no_copies(tmp_path: Path, postgresql: Postgresql) -> None:
    use_database(tmp_path, postgresql.schema())
    store = open_record(tmp_path)
    store.runs.create("r", CONFIG)
    backups = Backups(store, "r", tmp_path / "r", every=1)
    store.rounds.open("r", 1, ["a"])
    backups.note(Struck("a", 1, "late"))
    store.rounds.close("r", 1, None, {})
    backups.after_round(1)
    assert not (tmp_path / "r").exists()
    assert backups.since(1) == 0


class TestUseDatabase:
    def test_address_is_private_and_kept(self, tmp_path: Path, postgresql: Postgresql) -> None:
        url = postgresql.schema()
        use_database(tmp_path / "runs", url)
        use_database(tmp_path / "runs", url)
        open_record(tmp_path / "runs").runs.create("r", CONFIG)
        assert [record.id for record in Record(Database(url)).runs.read_all()] == ["r"]
        [file] = (tmp_path / "runs").iterdir()
        assert file.stat().st_mode & 0o077 == 0

    def test_another_database_is_refused(self, tmp_path: Path, postgresql: Postgresql) -> None:
        use_database(tmp_path, postgresql.schema())
        with pytest.raises(ConfigError) as caught:
            use_database(tmp_path, postgresql.schema())
        assert PASSWORD not in str(caught.value)

    def test_folder_with_a_record_is_refused(self, tmp_path: Path, postgresql: Postgresql) -> None:
        open_record(tmp_path).close()
        with pytest.raises(ConfigError):
            use_database(tmp_path, postgresql.schema())
        assert not (tmp_path / "record.url").exists()

    @pytest.mark.parametrize("url", ["", "runs.db", "mysql://a:b@c/d", "postgresql://host", "postgresql://h:port/d"])
    def test_address_of_nothing_is_refused(self, tmp_path: Path, url: str) -> None:
        with pytest.raises(ConfigError):
            use_database(tmp_path, url)

    def test_server_that_does_not_answer_is_named(self, tmp_path: Path) -> None:
        port = claim_port()
        with pytest.raises(DatabaseGone) as caught:
            use_database(tmp_path / "runs", f"postgresql://u:secret@127.0.0.1:{port}/d")
        assert f"127.0.0.1:{port}" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert not (tmp_path / "runs").exists()

    def test_schema_of_a_newer_version_is_refused(self, tmp_path: Path, postgresql: Postgresql) -> None:
        url = postgresql.schema()
        with Record(Database(url)).database._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(ConfigError):
            use_database(tmp_path, url)
