"""Copies of the record and the notes beside them: how rarely a copy is made, and that an old one has lost nothing."""

import binascii
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.store import RUN, write_round
from coordinator.config import RobustConfig
from coordinator.record import backups as module
from coordinator.record.backups import NOTED_SHARE, Backups, Struck
from coordinator.record.copies import is_whole, notes_in, number_in, read_runs
from coordinator.record.record import Record, open_record
from coordinator.record.retention import RetentionPolicy, collect, remove_runs
from coordinator.record.tables import DeviceRecord, ResultRecord
from coordinator.rounds.quarantine import Quarantine
from fedvit.errors import ConfigError, Damaged

NAMES = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def large_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every copy were a large one."""
    monkeypatch.setattr(module, "SMALL_BYTES", 0)


class BackedUp:
    """A run's record with its backups."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.lines: list[str] = []
        self.store = open_record(out)
        self.store.runs.create(RUN, {})
        self._connect()

    def _connect(self) -> None:
        self.backups = Backups(self.store, RUN, self.out / RUN, 1)
        self.quarantine = Quarantine(RUN, self.store, RobustConfig(strikes=2, quarantine_rounds=50))

    def play(self, *numbers: int) -> None:
        for number in numbers:
            write_round(self.store, number, NAMES, backups=self.backups)
            self.backups.after_round(number)

    def lose(self, copy: int) -> None:
        """The record is lost, and an old copy put back in its place."""
        self.store.close()
        for file in self.out.glob("fedvit.db*"):
            file.unlink()
        shutil.copy(self.copy_after(copy), self.out / "fedvit.db")
        self.store = open_record(self.out)
        self._connect()

    def resume(self) -> None:
        self.backups.replay_notes(self.lines.append, self.quarantine.strike)

    def notes(self) -> list[Path]:
        return notes_in(self.out / RUN)

    def copied(self) -> list[int]:
        """Rounds after which the existing copies were made."""
        return [read_runs(copy)[RUN].closed for copy in self.backups.copies()]

    def copy_after(self, number: int) -> Path:
        return next(copy for copy in self.backups.copies() if read_runs(copy)[RUN].closed == number)

    def held(self) -> tuple[list[tuple[Any, ...]], list[DeviceRecord], list[ResultRecord]]:
        """What it says of rounds, but for the dates, of devices and of results."""
        rounds = [
            (entry.round, entry.state, entry.figures, entry.totals, entry.accuracy, entry.evaluated, entry.cohort)
            for entry in self.store.rounds.read_all(RUN)
        ]
        return rounds, self.store.devices.read_all(RUN), self.store.tasks.read_results(RUN)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[BackedUp]:
    made = BackedUp(tmp_path / "runs")
    yield made
    made.store.close()


def test_an_old_copy_and_its_notes_are_the_record(record: BackedUp) -> None:
    """Also with notes in several files; and a copy of what was put back is made at once."""
    record.play(1, 2, 3, 4, 5)
    assert record.copied() == [1], "five rounds are little beside the first copy"
    held = record.held()
    record.lose(1)
    assert record.store.rounds.list_closed(RUN) == [1]
    record.resume()
    assert record.lines == []
    assert not record.store.rounds.read_all(RUN)[-1].evaluated, (
        "its results are there: the run goes on with its evaluation"
    )
    record.store.rounds.close_evaluation(RUN, 5)
    assert record.held() == held
    assert record.copied() == [1, 5]
    assert is_whole(record.copy_after(5))


