from pathlib import Path

from prometheus_client import CollectorRegistry

from edge_client.agent import TICK_S
from edge_client.health.monitoring import AgentCollector
from fedvit.monitoring import Condition
from fedvit.timings import LoopWatch
from fedvit.wire.messages import Failed
from profiles.probes.meter import Sensors
from tests.support.agents import FAR_OFF, World
from tests.support.settings import Setting


def test_metrics_of_a_device(world: World, fedavg: Setting, tmp_path: Path) -> None:
    """It has done one task, and failed another one."""
    device = world.device()
    registry = CollectorRegistry()
    collector = AgentCollector(device.agent.link, device.agent.state, tmp_path, LoopWatch(TICK_S), Sensors.find())
    registry.register(collector)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("fedvit_device_answers_total", kind="evaluate", answer="failed") == 1  # a task without blobs
    result = world.result(fedavg)
    assert value("fedvit_device_answers_waiting") == 1
    world.server.acknowledge(result)
    world.server.wait(lambda: value("fedvit_device_answers_waiting") == 0)
    world.give(fedavg, round=2, groups={"model": FAR_OFF})
    world.server.expect(Failed)
    assert value("fedvit_device_answers_total", kind="train", answer="result") == 1
    assert value("fedvit_broker_connected") == value("fedvit_device_joined") == 1
    assert value("fedvit_device_at_work", kind="train") == 0
    assert value("fedvit_device_images", part="train") == len(device.agent.storage.data.train)
    assert value("fedvit_device_info", device="pi", version="9.9") == 1
    assert value("fedvit_sent_bytes_total")
    assert value("fedvit_peak_rss_bytes")
    assert collector.condition() == Condition(ready=True, role="device")
    world.broker.stop()
    world.server.wait(lambda: [cause.cause for cause in collector.condition().causes] == ["broker"])
    assert not collector.condition().ready


def test_failure_of_a_task_brings_the_last_log_lines(world: World, fedavg: Setting) -> None:
    """What the device's log gives at that moment."""
    world.device(recent_log=lambda: "the last lines")
    world.give(fedavg, groups={"model": FAR_OFF})
    assert world.server.expect(Failed).log == "the last lines"
