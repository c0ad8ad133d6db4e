"""The page for Prometheus of `coordinator start` and `serve`."""

from importlib import import_module

from coordinator.record.leadership import Leadership
from coordinator.rounds.display import Display
from coordinator.views.condition import find_condition, find_standby_condition
from coordinator.views.observed import Observed
from fedvit.monitoring import Monitor, Watched
from fedvit.timings import LoopWatch


def show_prometheus(monitor: Monitor, display: Display, observed: Observed) -> None:
    """Serve the metrics of the sources, if the operator asked for a page."""

    def watch() -> Watched:
        views = import_module("coordinator.views.prometheus")  # late: prometheus_client is optional
        collector = views.CoordinatorCollector(observed)
        return Watched(collector, collector.loops, lambda: find_condition(observed))

    monitor.show(watch)
    if monitor.url:
        display.line(f"metrics: {monitor.url}")


def show_standby(monitor: Monitor, federation: str, leadership: Leadership, loop: LoopWatch) -> None:
    """Serve the metrics of a standby, if the operator asked for a page."""

    def watch() -> Watched:
        views = import_module("coordinator.views.prometheus_service")  # late: prometheus_client is optional
        collector = views.StandbyCollector(federation, leadership, loop)
        return Watched(collector, lambda: [loop], lambda: find_standby_condition(leadership))

    monitor.show(watch)
