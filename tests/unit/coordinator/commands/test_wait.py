"""`coordinator wait` ends when a run has ended, and its exit code says how."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest

from coordinator.record.record import Record, open_record
from fedvit.errors import FedvitError, LinkDown
from tests.support.codes import has_code
from tests.support.records import RUN, begin_run
from tests.support.waiting import wait_until
from tests.unit.coordinator.test_cli import said


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    with closing(begin_run(tmp_path)) as store:
        yield store


def test_finished_run_is_printed_at_once(store: Record, tmp_path: Path) -> None:
    store.runs.update(RUN, status="finished")
    result = said("wait", RUN, "--runs", tmp_path, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["status"] == "finished"
    assert result.stderr.splitlines() == [f"run {RUN}: finished, round 2 of 3"]


@pytest.mark.parametrize(("status", "reason"), [("failed", "the disk is full"), ("cancelled", None)])
def test_other_ends_are_errors_with_their_reason(
    store: Record, tmp_path: Path, status: str, reason: str | None
) -> None:
    store.runs.update(RUN, status=status, reason=reason)
    result = said("wait", "--runs", tmp_path)
    assert isinstance(result.exception, FedvitError)
    assert has_code("FV1525", reason or "cancelled")(result.exception)


def test_time_limit_is_kept(store: Record, tmp_path: Path) -> None:
    result = said("wait", RUN, "--runs", tmp_path, "--timeout", "0.1s")
    assert isinstance(result.exception, LinkDown)
    assert has_code("FV1526", "has not ended within")(result.exception)


def test_wait_goes_on_through_interruptions_and_rounds(store: Record, tmp_path: Path) -> None:
    store.runs.update(RUN, status="interrupted")
    results = []
    waiting = Thread(target=lambda: results.append(said("wait", RUN, "--runs", tmp_path)))
    waiting.start()
    with open_record(tmp_path) as other:
        other.rounds.open(RUN, 3, ["pi"], 1)
        other.runs.update(RUN, status="finished")
    wait_until(lambda: not waiting.is_alive(), "the command did not end")
    waiting.join()
    assert results[0].exit_code == 0
    assert results[0].stderr.splitlines()[-1] == f"run {RUN}: finished, round 3 of 3"
