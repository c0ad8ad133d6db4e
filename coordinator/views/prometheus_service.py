"""Metrics of a service beside those of its runs: who leads, its queue, its clean-ups; and all metrics of a standby."""

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.record.leadership import Leadership, ServiceHost
from coordinator.record.record import Record
from coordinator.record.tables import ModelStage
from coordinator.views.observed import ObservedService
from fedvit.errors import FedvitError
from fedvit.prometheus import loop_metrics
from fedvit.timings import LoopWatch


class StandbyCollector(Collector):
    """The metrics of a service that stands by: by its role 0, so that a takeover is seen in one metric."""

    def __init__(self, federation: str, leadership: Leadership, loop: LoopWatch) -> None:
        self._federation = federation
        self._leadership = leadership
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        yield make_info()
        yield from _read_leadership(self._federation, leads=False, term=0)
        try:
            services = self._leadership.list_services()
        except FedvitError:
            services = None
        yield GaugeMetricFamily("fedvit_record_up", "Whether the record can be read.", services is not None)
        yield from _count_standbys(self._federation, services)
        yield from loop_metrics({"standby": self._loop})


def make_info() -> Metric:
    """Return the metric that names the version."""
    info = GaugeMetricFamily("fedvit_coordinator_info", "Always 1.", labels=["version"])
    info.add_metric([version("fedvit")], 1)
    return info


def read_service(service: ObservedService, store: Record) -> Iterator[Metric]:
    """Metrics of a service that leads. Those that need the record are left out while it cannot be read."""
    leadership = service.leadership
    leads = leadership is None or leadership.is_current()
    yield from _read_leadership(service.federation, leads=leads, term=leadership.term if leadership else 0)
    try:
        services = store.database.services()
    except FedvitError:
        services = None
    yield from _count_standbys(service.federation, services)
    if clean_ups := service.clean_ups:
        age_s = clean_ups.age_s()
        yield GaugeMetricFamily("fedvit_gc_age_seconds", "Time since the newest clean-up; +Inf: none.", age_s)
        yield CounterMetricFamily("fedvit_gc_freed_bytes", "Bytes that clean-ups freed.", clean_ups.freed_bytes)


def read_queue(store: Record) -> Iterator[Metric]:
    """Length and age of the queue of runs. Raises FedvitError if the record cannot be read."""
    submitted = store.runs.read_queue()
    oldest_s = (datetime.now(UTC) - datetime.fromisoformat(submitted[0])).total_seconds() if submitted else 0.0
    yield GaugeMetricFamily("fedvit_queue_length", "Submitted runs that have not begun.", len(submitted))
    yield GaugeMetricFamily("fedvit_queue_oldest_seconds", "Wait of the oldest of them.", max(0.0, oldest_s))


def count_models(store: Record) -> Iterator[Metric]:
    """Numbers of models by state. Raises FedvitError if the record cannot be read."""
    models = GaugeMetricFamily("fedvit_models", "Models by state.", labels=["state"])
    counted = store.models.count_stages()
    for stage in get_args(ModelStage):
        models.add_metric([stage], counted.get(stage, 0))
    yield models
    yield GaugeMetricFamily(
        "fedvit_devices_drifted", "Devices whose pictures have drifted from those of their model.",
        store.models.count_drifted(),
    )  # fmt: skip


def _read_leadership(federation: str, *, leads: bool, term: int) -> Iterator[Metric]:
    leader = GaugeMetricFamily("fedvit_leader", "Whether this service leads.", labels=["federation"])
    leader.add_metric([federation], leads)
    yield leader
    terms = GaugeMetricFamily("fedvit_leader_term", "Term in which this service leads.", labels=["federation"])
    terms.add_metric([federation], term)
    yield terms


def _count_standbys(federation: str, services: list[ServiceHost] | None) -> Iterator[Metric]:
    if services is not None:
        standbys = GaugeMetricFamily("fedvit_standbys", "Services that stand by.", labels=["federation"])
        standbys.add_metric([federation], sum(not service.leads for service in services))
        yield standbys
