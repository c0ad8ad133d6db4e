"""Reads the metrics of a coordinator from its runs and its record at each scrape, in the thread of the scrape."""

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from coordinator.record.record import Record
from coordinator.record.tables import RunStatus
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.tasks import TaskState
from coordinator.run_view import read_devices, read_newest_round
from fedvit.errors import FedvitError
from fedvit.prometheus import loop_metrics, transport_metrics
from fedvit.timings import LoopWatch
from fedvit.transport.base import Transport
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import TaskKind
from profiles.probes.host import free_disk_bytes

MOST_DEVICES = 1000
"""Devices of a run, the first by name, that have a metric of their own: Prometheus keeps a series for each."""
DEVICE_STATES = ("offline", "backing_off", "idle", "offered", "fetching", "working", "uploading", "checked")
OUTCOMES = ("accepted", "declined", "failed", "late", "deadline", "offline", "crashed", "revoked", "cancelled")
RUN_STATUSES: tuple[RunStatus, ...] = ("queued", "waiting", "running", "interrupted", "finished", "failed", "cancelled")
KINDS: tuple[TaskKind, ...] = ("train", "evaluate")


class Served(NamedTuple):
    """A run that is being served."""

    coordinator: Coordinator
    loop: LoopWatch

    @property
    def run(self) -> str:
        return self.coordinator.state.run


class Observed(NamedTuple):
    """What a collector reads. `loops`: further loops of the process by name, each with its inbox's transport."""

    link: Transport
    is_connected: Callable[[], bool]
    store: Record
    folder: Path  # of all runs
    served: Callable[[], Sequence[Served]]
    loops: dict[str, LoopWatch]


