"""Runs over clusters of other brokers, of which a node is killed in the middle of a round: `make test-brokers`."""

import os
import signal
from pathlib import Path

import pytest

from fedvit.wire.messages import Progress
from tests.support.limiting import limiting
from tests.support.other_brokers import start_nats, start_rabbitmq
from tests.support.programs import DEVICES, SUMMED, Stage, wait_for


@pytest.mark.parametrize("killed", [0, 1], ids=["node-of-the-coordinator", "node-of-the-devices"])
def test_node_of_a_cluster_dies(stage: Stage, undisturbed: bytes, killed: int) -> None:
    """Behind a load balancer, clients of the dead node reach another one. Their last wills died with it: presence goes
    by hellos."""
    nodes = start_nats(stage.folder / "nats", 3)
    try:
        first, second, third = (node.address for node in nodes)
        with limiting(first, second, third) as ours, limiting(second, third, first) as theirs:
            stage.port = theirs.address.port
            coordinator = stage.coordinator(broker=f"mqtt://{ours.address}")
            devices = {name: stage.device(name) for name in DEVICES}
            stage.port = third.port
            observer = stage.observer()
            wait_for(observer.find(Progress, round=2, device="device-1"), "round 2")
            os.kill(nodes[killed].pid, signal.SIGKILL)
            stage.finish_run(coordinator, devices)
    finally:
        for node in nodes:
            node.stop()
    assert stage.model() == undisturbed


@pytest.mark.parametrize("kind", ["nats", "rabbitmq"])
def test_secure_sums_over_one_node(stage: Stage, calm_sums: bytes, tmp_path: Path, kind: str) -> None:
    if kind == "nats":
        nodes, after = start_nats(tmp_path / kind), lambda: None
    else:
        nodes, after = start_rabbitmq(tmp_path / kind)
    try:
        stage.port = nodes[0].address.port
        values = {**SUMMED, "secure": True, "devices": len(DEVICES)}
        coordinator = stage.coordinator(broker=f"mqtt://{nodes[0].address}", values=values)
        stage.finish_run(coordinator, {name: stage.device(name) for name in DEVICES})
    finally:
        for node in nodes:
            node.stop()
        after()
    assert stage.model() == calm_sums


def test_run_over_two_nodes_of_rabbitmq(stage: Stage, undisturbed: bytes, tmp_path: Path) -> None:
    """The coordinator at one node, the devices at the other."""
    nodes, after = start_rabbitmq(tmp_path / "rabbitmq", 2)
    try:
        stage.port = nodes[1].address.port
        coordinator = stage.coordinator(broker=f"mqtt://{nodes[0].address}")
        devices = {name: stage.device(name) for name in DEVICES}
        stage.finish_run(coordinator, devices)
    finally:
        for node in nodes:
            node.stop()
        after()
    assert stage.model() == undisturbed
