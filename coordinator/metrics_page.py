"""The page for Prometheus of `coordinator start` and `serve`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.rounds.display import Display
from fedvit.monitoring import Monitor, Watched

if TYPE_CHECKING:
    from coordinator.views.prometheus import Observed


def show_prometheus(monitor: Monitor, display: Display, observe: "Callable[[], Observed]") -> None:
    """Serve the metrics of `observe`, if the operator asked for a page; it is called only then."""

    def watch() -> Watched:
        from coordinator.views.prometheus import CoordinatorCollector  # prometheus_client, which is optional

        collector = CoordinatorCollector(observe())
        return Watched(collector, collector.loops, collector.why_not_ready)

    monitor.show(watch)
    if monitor.url:
        display.line(f"metrics: {monitor.url}")
