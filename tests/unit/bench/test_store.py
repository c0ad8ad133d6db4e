"""The record of a long run: what a round asks of it does not grow with the rounds before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from bench.store import RUN, run_store_bench, write_round
from coordinator.record.record import open_record

NAMES = ["a", "b", "c"]


@contextmanager
def counting() -> Iterator[list[int]]:
    """Steps of SQLite's machine within the block, in all connections that are opened there."""
    steps = [0]

    def count() -> int:
        steps[0] += 1
        return 0

    def connected(connection: Any, _record: Any) -> None:
        connection.set_progress_handler(count, 1)

    event.listen(Engine, "connect", connected)
    try:
        yield steps
    finally:
        event.remove(Engine, "connect", connected)


def test_a_round_asks_as_much_after_many_rounds_as_after_few(tmp_path: Path) -> None:
    store = open_record(tmp_path)
    store.runs.create(RUN, {})
    store.runs.create("other", {})
    asked = {}
    for number in range(1, 82):
        if number not in (10, 81):
            write_round(store, number, NAMES)
            continue
        store.close()
        with counting() as steps, open_record(tmp_path, check=False) as store:
            steps[0] = 0
            write_round(store, number, NAMES)
        asked[number] = steps[0]
        store = open_record(tmp_path, check=False)
    store.close()
    assert asked[10] > 1000
    assert asked[81] == pytest.approx(asked[10], rel=0.1)


def test_the_bench_measures_real_processes() -> None:
    report = run_store_bench(rounds=3, devices=2)
    assert (report["rounds"], report["devices"]) == (3, 2)
    assert 0 < report["resume_record_s"] < report["resume_s"]
    assert min(report[key] for key in ("round_ms", "runs_s", "show_s", "status_cpu_s", "database_bytes")) > 0
