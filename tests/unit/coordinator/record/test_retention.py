"""What is kept of runs: details of rounds, whole runs, and files that nothing refers to."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.cli import cli
from coordinator.record.record import Record, open_record
from coordinator.record.retention import LOCK, is_served, lock_run, lock_service, oldest_kept
from coordinator.record.tables import RefusalRecord, SavedState, TaskRecord
from coordinator.run_view import read_run
from fedvit.errors import ConfigError
from fedvit.files import WRITING
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors
from fedvit.wire.messages import Manifest, Result
from tests.support.codes import has_code
from tests.support.damage import forbid_folder
from tests.support.records import add_result
from tests.support.runs import Stage, assert_moved_by
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("known")

DIGEST = "blake3:" + "5" * 64
LOOKING = """
import sys
from pathlib import Path
from coordinator.record.retention import is_served
print(flush=True)
while True:
    is_served(Path(sys.argv[1]))
"""


def play_run(store: Record, run: str, rounds: int, results: dict[tuple[int, str], int], **config: Any) -> None:
    """A run of closed and evaluated rounds and an open one; `results` says how many rounds late each counted."""
    store.runs.create(run, {"method": "fedavg", "rounds": rounds + 1, **config})
    for number in range(1, rounds + 2):
        store.rounds.open(run, number, ["a", "b"])
        store.tasks.add(run, [TaskRecord(number, name, DIGEST, {"g": DIGEST}) for name in ("a", "b")])
        for name in ("a", "b"):
            late = results.get((number, name))
            if late is None:
                store.devices.add_refusal(
                    run,
                    RefusalRecord(number, name, "train", "no result: deadline", broke="time" if name == "a" else None),
                )
                continue
            use = ResourceUse(step_s=0.5 * number, flops=number, received_bytes=7, sent_bytes=number)
            made = Result(run, number, "train", 10, {"loss": 1 / number}, use, Manifest(DIGEST, 5, 65536))
            add_result(store, name, made, number + late)
            store.tasks.end(run, [(number, name)], "accepted")
        if number > rounds:
            return
        figures = {"dp_noise_multiplier": 1.0 + number % 2, "dp_population": 4.0}
        store.rounds.close(run, number, SavedState({"g": f"blake3:{number:064x}"}, None, {}), figures)
        add_result(store, "a", Result(run, number, "evaluate", 4, {"correct": float(number % 5)}, ResourceUse()))
        store.rounds.close_evaluation(run, number)
        store.strikes.add(run, number, "b", "NaN")


def lasting(store: Record, run: str, before: int) -> dict[str, Any]:
    """All that thinning the rounds before one leaves as it is."""
    summary = read_run(store, run)
    return {
        "totals": store.rounds.read_totals(run),
        "devices": (store.devices.read_all(run), summary.devices),
        "asked": store.devices.read_asked(run),
        "accuracy": (
            store.rounds.read_mean_accuracy(run), summary.mean_accuracy, store.rounds.read_accuracy(run, before),
        ),
        "privacy": store.rounds.count_figures(run, ["dp_noise_multiplier", "dp_population"]),
        "faults": (store.strikes.read_all(run), store.strikes.read_quarantines(run)),
        "going on": (
            store.rounds.read_newest_closed(run), store.rounds.read_open(run),
            store.tasks.read_unanswered(run), store.rounds.find_last(run), store.tasks.find_uploads_since(run, before),
            store.rounds.list_closed(run),
        ),
        "results": [entry for entry in store.tasks.read_results(run) if entry.used_in >= before],
        "selection": store.tasks.read_newest_used(run, store.rounds.find_last(run) + 1),
        "rounds": [store.rounds.read(run, number) for number in store.rounds.list_closed(run) if number >= before],
        "refusals": [entry for entry in store.devices.read_refusals(run) if (entry.round or 0) >= before],
    }  # fmt: skip


rounds_played = st.integers(1, 6)
lateness = st.dictionaries(st.tuples(st.integers(1, 7), st.sampled_from("ab")), st.integers(0, 2))


@settings(max_examples=15)
@given(rounds=rounds_played, results=lateness, before=st.lists(st.integers(0, 9), min_size=1, max_size=2))
def test_thinning_changes_nothing_that_is_to_stay(
    tmp_path_factory: pytest.TempPathFactory, rounds: int, results: dict[tuple[int, str], int], before: list[int]
) -> None:
    """Whatever round it is asked for, once or twice: totals, privacy, faults, and all that it takes to go on stay; of
    older rounds nothing else does, and never is anything of the newest closed round or of the open one taken."""
    with open_record(tmp_path_factory.mktemp("thin")) as store:
        play_run(store, "r", rounds, results)
        oldest = min(max(before), rounds)
        wanted = lasting(store, "r", oldest)
        for number in before:
            store.runs.thin("r", number)
        assert lasting(store, "r", oldest) == wanted
        newest = store.tasks.read_newest_used("r", oldest + 1)
        left = [entry for entry in store.tasks.read_results("r") if entry.used_in < oldest]
        assert all(entry.used_in == newest[entry.device].used_in for entry in left)
        gone = [record for record in store.rounds.read_all("r") if record.round < oldest]
        assert all((record.cohort, record.state, record.accuracy) == ([], None, None) for record in gone)


def test_details_that_copies_of_the_record_need_are_kept() -> None:
    assert oldest_kept(100, None, 90) is None
    assert oldest_kept(100, 5, 99) == 96
    assert oldest_kept(100, 5, 90) == 90


def test_run_that_keeps_few_rounds_continues_after_a_restart(stage: Stage, first: Tensors) -> None:
    """Five rounds of 1 each; at the end details are there of the newest two."""
    stage.fake("a")
    stage.start(rounds=5, keep_rounds=2, evaluate_every=1)
    stage.drive(lambda: 4 in stage.store.rounds.list_closed("r"))
    stage.stop()
    stage.start(rounds=5, keep_rounds=2, resume=True)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 5.0)
    assert stage.store.runs.read("r").thinned == 4
    assert {entry.round for entry in stage.store.tasks.read_results("r")} == {4, 5}
    summary = read_run(stage.store, "r")
    assert [(entry.accepted, entry.accuracy_mean) for entry in summary.rounds] == [(1, 1.0)] * 5
    assert summary.devices[0].rounds == 5


# --- commands -------------------------------------------------------------------------------------------


@pytest.fixture
def out(runs: Path) -> Iterator[Path]:
    """Finished runs `first`, `second` (which started from first) and `third`, and `open`, which is not finished."""
    folder = runs
    with open_record(folder) as store:
        for name, start in (("first", None), ("second", "first"), ("third", None), ("open", None)):
            play_run(store, name, 4, {(number, "a"): 0 for number in range(1, 6)}, start_from=start)
            store.runs.update(name, status="running" if name == "open" else "finished")
            (folder / name / "blobs" / "ab").mkdir(parents=True)
            (folder / name / "blobs" / "ab" / "cd").write_bytes(bytes(1000))
    return folder


def said(*arguments: object) -> Any:
    ended = CliRunner().invoke(cli, [*map(str, arguments), "--json"], standalone_mode=False)
    if ended.exception:
        raise ended.exception
    return json.loads(ended.output)


def listed(out: Path) -> dict[str, int]:
    """Runs of the record and their bytes."""
    return {entry["run"]: entry["bytes"] for entry in said("runs", "--runs", out)}


def test_rm_removes_a_run_from_the_record_and_the_disk(out: Path) -> None:
    [gone] = said("rm", "third", "--runs", out)
    assert (gone["run"], gone["bytes"]) == ("third", 1000)
    assert listed(out) == {"open": 1000, "second": 1000, "first": 1000}
    assert not (out / "third").exists()
    with open_record(out) as store:
        assert (
            store.tasks.read_results("third"),
            store.devices.read_refusals("third"),
            store.devices.read_all("third"),
        ) == ([], [], [])
        assert len(store.tasks.read_results("first")) == 9, "others are as they were"


def test_rm_refuses_a_run_that_is_served_and_one_that_another_needs(out: Path) -> None:
    held = lock_run(out / "open", "open")
    assert is_served(out / "open")
    for names, why in (
        (["open"], "is being served"),
        (["third", "first"], "'second'.*started from 'first'"),
        (["no"], "no run"),
    ):
        with pytest.raises(ConfigError, match=why):
            said("rm", *names, "--runs", out)
    assert len(listed(out)) == 4, "nothing is removed then"
    os.close(held)
    said("rm", "first", "second", "--runs", out)
    assert set(listed(out)) == {"open", "third"}


def test_rm_with_force_removes_what_another_run_started_from(out: Path) -> None:
    said("rm", "first", "--force", "--runs", out)
    assert "first" not in listed(out)


def test_gc_without_a_policy_only_removes_unreferenced_files(out: Path) -> None:
    """A folder of a run that the record does not know, a half-written file; not folders of other kinds."""
    (out / "lost" / "blobs").mkdir(parents=True)
    (out / "lost" / LOCK).touch()
    (out / "lost" / "model.safetensors").write_bytes(bytes(500))
    (out / "bundle").mkdir()
    half = out / "open" / "blobs" / "ab" / f"{WRITING}0123"
    half.write_bytes(bytes(30))
    wanted = [("folder", str(out / "lost"), 500), ("file", str(half), 30)]
    told = said("gc", "--dry-run", "--runs", out)
    assert [(entry["what"], entry["path"], entry["bytes"]) for entry in told] == wanted
    assert half.exists()
    assert said("gc", "--runs", out) == told
    assert sorted(file.name for file in out.iterdir() if file.is_dir()) == [
        "bundle",
        "first",
        "open",
        "second",
        "third",
    ]
    assert said("gc", "--runs", out) == []


def test_gc_keeps_so_many_finished_runs_and_those_that_others_started_from(out: Path) -> None:
    removed = said("gc", "--keep-runs", 1, "--runs", out)
    assert [(entry["what"], entry["run"]) for entry in removed] == [("run", "second"), ("run", "first")]
    assert set(listed(out)) == {"open", "third"}


def test_gc_keeps_a_run_that_a_kept_one_started_from(out: Path) -> None:
    assert [entry["run"] for entry in said("gc", "--keep-runs", 2, "--runs", out)] == []
    assert set(listed(out)) == {"open", "third", "second", "first"}


def test_gc_thins_rounds_by_flag_and_by_each_runs_configuration(out: Path) -> None:
    with open_record(out) as store:
        play_run(store, "tidy", 4, {(number, "a"): 0 for number in range(1, 6)}, keep_rounds=3)
    assert [entry["run"] for entry in said("gc", "--runs", out)] == ["tidy"]
    said("gc", "--keep-rounds", 1, "--runs", out)
    with open_record(out) as store:
        assert [store.runs.read(name).thinned for name in ("tidy", "open", "first")] == [4, 4, 4]
        assert {entry.used_in for entry in store.tasks.read_results("open")} == {4, 5}
    assert said("gc", "--keep-rounds", 1, "--runs", out) == []


def test_gc_leaves_a_run_that_is_served(out: Path) -> None:
    held = lock_run(out / "third", "third")
    assert said("gc", "--keep-runs", 0, "--runs", out)
    assert "third" in listed(out)
    os.close(held)


@pytest.mark.parametrize("served", ["run", "service"])
def test_gc_compacts_the_record_once_nobody_serves_it(tmp_path: Path, served: str) -> None:
    """Meanwhile a coordinator could not write."""

    def count_unused() -> int:
        with closing(sqlite3.connect(tmp_path / "fedvit.db")) as record:
            return int(record.execute("PRAGMA freelist_count").fetchone()[0])

    with open_record(tmp_path) as store:
        store.runs.create("open", {"method": "fedavg", "rounds": 1})
    held = lock_service(tmp_path) if served == "service" else lock_run(tmp_path / "open", "open")
    for is_held in (True, False):
        with open_record(tmp_path) as store:
            store.runs.create(f"large-{is_held}", {"method": "fedavg", "rounds": 1, "note": "x" * 100_000})
            store.runs.update(f"large-{is_held}", status="finished")
        assert said("gc", "--keep-runs", 0, "--runs", tmp_path)
        assert (count_unused() > 0) == is_held
        if is_held:
            os.close(held)


def test_gc_leaves_a_folder_of_another_user(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may look into each folder."""
    (out / "lost+found").mkdir()
    (out / "lost" / "blobs").mkdir(parents=True)
    (out / "lost" / LOCK).touch()
    forbid_folder(monkeypatch, "lost+found")
    assert [entry["path"] for entry in said("gc", "--runs", out)] == [str(out / "lost")]


