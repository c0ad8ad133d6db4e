"""The metrics of a coordinator, of a run in memory; and that boards and alerts name metrics that exist."""

import json
import math
import os
import re
import threading
import time
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml
from PIL import Image
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.record.database import Database
from coordinator.record.leadership import Leadership
from coordinator.record.record import Record
from coordinator.rounds.service.regular import CleanUps
from coordinator.rounds.state import Pause
from coordinator.security.expiry import CertificateEnds
from coordinator.serving.backup import BackupFolder
from coordinator.views import condition
from coordinator.views import prometheus as collector_module
from coordinator.views.condition import find_condition, find_standby_condition
from coordinator.views.observed import Observed, ObservedService, Served
from coordinator.views.prometheus import CoordinatorCollector
from coordinator.views.prometheus_service import StandbyCollector
from edge_client.agent import TICK_S
from edge_client.health.monitoring import AgentCollector
from fedvit.errors import DatabaseGone, DiskFull, NoRoom, StorageFailed, TooManyOpenFiles
from fedvit.monitoring import Cause, Condition
from fedvit.timings import LoopWatch
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from profiles.probes.meter import Sensors
from tests.support.agents import World
from tests.support.models import FIRST, compare_on
from tests.support.postgresql import Postgresql
from tests.support.records import RUN, begin_run
from tests.support.runs import Stage, fails_once

DEPLOY = Path(__file__).parents[4] / "deploy"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(collector: Any) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def samples(collector: Any) -> Samples:
    families = text_string_to_metric_families(scraped(collector))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def names(collector: Any) -> set[str]:
    """Names of all families, and those of a summary's parts."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", scraped(collector), re.MULTILINE)
    summaries = {f"{name}_{part}" for name, kind in found if kind == "summary" for part in ("sum", "count")}
    return {name for name, _ in found} | summaries


ENDS = CertificateEnds({"authority": 3e8, "device": -60.0}, 2)


def observe(stage: Stage, **more: Any) -> Observed:
    """Sources of a service that needs no leader, with the stage's run."""
    coordinator = stage.coordinator
    assert coordinator is not None
    served = [Served(coordinator, LoopWatch(0.1))]
    link, connected = coordinator.transport, lambda: coordinator.inbox.connected
    backups = BackupFolder(stage.out.parent / "backups")
    service = ObservedService("home", None, CleanUps(stage.store, stage.out, print), lambda: None)
    sources = Observed(
        link, connected, stage.store, stage.out, lambda: served, {}, backups.age_s, service, lambda: ENDS
    )
    return sources._replace(**more)


def collector_of(stage: Stage) -> CoordinatorCollector:
    return CoordinatorCollector(observe(stage))


def find_causes(observed: Observed) -> list[str]:
    return [cause.cause for cause in find_condition(observed).causes]


def test_metrics_of_a_run(stage: Stage) -> None:
    """One device is honest, one fails in the first round, one was never asked."""
    stage.fake("a")
    stage.fake("b", fails_once)
    stage.start(devices=2, rounds=2)
    assert stage.finish() == "finished"
    found = samples(collector_of(stage))

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted({"run": "r", **labels}.items()))]

    assert value("fedvit_round") == value("fedvit_rounds_planned") == 2
    assert value("fedvit_results_total", kind="train", outcome="accepted") == 3
    assert value("fedvit_results_total", kind="train", outcome="failed") == 1
    assert value("fedvit_results_total", kind="evaluate", outcome="accepted") == 4
    assert value("fedvit_refusals_total", reason="train") == 1
    assert value("fedvit_accuracy_ratio", over="mean") == 1.0
    assert value("fedvit_round_devices", were="asked") == value("fedvit_round_devices", were="accepted") == 2
    assert value("fedvit_train_loss") == 0.5
    assert value("fedvit_round_seconds", part="devices") > 0
    assert value("fedvit_round_awaited_devices") == value("fedvit_uploads_waiting") == 0
    assert sum(value("fedvit_devices", state=state) for state in collector_module.DEVICE_STATES) == 2
    assert found["fedvit_record_up", ()] == 1
    assert found["fedvit_record_commit_seconds_count", ()] > 4
    assert found["fedvit_runs", (("status", "finished"),)] == 1
    assert found["fedvit_sent_bytes_total", ()] > 0