def test_notes_of_many_rounds_are_in_files_of_which_only_the_newest_are_read(
    record: BackedUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    record.play(1, 2, 3, 4)
    assert [file.name for file in record.notes()] == [f"since-{number}.notes" for number in (1, 2, 3)]
    held = record.held()
    for file in record.notes()[:-1]:
        file.write_bytes(b"nobody reads this")
    record.resume()
    assert record.lines == []
    assert record.held() == held
    assert record.copied() == [1], "nothing was put back"


def test_a_copy_is_made_when_the_notes_are_no_longer_small_beside_the_last(record: BackedUp) -> None:
    made: list[int] = []
    for number in range(1, 120):
        record.play(number)
        copies = record.copied()
        made += [copy for copy in copies if copy not in made]
        size = record.backups.copies()[-1].stat().st_size
        noted = sum(file.stat().st_size for file in record.notes() if number_in(file) >= copies[-1])
        assert noted <= NOTED_SHARE * size
        assert all(number_in(file) >= copies[0] for file in record.notes()), "older notes are in every copy"
    assert made[0] == 1, "the first round of a run is copied"
    assert 3 <= len(made) <= 20, made
    write_round(record.store, 120, NAMES, backups=record.backups)
    record.backups.after_round(120, last=True)
    assert record.copied()[-1] == 120


def test_a_damaged_note_of_a_closed_round_leaves_the_later_ones(record: BackedUp) -> None:
    """Its state is not known any more; the run goes on from the newest one, and the note is told."""
    record.play(1, 2, 3)
    held = record.held()
    [file] = record.notes()
    lines = file.read_bytes().splitlines(keepends=True)
    place = next(place for place, line in enumerate(lines) if b"figures" in binascii.a2b_base64(line))
    lines[place] = lines[place][:90] + bytes([lines[place][90] ^ 1]) + lines[place][91:]
    file.write_bytes(b"".join(lines))
    record.lose(1)
    record.resume()
    assert len(record.lines) == 1
    assert str(file) in record.lines[0]
    assert record.store.rounds.list_closed(RUN) == [1, 2, 3]
    second, third = record.store.rounds.read_all(RUN)[1:]
    assert second.state is None
    assert (third.state, third.figures) == held[0][2][1:3]
    assert record.store.tasks.read_results(RUN) == held[2]


def test_half_a_note_is_none(record: BackedUp) -> None:
    """The process ended while it wrote: nobody was told of it. The next note is whole."""
    record.play(1, 2)
    file = record.notes()[-1]
    content = file.read_bytes()
    file.write_bytes(content + content[:50])
    record.resume()
    assert file.read_bytes() == content
    record.play(3)
    held = record.held()
    record.lose(1)
    record.resume()
    assert record.store.tasks.read_results(RUN) == held[2]
    assert record.store.rounds.list_closed(RUN) == [1, 2, 3]


def test_strikes_and_what_followed_are_put_back(record: BackedUp) -> None:
    record.play(1)
    for number in (2, 3):
        record.backups.note(Struck("b", number, "nonsense"))
        record.quarantine.strike("b", number, "nonsense")
        record.play(number)
    assert record.store.strikes.read_current_quarantines(RUN, 4)
    record.lose(1)
    assert not record.store.strikes.read_all(RUN)
    record.resume()
    assert [(entry.round, entry.spent) for entry in record.store.strikes.read_all(RUN)] == [(2, True), (3, True)]
    assert record.store.strikes.read_current_quarantines(RUN, 4)["b"].until_round == 53


def test_without_copies_there_are_no_notes(tmp_path: Path) -> None:
    with open_record(tmp_path) as store:
        store.runs.create(RUN, {})
        backups = Backups(store, RUN, tmp_path / RUN, 0)
        write_round(store, 1, NAMES, backups=backups)
        backups.after_round(1, last=True)
    assert not (tmp_path / RUN).exists()


# --- many runs in one folder ------------------------------------------------------------------------------


def play_run(store: Record, out: Path, run: str, rounds: int = 2) -> None:
    """A whole run: its rounds, its copies, its end."""
    backups = Backups(store, run, out / run, 1)
    store.runs.create(run, {})
    for number in range(1, rounds + 1):
        write_round(store, number, NAMES, backups=backups, run=run)
        backups.after_round(number, last=number == rounds)
    store.runs.update(run, status="finished")


def beside_the_record(out: Path) -> int:
    """Bytes of copies and notes."""
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file() and file.parent != out)


@pytest.mark.slow
def test_copies_of_many_runs_grow_with_the_record_and_not_with_its_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # copies of real size
    store, sizes = open_record(tmp_path), {}
    for number in range(1, 101):
        play_run(store, tmp_path, f"run-{number}")
        if number in (50, 100):
            record_bytes = (tmp_path / "fedvit.db").stat().st_size
            sizes[number] = beside_the_record(tmp_path)
            assert sizes[number] <= 3 * record_bytes
    store.close()
    assert sizes[100] <= 2.5 * sizes[50]
    assert [file.name for file in sorted(tmp_path.glob("*/*.db"))] == ["copy-199.db", "copy-200.db"]


def test_one_copy_restores_every_run_with_its_own_notes(record: BackedUp) -> None:
    """Two runs side by side: the copy that one makes in the middle of the other's notes loses nothing of either."""
    record.store.runs.create("other", {})
    other = Backups(record.store, "other", record.out / "other", 1)
    for number in (1, 2, 3):
        record.play(number)
        write_round(record.store, number, NAMES, backups=other, run="other")
        other.after_round(number, last=number == 2)
    held, others = record.held(), record.store.tasks.read_results("other")
    newest = record.backups.copies()[-1]
    assert {run: copied.closed for run, copied in read_runs(newest).items()} == {RUN: 2, "other": 2}
    record.store.close()
    shutil.copy(newest, record.out / "fedvit.db")
    record.store = open_record(record.out)
    record._connect()
    record.resume()
    Backups(record.store, "other", record.out / "other", 1).replay_notes(record.lines.append, record.quarantine.strike)
    record.store.rounds.close_evaluation(RUN, 3)
    assert (record.held(), record.store.tasks.read_results("other"), record.lines) == (held, others, [])


def test_gc_removes_what_the_copies_replace_and_nothing_else(tmp_path: Path) -> None:
    store = open_record(tmp_path)
    for run in ("first", "second", "third"):
        play_run(store, tmp_path, run)
    copies = tmp_path / "record.copies"
    kept = sorted(copies.iterdir())
    for stray in ("copy-1.db", ".writing-half", ".writing-half-journal"):
        shutil.copy(kept[0], copies / stray)
    notes = tmp_path / "second" / "notes" / "since-0.notes"
    notes.write_bytes(b"a process ended before it removed them")

    def gone(*, dry_run: bool) -> set[str]:
        removed = collect(store, tmp_path, RetentionPolicy(dry_run=dry_run))
        return {Path(entry.path).name for entry in removed if entry.path}

    expected = gone(dry_run=True)
    assert notes.exists()
    assert gone(dry_run=False) == expected >= {"copy-1.db"}
    assert gone(dry_run=False) == set()
    assert sorted(copies.iterdir()) == kept
    store.close()


def test_a_run_that_was_removed_is_not_lost(tmp_path: Path) -> None:
    """Copies still have it: only a run whose folder is there, and that the record does not know, means damage."""
    with open_record(tmp_path) as store:
        play_run(store, tmp_path, "first")
        remove_runs(store, tmp_path, ["first"])
    with open_record(tmp_path) as store:
        with pytest.raises(ConfigError):
            store.runs.read("first")
        play_run(store, tmp_path, "second")
        store.runs.remove("second")  # its rows only, as a lost journal does
        with pytest.raises(Damaged):
            store.runs.read("second")
    with pytest.raises(Damaged):
        open_record(tmp_path)
