"""A bit of a device's files is flipped in the middle of a run: the numbers of a calm run come out, or the device says
what is damaged. Never anything else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from edge_client import agent as agent_module
from edge_client import integrity as integrity_module
from fedvit.program import Program
from fedvit.tensors import Tensors, pack
from fedvit.updates import make_codec
from fedvit.wire.messages import Failed, Progress, Recipe, Result, Want
from tests.damage import flip
from tests.unit.edge_client.test_agent import Device, World, with_local_head, world

if TYPE_CHECKING:
    from tests.unit.edge_client.conftest import Setting

__all__ = ["world"]  # the fixture
ROUNDS = 3


class Run(NamedTuple):
    uploads: list[bytes]
    local: bytes
    told: list[str]


def run(
    world: World,
    setting: "Setting",
    program: Program,
    spoil: Callable[[Device], object] = lambda device: None,
    *,
    acknowledged: bool = True,
) -> Run:
    """Three rounds of one device; after the second it is stopped, `spoil` is done to its disk, and it starts again."""
    device = world.device()
    uploads, told = [], []
    for number in range(1, ROUNDS + 1):
        result = world.result(setting, program=program, round=number)
        told += result.damaged
        uploads.append(pack(world.server.fetch(result.upload)))
        if acknowledged or number != 2:
            world.server.acknowledge(result)
        world.server.roll_call()
        if number == 2:
            device.stop()
            spoil(device)
            device = world.device()
    local = device.vault.local("run")
    assert local is not None
    return Run(uploads, pack(local), told)


@pytest.fixture(scope="module")
def calm() -> dict[str, Run]:
    """By method: what a run gives to which nothing happens."""
    return {}


def calm_run(calm: dict[str, Run], method: str, broker_of: Callable[[], World], setting: "Setting") -> Run:
    if method not in calm:
        calm[method] = run(broker_of(), setting, program_of(method, setting))
    return calm[method]


def program_of(method: str, setting: "Setting") -> Program:
    return with_local_head(setting) if method == "fedavg" else setting.program


def blob(device: Device, digest: str) -> Path:
    return device.blobs.path(digest)


def spoilt_blob(kind: str, program: Program, task_program: str, group: str) -> str:
    match kind:
        case "graph":
            return program.graphs["train"].digest
        case "frozen weights":
            return next(group.initial for group in program.groups.values() if group.initial)
        case "program":
            return task_program
    return group