def test_looks_at_a_run_disturb_neither_its_coordinator_nor_each_other(tmp_path: Path) -> None:
    """A process looks all the time, as `gc`, `cancel` and the dashboard do."""
    os.close(lock_run(tmp_path, "r"))
    with subprocess.Popen([sys.executable, "-c", LOOKING, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout
        try:
            other.stdout.readline()
            for _ in range(3000):
                assert not is_served(tmp_path)
                os.close(lock_run(tmp_path, "r"))
        finally:
            other.kill()


def test_one_of_those_that_begin_at_once_gets_the_run(tmp_path: Path) -> None:
    begin = threading.Barrier(5)

    def try_lock(_: int) -> int | None:
        begin.wait(WAIT_S)
        try:
            return lock_run(tmp_path / "r", "r")
        except ConfigError:
            return None

    for _ in range(20):
        with ThreadPoolExecutor(5) as threads:
            [taken] = [handle for handle in threads.map(try_lock, range(5)) if handle is not None]
        os.close(taken)


def test_run_is_taken_from_a_former_leader_and_from_nobody_else(tmp_path: Path) -> None:
    """A leader that was stopped keeps its lock; the next one has a later term."""
    held = lock_run(tmp_path, "r", 7)
    for term in (0, 7):
        with pytest.raises(ConfigError, check=has_code("FV1617")):
            lock_run(tmp_path, "r", term)
    taken = lock_run(tmp_path, "r", 8)
    os.close(held)
    assert is_served(tmp_path)
    os.close(taken)
    started = lock_run(tmp_path, "r")
    with pytest.raises(ConfigError, check=has_code("FV1617")):
        lock_run(tmp_path, "r", 9)
    os.close(started)
