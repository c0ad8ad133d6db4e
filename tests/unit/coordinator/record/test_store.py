"""A run's record: what was written is there after any end of the process."""

import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.record.backups import Backups, Struck
from coordinator.record.database import Database, use_database
from coordinator.record.record import Record, open_record
from coordinator.record.tables import Asked, ResultRecord, SavedState, TaskRecord, TaskTimes
from coordinator.security.broker.process import claim_port
from fedvit.errors import ConfigError, DatabaseGone, StorageFailed
from fedvit.resources import Budget, ResourceUse
from fedvit.wire.messages import Manifest, Result
from profiles.prediction import Expected, MemoryPhase, Prediction
from tests.support.postgresql import PASSWORD, Postgresql
from tests.support.records import add_result

DIGEST = "blake3:" + "5" * 64
CONFIG: dict[str, Any] = {"method": "fedavg", "options": {"lr": 0.5}, "cohort": 1.0, "devices": 1, "classes": ["a"]}

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


def result(number: int = 1, **changed: Any) -> Result:
    use = ResourceUse(
        train_s=1.5, step_s=0.25, steps=6, flops=10**15, peak_rss_bytes=2**40, received_bytes=1, sent_bytes=2
    )
    given = Result("r", number, "train", 20, {"loss": 0.125, "other": 1e-300}, use, Manifest(DIGEST, 100, 1024))
    return msgspec.structs.replace(given, **changed)


@pytest.fixture
def store(runs: Path) -> Iterator[Record]:
    """With one run, `r`."""
    opened = open_record(runs)
    opened.runs.create("r", CONFIG)
    yield opened
    opened.close()


def reopened(store: Record, tmp_path: Path) -> Record:
    store.close()
    return open_record(tmp_path / "runs")


def test_a_run_comes_back(store: Record, tmp_path: Path) -> None:
    store.runs.update("r", classes=["ant", "bee"], status="running")
    store.runs.update("r", program=DIGEST)
    store.runs.update("r", status="failed", reason="disk full: näh \u2026")
    record = reopened(store, tmp_path).runs.read("r")
    assert record.config == CONFIG
    assert type(record.config["cohort"]) is float, "1.0 is a share, 1 would be a number"
    assert type(record.config["devices"]) is int
    assert (record.id, record.status, record.classes) == ("r", "failed", ("ant", "bee"))
    assert (record.program, record.reason) == (DIGEST, "disk full: näh \u2026")
    assert datetime.fromisoformat(record.created_at).utcoffset() is not None


def test_a_new_run_waits_and_has_no_classes(store: Record) -> None:
    record = store.runs.read("r")
    assert (record.status, record.classes, record.program, record.reason) == ("waiting", (), None, None)


def test_runs_are_listed_newest_first(store: Record) -> None:
    for name in ("b", "a", "c"):
        store.runs.create(name, {})
    listed = store.runs.read_all()
    assert [record.created_at for record in listed] == sorted((record.created_at for record in listed), reverse=True)
    assert {record.id for record in listed} == {"r", "a", "b", "c"}


def test_an_unknown_run_is_named(store: Record) -> None:
    with pytest.raises(ConfigError, match="'nope'"):
        store.runs.read("nope")


def test_a_run_cannot_be_made_twice(store: Record) -> None:
    with pytest.raises(StorageFailed, match=r"(?i)unique"):
        store.runs.create("r", {})


def test_rounds_come_back(store: Record, tmp_path: Path) -> None:
    state = SavedState({"global": DIGEST, "head": DIGEST}, DIGEST, {"pi": DIGEST})
    store.rounds.open("r", 2, ["b", "a"])
    store.rounds.open("r", 1, ["a"])
    store.rounds.close("r", 1, state, {"loss": 0.5, "took_s": 3.0})
    store.rounds.close_evaluation("r", 1)
    store.runs.create("other", {})
    store.rounds.open("other", 1, ["x"])
    first, second = reopened(store, tmp_path).rounds.read_all("r")
    assert (first.run, first.round, first.cohort, first.evaluated) == ("r", 1, ["a"], True)
    assert (first.state, first.figures) == (state, {"loss": 0.5, "took_s": 3.0})
    assert first.closed_at is not None
    assert first.closed_at >= first.opened_at
    assert (second.round, second.cohort, second.closed_at) == (2, ["b", "a"], None)
    assert (second.state, second.figures, second.evaluated) == (None, {}, False)


def test_a_round_asked_anew_has_the_new_cohort(store: Record) -> None:
    store.rounds.open("r", 1, ["a"])
    store.rounds.open("r", 1, ["b", "c"])
    [record] = store.rounds.read_all("r")
    assert (record.cohort, record.closed_at) == (["b", "c"], None)