def test_age_of_the_newest_backup(stage: Stage, tmp_path: Path) -> None:
    """Infinite before the first one, and small after it."""
    stage.start()
    collector, name = collector_of(stage), ("fedvit_backup_age_seconds", ())
    assert samples(collector)[name] == math.inf
    backups = BackupFolder(stage.out.parent / "backups")
    made = backups.make(stage.out, None)
    file = backups.folder / f"{made.name}.json"
    assert 0 <= samples(collector)[name] <= time.time() - file.stat().st_mtime + 1
    os.utime(file, (0, 0))
    assert samples(collector)[name] > 1e9


def test_metrics_of_devices_at_work(stage: Stage) -> None:
    a, b = stage.fake("a"), stage.fake("b", lambda device, task: None)
    stage.start(devices=2)
    stage.drive(lambda: bool(a.answers()) and bool(b.tasks()))
    found = samples(collector_of(stage))
    states = {dict(labels)["state"]: count for (name, labels), count in found.items() if name == "fedvit_devices"}
    assert (states["idle"], states["offered"] + states["fetching"]) == (1, 1)
    assert found["fedvit_round_awaited_devices", (("run", "r"),)] == 1
    observed = observe(stage)
    assert find_condition(observed) == Condition(ready=True, role="leader")
    stage.broker.stop()
    stage.drive(lambda: find_causes(observed) == ["broker"])
    assert not find_condition(observed).ready


def test_service_is_not_ready_when_each_of_its_runs_is_stopped(stage: Stage) -> None:
    stage.start()
    observed = observe(stage, is_connected=lambda: True)
    [served] = observed.served()
    paused = Pause("operator", "paused by the operator before round 1")
    served.coordinator.state.pause = paused
    assert find_condition(observed) == Condition(
        ready=False, role="leader", causes=(Cause("operator", paused.reason, "r"),)
    )
    found = samples(CoordinatorCollector(observed))
    assert found["fedvit_run_paused", (("reason", "operator"), ("run", "r"))] == 1
    assert found["fedvit_run_paused", (("reason", "disk"), ("run", "r"))] == 0
    both = observed._replace(served=lambda: [served, served])
    assert not find_condition(both).ready
    served.coordinator.state.pause = None
    assert find_condition(both).ready


@pytest.mark.parametrize(
    ("error", "cause"),
    [(DiskFull("FV0012", "full"), "disk"), (TooManyOpenFiles("FV0013", "files"), "files"),
     (DatabaseGone("FV0014", "gone"), "record")],
)  # fmt: skip
def test_service_that_can_begin_no_run_names_what_it_lacks(stage: Stage, error: NoRoom, cause: str) -> None:
    stage.start()
    service = ObservedService("home", None, None, lambda: error)
    assert find_causes(observe(stage, is_connected=lambda: True, service=service)) == [cause]


