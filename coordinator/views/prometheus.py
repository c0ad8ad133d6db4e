"""Reads the metrics of a coordinator from its runs and its record at each scrape, in the thread of the scrape."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from coordinator.record.record import Record
from coordinator.record.tables import RunStatus
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.state import PauseCause
from coordinator.rounds.tasks import TaskState
from coordinator.run_view import DeviceView, RoundView, read_devices, read_newest_round
from coordinator.views.condition import find_pauses
from coordinator.views.observed import Observed, Served
from coordinator.views.prometheus_service import count_models, make_info, read_queue, read_service
from fedvit.errors import FedvitError
from fedvit.prometheus import loop_metrics, transport_metrics
from fedvit.timings import LoopWatch
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import TaskKind
from profiles.probes.host import free_disk_bytes

T = TypeVar("T")

MOST_DEVICES = 1000
"""Devices of a run, the first by name, that have a metric of their own: Prometheus keeps a series for each."""
DEVICE_STATES = ("offline", "backing_off", "idle", "offered", "fetching", "working", "uploading", "checked")
PAUSE_CAUSES: tuple[PauseCause, ...] = get_args(PauseCause)
OUTCOMES = ("accepted", "declined", "failed", "late", "deadline", "offline", "crashed", "revoked", "cancelled")
RUN_STATUSES: tuple[RunStatus, ...] = ("queued", "waiting", "running", "interrupted", "finished", "failed", "cancelled")
KINDS: tuple[TaskKind, ...] = ("train", "evaluate")


class CoordinatorCollector(Collector):
    """The metrics of one process that serves runs."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def loops(self) -> list[LoopWatch]:
        return [*self._observed.loops.values(), *(run.loop for run in self._observed.served())]

    def collect(self) -> Iterator[Metric]:
        observed, served = self._observed, self._observed.served()
        yield make_info()
        yield GaugeMetricFamily("fedvit_broker_connected", "Whether the broker is connected.", observed.is_connected())
        if (free_bytes := free_disk_bytes(observed.folder)) is not None:
            yield GaugeMetricFamily("fedvit_disk_free_bytes", "Free space for the runs.", free_bytes)
        if observed.backup_age_s is not None:
            age_s = observed.backup_age_s()
            yield GaugeMetricFamily("fedvit_backup_age_seconds", "Time since the newest backup; +Inf: none.", age_s)
        if observed.service is not None:
            yield from read_service(observed.service, observed.store)
        inboxes: list[tuple[str, int, BlobExchange | None]] = [
            (name, observed.link.inbox.qsize(), None) for name in observed.loops
        ]
        inboxes += [(run.run, run.coordinator.transport.inbox.qsize(), run.coordinator.exchange) for run in served]
        yield from transport_metrics(observed.link, inboxes)
        yield from loop_metrics({**observed.loops, **{run.run: run.loop for run in served}})
        yield from _read_families(RUN_FAMILIES, {run.run: run.coordinator for run in served})
        yield from self._read_record(served)
        yield from read_certificate_metrics(observed)

    def _read_record(self, served: Sequence[Served]) -> Iterator[Metric]:
        """Metrics of the record; if it cannot be read, only that."""
        store = self._observed.store
        try:
            families = [*_read_record(store, served)]
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


def read_certificate_metrics(observed: Observed) -> Iterator[Metric]:
    """Read when certificates end; nothing without a deployment, or if its registry cannot be read."""
    try:
        ends = observed.certificates() if observed.certificates else None
    except FedvitError:
        return
    if ends is None:
        return
    left = GaugeMetricFamily(
        "fedvit_certificate_expires_seconds", "Time until a certificate ends.", labels=["certificate"]
    )
    for name, left_s in ends.left_s.items():
        left.add_metric([name], left_s)
    yield left
    yield GaugeMetricFamily(
        "fedvit_devices_certificate_ending",
        "Devices whose certificate has ended, or was not renewed in time.",
        ends.ending_devices,
    )


Values = float | None | Mapping[Any, float | None]
"""The value of a run, or its values by label or tuple of labels; None: not measured."""


def _count_devices(coordinator: Coordinator) -> Values:
    """Count the devices in each of DEVICE_STATES."""
    counts = dict.fromkeys(DEVICE_STATES, 0)
    tasks, presence = coordinator.state.tasks, coordinator.state.presence
    for device in presence:
        task = tasks.of(device.name)
        if not presence.is_online(device.name):
            name = "offline"
        elif task:
            name = task.state.value
        else:
            name = "backing_off" if device.backoff.is_on() else "idle"
        if name in counts:  # a task that has just ended is not counted in this moment
            counts[name] += 1
    return counts


class RunFigures(NamedTuple):
    """Closed rounds and devices of a run that is being served."""

    evaluated: RoundView | None  # the newest
    closed: RoundView | None
    devices: list[DeviceView]


class Family(NamedTuple, Generic[T]):
    """A metric of runs, read from the subject that stands for a run."""

    name: str
    text: str
    read: Callable[[T], Values]
    labels: tuple[str, ...] = ()  # beside `run`
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily


