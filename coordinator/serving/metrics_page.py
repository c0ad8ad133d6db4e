"""The page for Prometheus of `coordinator start` and `serve`."""

from importlib import import_module

from coordinator.rounds.display import Display
from coordinator.views.observed import Observed
from fedvit.monitoring import Monitor, Watched


def show_prometheus(monitor: Monitor, display: Display, observed: Observed) -> None:
    """Serve the metrics of the sources, if the operator asked for a page."""

    def watch() -> Watched:
        views = import_module("coordinator.views.prometheus")  # late: prometheus_client is optional
        collector = views.CoordinatorCollector(observed)
        return Watched(collector, collector.loops, collector.why_not_ready)

    monitor.show(watch)
    if monitor.url:
        display.line(f"metrics: {monitor.url}")