def test_disk_that_is_nearly_full_is_a_cause(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.start()
    monkeypatch.setattr(condition, "MIN_FREE_BYTES", 1 << 60)
    assert find_causes(observe(stage, is_connected=lambda: True)) == ["disk"]


def test_leader_that_the_database_does_not_confirm_is_not_ready(stage: Stage, postgresql: Postgresql) -> None:
    stage.start()
    leadership = Leadership(postgresql.schema())
    service = ObservedService("home", leadership, None, lambda: None)
    observed = observe(stage, is_connected=lambda: True, service=service)
    assert find_causes(observed) == ["leadership"]
    label = (("federation", "home"),)
    assert samples(CoordinatorCollector(observed))["fedvit_leader", label] == 0
    assert leadership.try_to_lead()
    assert find_causes(observed) == []
    found = samples(CoordinatorCollector(observed))
    assert (found["fedvit_leader", label], found["fedvit_leader_term", label]) == (1, leadership.term)
    leadership.close()


def test_metrics_of_a_standby(postgresql: Postgresql) -> None:
    url = postgresql.schema()
    leader, standby = Leadership(url), Leadership(url)
    try:
        assert leader.try_to_lead()
        assert not standby.try_to_lead()
        found = samples(StandbyCollector("home", standby, LoopWatch(0.2)))
        label = (("federation", "home"),)
        assert found["fedvit_leader", label] == found["fedvit_leader_term", label] == 0
        assert found["fedvit_standbys", label] == found["fedvit_record_up", ()] == 1
        assert find_standby_condition(standby) == Condition(ready=True, role="standby")
    finally:
        leader.close()
        standby.close()


def test_queue_and_clean_ups(stage: Stage) -> None:
    stage.start()
    observed = observe(stage)
    assert observed.service
    clean_ups = observed.service.clean_ups
    assert clean_ups
    collector = CoordinatorCollector(observed)
    found = samples(collector)
    assert found["fedvit_queue_length", ()] == found["fedvit_queue_oldest_seconds", ()] == 0
    assert found["fedvit_gc_age_seconds", ()] == math.inf
    assert found["fedvit_models", (("state", "champion"),)] == 0
    compare_on(stage.store, "r-1", {"a": FIRST}, after=0)
    stage.store.runs.submit("next", {"method": "fedavg"})
    left = stage.out / "of-no-run"
    left.mkdir()
    (left / "coordinator.log").write_bytes(bytes(1000))
    clean_ups.clean(threading.Event())
    found = samples(collector)
    assert found["fedvit_queue_length", ()] == 1
    assert found["fedvit_models", (("state", "champion"),)] == 1
    assert found["fedvit_queue_oldest_seconds", ()] >= 0
    assert 0 <= found["fedvit_gc_age_seconds", ()] < math.inf
    assert found["fedvit_gc_freed_bytes_total", ()] == clean_ups.freed_bytes


def test_a_database_that_is_gone_is_named_before_the_broker(tmp_path: Path) -> None:
    """Without its record a coordinator leaves the broker: that connection is not the cause."""
    with closing(Postgresql()) as server:
        store = Record(Database(server.schema()))
        link = MemoryTransport(SimpleQueue(), MemoryBroker(), "coordinator")
        observed = Observed(link, lambda: False, store, tmp_path, lambda: (), {})
        assert find_causes(observed) == ["broker"]
        server.stop()
        [cause] = find_condition(observed).causes
        assert cause.cause == "record"
        assert cause.reason.startswith("the record cannot be read: database postgresql")
        store.close()


def observed_record(store: Record, stage: Stage) -> CoordinatorCollector:
    """Metrics of a record that was made by hand, as if its run were served by the stage's coordinator."""
    assert stage.coordinator is not None
    stage.coordinator.state.run = RUN
    served = [Served(stage.coordinator, LoopWatch(0.1))]
    link = stage.coordinator.transport
    return CoordinatorCollector(Observed(link, lambda: True, store, stage.out, lambda: served, {}))


def test_only_the_first_devices_have_a_series(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.fake("a")
    stage.start()
    assert stage.finish() == "finished"
    store = begin_run(tmp_path / "others")
    collector = observed_record(store, stage)
    peak = {labels: value for (name, labels), value in samples(collector).items() if name.endswith("peak_rss_bytes")}
    assert peak == {(("device", "a"), ("run", RUN)): 120_000_000}
    monkeypatch.setattr(collector_module, "MOST_DEVICES", 0)
    found = samples(collector)
    assert not [name for name, _ in found if name == "fedvit_device_peak_rss_bytes"]
    assert found["fedvit_devices_unlisted", (("run", RUN),)] == len(store.devices.read_totals(RUN)) > 0
    assert found["fedvit_upload_bytes_total", (("run", RUN),)] == 3_100_000
    store.close()


def test_record_that_cannot_be_read_is_reported_and_fails_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.fake("a")
    stage.start()
    assert stage.finish() == "finished"
    collector = collector_of(stage)

    def broken(*_: object) -> None:
        raise StorageFailed("FV0010", "the disk is gone")

    monkeypatch.setattr(stage.store.runs, "count", broken)
    found = samples(collector)
    assert found["fedvit_record_up", ()] == 0
    assert found["fedvit_round", (("run", "r"),)] == 1


def used() -> set[str]:
    """Metrics that the board and the alerts name."""
    board = json.loads((DEPLOY / "grafana" / "fedvit.json").read_text())
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    texts += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "fedvit.rules.yml").read_text())
    texts += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    return {name for text in texts for name in re.findall(r"\bfedvit_\w+", text)}


def test_board_alerts_and_page_name_metrics_that_exist(stage: Stage, tmp_path: Path) -> None:
    """And the page lists all of them."""
    stage.fake("a")
    stage.start()
    assert stage.finish() == "finished"
    for number in range(8):
        file = tmp_path / "images" / str(number % 2) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(file)
    device = World(tmp_path / "images", tmp_path / "world").device(joined=False)
    loop = LoopWatch(TICK_S)
    of_coordinator = names(collector_of(stage))
    of_device = names(AgentCollector(device.agent.link, device.agent.state, tmp_path, loop, Sensors.find()))
    device.stop()
    # where there is a sensor
    optional = {"fedvit_device_temperature_celsius"}
    exist = of_coordinator | of_device | optional
    assert len(used()) > 25
    assert used() - exist == set()
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    named = set(re.findall(r"`(fedvit_\w+)", page))
    parts = {f"{name}_{part}" for name in exist for part in ("sum", "count")}
    assert (exist - parts) - named == set()
    assert named - exist == set()