class CoordinatorCollector(Collector):
    """The metrics of one process that serves runs."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def loops(self) -> list[LoopWatch]:
        return [*self._observed.loops.values(), *(run.loop for run in self._observed.served())]

    def why_not_ready(self) -> str | None:
        """The reason why devices cannot be served now; None if they can."""
        try:
            self._observed.store.runs.count()
        except FedvitError as error:  # first: without the record, a coordinator gives up its broker, too
            return f"the record cannot be read: {error}"
        return None if self._observed.is_connected() else "no connection to the broker"

    def collect(self) -> Iterator[Metric]:
        observed, served = self._observed, self._observed.served()
        info = GaugeMetricFamily("fedvit_coordinator_info", "Always 1.", labels=["version"])
        info.add_metric([version("fedvit")], 1)
        yield info
        yield GaugeMetricFamily("fedvit_broker_connected", "Whether the broker is connected.", observed.is_connected())
        if (free_bytes := free_disk_bytes(observed.folder)) is not None:
            yield GaugeMetricFamily("fedvit_disk_free_bytes", "Free space for the runs.", free_bytes)
        inboxes: list[tuple[str, int, BlobExchange | None]] = [
            (name, observed.link.inbox.qsize(), None) for name in observed.loops
        ]
        inboxes += [(run.run, run.coordinator.transport.inbox.qsize(), run.coordinator.exchange) for run in served]
        yield from transport_metrics(observed.link, inboxes)
        yield from loop_metrics({**observed.loops, **{run.run: run.loop for run in served}})
        yield from _of_runs(served)
        yield from self._of_record(served)

    def _of_record(self, served: Sequence[Served]) -> Iterator[Metric]:
        """Metrics of the record; if it cannot be read, only that."""
        store = self._observed.store
        try:
            families = [*_of_all_runs(store), *_of_rounds(store, [run.run for run in served])]
        except FedvitError:
            families = []
        yield GaugeMetricFamily("fedvit_record_up", "Whether the record can be read.", bool(families))
        yield SummaryMetricFamily(
            "fedvit_record_commit_seconds",
            "Time of commits to the record, with their syncs.",
            store.database.commits.count,
            store.database.commits.total_s,
        )
        yield GaugeMetricFamily(
            "fedvit_record_longest_commit_seconds",
            "Longest commit of the last one to two minutes.",
            store.database.commits.longest_s(),
        )
        yield from families


def _of_runs(served: Sequence[Served]) -> Iterator[Metric]:
    """What the processes of runs know."""
    info = GaugeMetricFamily(
        "fedvit_run_info", "Always 1; a run that is being served.", labels=["run", "method", "model"]
    )
    number = GaugeMetricFamily("fedvit_round", "The current or last round.", labels=["run"])
    planned = GaugeMetricFamily("fedvit_rounds_planned", "Rounds of the whole run.", labels=["run"])
    awaited = GaugeMetricFamily(
        "fedvit_round_awaited_devices", "Devices of the open round that have not answered.", labels=["run"]
    )
    devices = GaugeMetricFamily("fedvit_devices", "Devices by what they do.", labels=["run", "state"])
    results = CounterMetricFamily(
        "fedvit_results", "Tasks by how they ended, since the process began.", labels=["run", "kind", "outcome"]
    )
    refusals = CounterMetricFamily(
        "fedvit_refusals", "Refusals by reason, since the process began.", labels=["run", "reason"]
    )
    uploads = GaugeMetricFamily("fedvit_uploads_waiting", "Uploads that wait for their turn.", labels=["run"])
    for run, coordinator in ((run.run, run.coordinator) for run in served):
        state, config = coordinator.state, coordinator.state.config
        info.add_metric([run, config.method, config.model], 1)
        number.add_metric([run], state.number)
        planned.add_metric([run], config.rounds)
        opened = state.opened
        awaited.add_metric([run], len(opened.waiting_for()) if opened else 0)
        for name, count in _device_states(coordinator).items():
            devices.add_metric([run, name], count)
        for kind in KINDS:
            for outcome in OUTCOMES:
                results.add_metric([run, kind, outcome], state.tasks.ended[kind, TaskState(outcome)])
        for reason, count in dict(state.refusals).items():
            refusals.add_metric([run, reason], count)
        uploads.add_metric([run], len(coordinator.uploads.waiting()))
    yield from (info, number, planned, awaited, devices, results, refusals, uploads)


def _device_states(coordinator: Coordinator) -> dict[str, int]:
    """Number of devices in each of DEVICE_STATES."""
    counts = dict.fromkeys(DEVICE_STATES, 0)
    tasks, presence = coordinator.state.tasks, coordinator.state.presence
    for device in presence.all():
        task = tasks.of(device.name)
        if not presence.is_online(device.name):
            name = "offline"
        elif task:
            name = task.state.value
        else:
            name = "backing_off" if device.is_backing_off() else "idle"
        if name in counts:  # a task that has just ended is not counted in this moment
            counts[name] += 1
    return counts


def _of_all_runs(store: Record) -> Iterator[Metric]:
    runs = GaugeMetricFamily("fedvit_runs", "Runs of the record by status.", labels=["status"])
    known = store.runs.count()
    for status in RUN_STATUSES:
        runs.add_metric([status], known.get(status, 0))
    yield runs


def _of_rounds(store: Record, served: Sequence[str]) -> Iterator[Metric]:
    """The newest closed and evaluated rounds, and the devices, of runs that are being served."""
    accuracy = GaugeMetricFamily(
        "fedvit_accuracy_ratio", "Accuracy over devices in the newest evaluation.", labels=["run", "over"]
    )
    loss = GaugeMetricFamily("fedvit_train_loss", "Mean training loss of the newest closed round.", labels=["run"])
    seconds = GaugeMetricFamily("fedvit_round_seconds", "Duration of the newest closed round.", labels=["run", "part"])
    cohort = GaugeMetricFamily("fedvit_round_devices", "Devices of the newest closed round.", labels=["run", "were"])
    down = CounterMetricFamily(
        "fedvit_download_bytes", "Bytes that devices received, in closed rounds.", labels=["run"]
    )
    up = CounterMetricFamily("fedvit_upload_bytes", "Bytes that devices sent, in closed rounds.", labels=["run"])
    peak = GaugeMetricFamily(
        "fedvit_device_peak_rss_bytes", "Most resident memory of a device in closed rounds.", labels=["run", "device"]
    )
    unlisted = GaugeMetricFamily(
        "fedvit_devices_unlisted", f"Devices beyond the first {MOST_DEVICES}, without metrics of their own.",
        labels=["run"],
    )  # fmt: skip
    for run in served:
        if evaluated := read_newest_round(store, run, evaluated=True):
            for over in ("mean", "lowest", "highest"):
                if (value := getattr(evaluated, f"accuracy_{over}")) is not None:
                    accuracy.add_metric([run, over], value)
        if closed := read_newest_round(store, run):
            if closed.train_loss is not None:
                loss.add_metric([run], closed.train_loss)
            for part, took_s in (("devices", closed.devices_s), ("server", closed.server_s)):
                if took_s is not None:
                    seconds.add_metric([run, part], took_s)
            cohort.add_metric([run, "asked"], closed.cohort)
            cohort.add_metric([run, "accepted"], closed.accepted)
        views = read_devices(store, run)
        down.add_metric([run], sum(view.bytes_down for view in views))
        up.add_metric([run], sum(view.bytes_up for view in views))
        for view in views[:MOST_DEVICES]:
            if view.peak_rss_bytes is not None:
                peak.add_metric([run, view.device], view.peak_rss_bytes)
        unlisted.add_metric([run], max(0, len(views) - MOST_DEVICES))
    yield from (accuracy, loss, seconds, cohort, down, up, peak, unlisted)
