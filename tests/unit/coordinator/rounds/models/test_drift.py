"""Drift that devices report: an alert for each device, and a run by rule."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.record.record import Record, open_record
from coordinator.rounds import alerts
from coordinator.rounds.models.drift import DriftRule, DriftWatcher
from coordinator.rounds.models.keeper import ModelKeeper
from fedvit.wire.messages import ModelReport, Models
from tests.support.hooks import Hook
from tests.support.models import FIRST, StatesOnly, compare_on

RULE = DriftRule({"method": "fedavg", "rounds": 2}, devices=2, every_h=24.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    """Two devices with the champion r-1."""
    with open_record(tmp_path / "runs") as store:
        compare_on(store, "r-1", {"a": FIRST, "b": FIRST}, after=0)
        yield store


def make_keeper(store: Record, watcher: DriftWatcher, said: list[str]) -> ModelKeeper:
    keeper = ModelKeeper(store, lambda device, message: None, lambda: 7, said.append)
    keeper.on_drift = watcher.on_drift
    for device in ("a", "b"):
        keeper.welcome(device, "i1")
    return keeper


def report(device: str, keeper: ModelKeeper, *, has_drifted: bool) -> ModelReport:
    told = StatesOnly("r-1").obey(Models("i1", 7, {"r-1": "champion"}))
    sent = msgspec.structs.replace(told, has_drifted=has_drifted)
    keeper.take(device, sent)
    return sent


def list_runs(store: Record) -> list[str]:
    return [record.id for record in store.runs.read_all()]


def test_run_begins_once_when_enough_devices_report_drift(store: Record) -> None:
    said: list[str] = []
    watcher = DriftWatcher(store, RULE, said.append)
    keeper = make_keeper(store, watcher, said)
    report("a", keeper, has_drifted=True)
    watcher.look()
    assert list_runs(store) == []
    report("b", keeper, has_drifted=True)
    watcher.look()
    [run] = list_runs(store)
    assert run.startswith("drift-")
    assert store.runs.read(run).config == RULE.config
    assert said[-1] == f"run {run} is submitted: pictures of 2 devices drifted"
    assert said[:2] == [f"pictures of {name} have drifted from those of model r-1" for name in ("a", "b")]
    watcher.look()
    DriftWatcher(store, RULE, said.append).look()  # of another process
    assert list_runs(store) == [run], "it waits in the queue"
    store.runs.cancel(run)
    watcher.look()
    assert list_runs(store) == [run], "the next one begins a day later at the earliest"
    assert [(entry.act, entry.subject) for entry in store.audit.read()][-1] == ("submit", run)


def test_next_run_begins_after_its_time_while_drift_lasts(store: Record) -> None:
    watcher = DriftWatcher(store, RULE._replace(devices=1, every_h=1e-9), lambda line: None)
    keeper = make_keeper(store, watcher, [])
    report("a", keeper, has_drifted=True)
    watcher.look()
    [first] = list_runs(store)
    watcher.look()
    assert list_runs(store) == [first], "it has not ended"
    store.runs.update(first, status="finished")
    report("a", keeper, has_drifted=False)
    watcher.look()
    assert list_runs(store) == [first]
    assert store.models.count_drifted() == 0


def test_drift_of_a_model_that_is_not_used_any_more_does_not_count(store: Record) -> None:
    keeper = make_keeper(store, DriftWatcher(store, None, print), [])
    report("a", keeper, has_drifted=True)
    assert store.models.count_drifted() == 1
    since = store.models.read_devices(device="a")[0].drifted_since
    report("a", keeper, has_drifted=True)
    assert store.models.read_devices(device="a")[0].drifted_since == since
    keeper.take("a", ModelReport("i1", {"r-2": "champion", "r-1": "former"}, "r-2", has_drifted=True))
    assert store.models.count_drifted() == 0


def test_alert_goes_to_the_webhook_of_the_run(store: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alert goes out once for each device; the environment names the webhook for a run that was removed."""
    monkeypatch.setattr(alerts, "BACK_OFF_S", 0.0)
    hook = Hook()
    thread = threading.Thread(target=hook.serve_forever)
    thread.start()
    monkeypatch.setenv("FEDVIT_ALERTS_WEBHOOK", hook.url)
    watcher = DriftWatcher(store, None, print)
    keeper = make_keeper(store, watcher, [])
    for device in ("a", "b", "a"):
        report(device, keeper, has_drifted=True)
    watcher.close()
    hook.shutdown()
    hook.server_close()
    thread.join()
    assert hook.events() == [("drift", "a"), ("drift", "b")]
    assert {body["run"] for body in hook.bodies} == {"r"}