def _read_families(families: Sequence[Family[T]], subjects: Mapping[str, T]) -> Iterator[Metric]:
    """Read all metrics of all runs, by the runs' names."""
    for family in families:
        metric = family.kind(family.name, family.text, labels=["run", *family.labels])
        for run, subject in subjects.items():
            values = family.read(subject)
            for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
                if value is not None:
                    names = (labels,) if isinstance(labels, str) else labels
                    metric.add_metric([run, *names], value)
        yield metric


def _count_results(coordinator: Coordinator) -> Values:
    ended = coordinator.state.tasks.ended
    return {(kind, outcome): ended[kind, TaskState(outcome)] for kind in KINDS for outcome in OUTCOMES}


RUN_FAMILIES: tuple[Family[Coordinator], ...] = (
    Family(
        "fedvit_run_info", "Always 1; a run that is being served.",
        lambda run: {(run.state.config.method, run.state.config.model): 1}, ("method", "model"),
    ),
    Family("fedvit_round", "The current or last round.", lambda run: run.state.number),
    Family("fedvit_rounds_planned", "Rounds of the whole run.", lambda run: run.state.config.rounds),
    Family(
        "fedvit_round_awaited_devices", "Devices of the open round that have not answered.",
        lambda run: len(opened.waiting_for()) if (opened := run.state.opened) else 0,
    ),
    Family("fedvit_devices", "Devices by what they do.", _count_devices, ("state",)),
    Family(
        "fedvit_results", "Tasks by how they ended, since the process began.", _count_results, ("kind", "outcome"),
        CounterMetricFamily,
    ),
    Family(
        "fedvit_refusals", "Refusals by reason, since the process began.",
        lambda run: dict(run.state.refusals), ("reason",),
        CounterMetricFamily,
    ),
    Family("fedvit_uploads_waiting", "Uploads that wait for their turn.", lambda run: len(run.uploads.waiting())),
    Family(
        "fedvit_object_store_up", "Whether the run's object store can be used; of runs that have one.",
        lambda run: not run.objects.trouble if run.objects else None,
    ),
    Family(
        "fedvit_run_paused", "Whether the run is paused, by cause.",
        lambda run: dict.fromkeys(PAUSE_CAUSES, 0) | {pause.cause: 1 for pause in find_pauses(run)}, ("reason",),
    ),
)  # fmt: skip
"""Metrics that the processes of runs have."""
RECORD_FAMILIES: tuple[Family[RunFigures], ...] = (
    Family(
        "fedvit_accuracy_ratio", "Accuracy over devices in the newest evaluation.",
        lambda run: {over: getattr(run.evaluated, f"accuracy_{over}", None) for over in ("mean", "lowest", "highest")},
        ("over",),
    ),
    Family(
        "fedvit_train_loss", "Mean training loss of the newest closed round.",
        lambda run: run.closed.train_loss if run.closed else None,
    ),
    Family(
        "fedvit_round_seconds", "Duration of the newest closed round.",
        lambda run: {"devices": run.closed.devices_s, "server": run.closed.server_s} if run.closed else {},
        ("part",),
    ),
    Family(
        "fedvit_round_devices", "Devices of the newest closed round.",
        lambda run: {"asked": run.closed.cohort, "accepted": run.closed.accepted} if run.closed else {},
        ("were",),
    ),
    Family(
        "fedvit_download_bytes", "Bytes that devices received, in closed rounds.",
        lambda run: sum(device.bytes_down for device in run.devices), kind=CounterMetricFamily,
    ),
    Family(
        "fedvit_upload_bytes", "Bytes that devices sent, in closed rounds.",
        lambda run: sum(device.bytes_up for device in run.devices), kind=CounterMetricFamily,
    ),
    Family(
        "fedvit_device_peak_rss_bytes", "Most resident memory of a device in closed rounds.",
        lambda run: {device.device: device.peak_rss_bytes for device in run.devices[:MOST_DEVICES]}, ("device",),
    ),
    Family(
        "fedvit_devices_unlisted", f"Devices beyond the first {MOST_DEVICES}, without metrics of their own.",
        lambda run: max(0, len(run.devices) - MOST_DEVICES),
    ),
)  # fmt: skip
"""Metrics that the record has of the runs that are being served."""


def _read_record(store: Record, served: Sequence[Served]) -> Iterator[Metric]:
    """Read the runs by status, and the newest figures of those that are being served."""
    runs = GaugeMetricFamily("fedvit_runs", "Runs of the record by status.", labels=["status"])
    counts = store.runs.count()
    for status in RUN_STATUSES:
        runs.add_metric([status], counts.get(status, 0))
    yield runs
    yield from read_queue(store)
    yield from count_models(store)
    figures = {
        run: RunFigures(
            read_newest_round(store, run, evaluated=True), read_newest_round(store, run), read_devices(store, run)
        )
        for run in (one.run for one in served)
    }
    yield from _read_families(RECORD_FAMILIES, figures)