def test_a_round_of_no_run_cannot_be_opened(store: Record) -> None:
    with pytest.raises(StorageFailed, match=r"(?i)foreign key"):
        store.rounds.open("nope", 1, ["a"])


def test_results_come_back_sorted(store: Record, tmp_path: Path) -> None:
    add_result(store, "b", result())
    add_result(store, "a", result(upload=None, use=ResourceUse()))
    add_result(store, "a", result(kind="evaluate", samples=5, metrics={"correct": 4.0}, upload=None))
    add_result(store, "c", result(2))
    again = reopened(store, tmp_path)
    first = result()
    assert [(entry.round, entry.device) for entry in again.tasks.read_results("r")] == [
        (1, "a"),
        (1, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert again.tasks.read_results("r", 1, "train")[1] == ResultRecord(
        "r", 1, "b", "train", 20, first.metrics, first.use, DIGEST, 1
    )
    assert again.tasks.read_results("r", 1, "train")[0].use == ResourceUse()
    assert again.tasks.read_results("r", 1, "train")[0].upload is None
    assert [entry.metrics for entry in again.tasks.read_results("r", 1, "evaluate")] == [{"correct": 4.0}]
    assert [entry.device for entry in again.tasks.read_results("r", 2)] == ["c"]
    assert [entry.device for entry in again.tasks.read_results("r", kind="train")] == ["a", "b", "c"]
    assert again.tasks.read_results("other") == []


def test_a_result_counts_once(store: Record) -> None:
    """By run, round, device and kind; the first one stands."""
    add_result(store, "a", result(samples=20))
    add_result(store, "a", result(samples=7, upload=None))
    [kept] = store.tasks.read_results("r")
    assert (kept.samples, kept.upload) == (20, DIGEST)
    add_result(store, "a", result(2))
    add_result(store, "a", result(kind="evaluate"))
    add_result(store, "b", result())
    assert len(store.tasks.read_results("r")) == 4


def test_refusals_come_back_in_order(store: Record, tmp_path: Path) -> None:
    store.devices.add_refusal("r", 3, "a", "train", "NaN in [head]\n…")
    store.devices.add_refusal("r", None, "b", "hello", "another version")
    store.devices.add_refusal("other", 1, "c", "train", "late")
    first, second = reopened(store, tmp_path).devices.read_refusals("r")
    assert (first.round, first.device, first.kind, first.reason) == (3, "a", "train", "NaN in [head]\n…")
    assert (second.round, second.device, second.kind, second.reason) == (None, "b", "hello", "another version")
    assert first.at <= second.at


def test_two_processes_may_read_and_write(store: Record, tmp_path: Path) -> None:
    """`coordinator show` while a run is going."""
    reader = open_record(tmp_path / "runs")
    assert reader.runs.read_all()[0].id == "r"
    store.rounds.open("r", 1, ["a"])
    assert [record.round for record in reader.rounds.read_all("r")] == [1]
    reader.devices.add_refusal("r", 1, "a", "train", "late")
    assert len(store.devices.read_refusals("r")) == 1
    reader.close()


@pytest.mark.parametrize("content", [b"this is no database, but it is quite a bit of text" * 50, b"short"])
def test_a_file_that_is_no_database_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fedvit.db").write_bytes(content)
    with pytest.raises(StorageFailed, match=r"fedvit\.db.*not a database"):
        open_record(tmp_path)
    assert (tmp_path / "fedvit.db").read_bytes() == content


def test_a_folder_in_the_databases_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "fedvit.db").mkdir()
    with pytest.raises(StorageFailed, match=r"fedvit\.db"):
        open_record(tmp_path)


def test_a_run_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="runs"):
        open_record(tmp_path / "runs")


def test_a_tables_loss_is_named(store: Record) -> None:
    with store.database._engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE results")
    with pytest.raises(StorageFailed, match=r'no such table: results|relation "results" does not exist'):
        store.tasks.read_results("r")


