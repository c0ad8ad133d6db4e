"""The metrics of a device, read from its agent at each scrape; docs/monitoring.md lists them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from edge_client.health.history import AgentState
from edge_client.link.device_link import DeviceLink
from fedvit.monitoring import Cause, Condition
from fedvit.prometheus import loop_metrics, transport_metrics
from fedvit.timings import LoopWatch
from profiles.probes.host import free_disk_bytes
from profiles.probes.meter import Sensors

ANSWERS = ("result", "failed", "declined")


class AgentCollector(Collector):
    """The metrics of one agent, whose files are in `folder`."""

    def __init__(
        self, link: DeviceLink, state: Callable[[], AgentState], folder: Path, loop: LoopWatch, sensors: Sensors
    ) -> None:
        self._link = link
        self._state = state
        self._folder = folder
        self._loop = loop
        self._sensors = sensors

    def condition(self) -> Condition:
        """Return whether the device can take part now, and if not, why."""
        causes = []
        if not self._state().connected:
            causes.append(Cause("broker", "no connection to the broker"))
        if not os.access(self._folder, os.W_OK):
            causes.append(Cause("folder", f"{self._folder} is not writable"))
        return Condition(ready=not causes, role="device", causes=tuple(causes))

    def collect(self) -> Iterator[Metric]:
        state, identity = self._state(), self._link.identity
        info = GaugeMetricFamily(
            "fedvit_device_info", "Always 1; the labels identify the device.", labels=["device", "version"]
        )
        info.add_metric([identity.device, identity.software], 1)
        yield info
        yield GaugeMetricFamily("fedvit_broker_connected", "Whether the broker is connected.", state.connected)
        yield GaugeMetricFamily("fedvit_device_joined", "Whether a coordinator has answered the hello.", state.joined)
        work = GaugeMetricFamily("fedvit_device_at_work", "Whether a task is under way, by its kind.", labels=["kind"])
        answers = CounterMetricFamily(
            "fedvit_device_answers", "Answers to tasks since the start.", labels=["kind", "answer"]
        )
        for kind in ("train", "evaluate"):
            work.add_metric([kind], state.task is not None and state.task.kind == kind)
            for answer in ANSWERS:
                answers.add_metric([kind, answer], state.answers.get((kind, answer), 0))
        yield work
        yield answers
        yield GaugeMetricFamily(
            "fedvit_device_answers_waiting", "Answers that the coordinator has not acknowledged.", state.waiting
        )
        images = GaugeMetricFamily("fedvit_device_images", "Images of the device.", labels=["part"])
        images.add_metric(["train"], len(state.data.train))
        images.add_metric(["test"], len(state.data.test))
        yield images
        for name, text, value in (
            ("fedvit_device_temperature_celsius", "Processor.", self._sensors.thermometer.celsius()),
            ("fedvit_disk_free_bytes", "Free space for the state.", free_disk_bytes(self._folder)),
            ("fedvit_peak_rss_bytes", "Most resident memory of the device's processes.", state.memory.peak_bytes()),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, text, value)
        yield from transport_metrics(
            self._link.transport, [("agent", self._link.transport.inbox.qsize(), self._link.exchange)]
        )
        yield from loop_metrics({"agent": self._loop})