def test_what_a_killed_process_had_written_is_there(tmp_path: Path) -> None:
    """kill -9 after some hundred calls: every call that had returned is in the record, and at most one more."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        lines = [writer.stdout.readline() for _ in range(151)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()  # communicate() would lose what was read ahead
    writer.wait(timeout=60)
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


def test_refusal_names_exceeded_budget(store: Record, tmp_path: Path) -> None:
    store.devices.add_refusal("r", 3, "a", "train", "too much memory", "memory")
    store.devices.add_refusal("r", 3, "b", "train", "NaN")
    assert [entry.broke for entry in reopened(store, tmp_path).devices.read_refusals("r")] == ["memory", None]


EXPECTED = Expected(
    prediction=Prediction(
        device="a",
        source="measured",
        mode=None,
        step_s=0.1 + 0.2,  # all its digits come back
        train_s=12.5,
        evaluate_s=None,
        bound="memory",
        memory=[MemoryPhase(phase="train", parts={"software": 87_000_000, "weights": 5})],
        peak_rss_bytes=87_000_005,
        energy_j=None,
        power_w=None,
        over=("time", "upload"),
    ),
    flops=10**15,
    bytes_down=3,
    bytes_up=4,
    budget=Budget(memory_bytes=10**9, round_deadline_s=0.5),
    changes={"micro_batch": 4, "frozen_precision": "int8", "recompute": True, "threshold": 0.5},
    quality=0.49,
)


def task(number: int, device: str, expected: Expected | None) -> TaskRecord:
    return TaskRecord(number, device, DIGEST, {"head": DIGEST}, expected)


def test_what_was_expected_of_devices_comes_back(store: Record, tmp_path: Path) -> None:
    """By round and device; equal expectations are kept once."""
    bare = msgspec.structs.replace(EXPECTED, budget=Budget(), changes={}, quality=1.0)
    store.tasks.add("r", [task(1, "a", EXPECTED), task(1, "b", bare)])
    store.tasks.add("r", [task(2, "a", EXPECTED), task(2, "b", None)])
    assert reopened(store, tmp_path).tasks.read_expected("r") == {
        (1, "a"): EXPECTED,
        (1, "b"): bare,
        (2, "a"): EXPECTED,
    }
    with store.database._engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM expectations").scalar() == 2


def test_what_is_expected_anew_stands(store: Record) -> None:
    store.tasks.add("r", [task(1, "a", None)])
    store.tasks.add("r", [task(1, "a", EXPECTED)])
    assert store.tasks.read_expected("r") == {(1, "a"): EXPECTED}


# --- tasks, and results that count in a later round ---------------------------------------------------


def test_a_late_result_counts_in_the_round_it_was_taken_for(store: Record, tmp_path: Path) -> None:
    """Made for round 1 by b, used in round 3; said again for another round it stays there."""
    add_result(store, "a", result(), 1)
    add_result(store, "b", result(), 3)
    add_result(store, "b", result(), 4)
    add_result(store, "c", result(3))
    add_result(store, "c", result(3, kind="evaluate", samples=5, metrics={"correct": 4.0}, upload=None), 3)
    again = reopened(store, tmp_path)
    found = [(entry.device, entry.round, entry.used_in) for entry in again.tasks.read_used_in("r", 3)]
    assert found == [("b", 1, 3), ("c", 3, 3)]
    assert (again.tasks.find_counted("r", 1), again.tasks.find_counted("r", 2), again.tasks.find_counted("r", 3)) == (
        {"a"},
        set(),
        {"b", "c"},
    )
    assert [entry.device for entry in again.tasks.read_used_in("r", 3, "evaluate")] == ["c"]


def test_round_is_summed_up_from_results_in_memory_as_from_the_record(store: Record, tmp_path: Path) -> None:
    """What `add_results` returns is what the record has, so that a round need not read it again."""
    tested = {"kind": "evaluate", "samples": 5, "metrics": {"correct": 4.0}, "upload": None}
    for number, given in ((1, True), (2, False)):
        store.rounds.open("r", number, ["a", "b"])
        store.tasks.add("r", [task(number, name, None) for name in ("a", "b")])
        trained = store.tasks.add_results([("b", result(number), number), ("a", result(number, samples=7), number)])
        assert sorted(trained, key=lambda entry: entry.device) == store.tasks.read_used_in("r", number)
        store.rounds.close("r", number, SavedState({}, None, {}), {}, results=trained if given else None)
        answers = store.tasks.add_results([("a", result(number, **tested), None)])
        store.rounds.close_evaluation("r", number, answers if given else None)
    again = reopened(store, tmp_path)
    first, second = again.rounds.read("r", 1), again.rounds.read("r", 2)
    assert first is not None
    assert second is not None
    assert (first.totals, first.accuracy) == (second.totals, second.accuracy)
    assert first.totals is not None
    assert (first.totals.accepted, first.totals.accuracy_mean) == (2, 0.8)
    assert [entry.totals.results for entry in again.devices.read_all("r")] == [4, 2]


def test_times_of_tasks_are_kept_with_their_ends(store: Record, tmp_path: Path) -> None:
    times = {name: TaskTimes(f"{name} fetches", f"{name} works", f"{name} arrives") for name in "ab"}
    store.tasks.add("r", [TaskRecord(1, name, DIGEST, {}) for name in "abc"])
    store.tasks.add_results([("a", result(1), None)], times)
    store.tasks.end("r", [(1, "b")], "offline", times)
    store.tasks.end("r", [(1, "b")], "late", {})
    a, b, c = (task.times for task in reopened(store, tmp_path).tasks.read_histories("r", [1]))
    assert (a._replace(ended_at=None), b._replace(ended_at=None)) == (times["a"], times["b"])
    assert a.ended_at
    assert b.ended_at
    assert c == TaskTimes()


def test_unanswered_tasks_come_back_and_an_outcome_stands(store: Record, tmp_path: Path) -> None:
    first, second = TaskRecord(1, "a", DIGEST, {"g": DIGEST}), TaskRecord(2, "b", DIGEST, {})
    store.tasks.add("r", [second, first, TaskRecord(1, "b", DIGEST, {})])
    store.tasks.end("r", [(1, "b")], "accepted")
    store.tasks.end("r", [(1, "b")], "offline")
    again = reopened(store, tmp_path)
    assert again.tasks.read_unanswered("r") == [first, second]
    assert again.devices.read_asked("r") == {}, "no round is closed"
    for number in (1, 2):
        again.rounds.open("r", number, ["a", "b"])
        again.rounds.close("r", number, SavedState({}, None, {}), {})
        assert again.devices.read_asked("r") == {"a": Asked(1, 1), "b": Asked(number, number)}
    again.tasks.add("r", [TaskRecord(1, "b", DIGEST, {})])
    assert [task.device for task in again.tasks.read_unanswered("r")] == ["a", "b", "b"]


def test_corrections_of_predictions_come_back(store: Record, tmp_path: Path) -> None:
    assert store.runs.read("r").corrections == {}
    store.runs.update("r", corrections={"a": {"memory": 1.5}})
    assert reopened(store, tmp_path).runs.read("r").corrections == {"a": {"memory": 1.5}}


# --- PostgreSQL ---------------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_come_back(store: Record, runs: Path) -> None:
    """A round whose loss is not a number, and one that has none: both are counted by their figures."""
    for number, figures in enumerate([{"loss": math.nan, "noise": 1.0}, {"up": -math.inf, "noise": 1.0}, {}], start=1):
        store.rounds.open("r", number, ["a"])
        store.rounds.close("r", number, None, figures)
    first, second, _ = store.rounds.read_all("r")
    assert math.isnan(first.figures["loss"])
    assert second.figures["up"] == -math.inf
    assert store.rounds.count_figures("r", ["noise"]) == {(1.0,): 2, (None,): 1}
    assert [record.round for record in open_record(runs).rounds.read_all("r")] == [1, 2, 3]


def test_reason_with_any_character_is_recorded(store: Record) -> None:
    """What a device sends as its reason: PostgreSQL refuses a byte of 0."""
    store.devices.add_refusal("r", 1, "a", "train", "ends \0 here, \u202e, \U0001f600")
    [found] = store.devices.read_refusals("r")
    assert found.reason.replace("\ufffd", "\0") == "ends \0 here, \u202e, \U0001f600"


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
        with pytest.raises(ConfigError, match=r"the record of .* is in postgresql") as caught:
            use_database(tmp_path, postgresql.schema())
        assert PASSWORD not in str(caught.value)

    def test_folder_with_a_record_is_refused(self, tmp_path: Path, postgresql: Postgresql) -> None:
        open_record(tmp_path).close()
        with pytest.raises(ConfigError, match=r"has its record in fedvit\.db; use another folder"):
            use_database(tmp_path, postgresql.schema())
        assert not (tmp_path / "record.url").exists()

    @pytest.mark.parametrize("url", ["", "runs.db", "mysql://a:b@c/d", "postgresql://host", "postgresql://h:port/d"])
    def test_address_of_nothing_is_refused(self, tmp_path: Path, url: str) -> None:
        with pytest.raises(ConfigError, match="expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE"):
            use_database(tmp_path, url)

    def test_server_that_does_not_answer_is_named(self, tmp_path: Path) -> None:
        port = claim_port()
        with pytest.raises(
            DatabaseGone, match=rf"database postgresql\+psycopg://u:\*\*\*@127\.0\.0\.1:{port}/d: .*refused"
        ):
            use_database(tmp_path / "runs", f"postgresql://u:secret@127.0.0.1:{port}/d")
        assert not (tmp_path / "runs").exists()

    def test_schema_of_a_newer_version_is_refused(self, tmp_path: Path, postgresql: Postgresql) -> None:
        url = postgresql.schema()
        with Record(Database(url)).database._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(ConfigError, match="has schema 9999"):
            use_database(tmp_path, url)
