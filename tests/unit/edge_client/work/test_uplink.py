"""What an agent does with codecs: error feedback from round to round, and blobs that it makes by recipes.

The device is real, the test is the coordinator.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedvit.blobs import digest_of
from fedvit.program import Program
from fedvit.tensors import Tensors, delta, pack
from fedvit.updates import decode, make_codec
from fedvit.wire.messages import DeltaStep, Result
from tests.support.agents import World, train_here, with_a_patch
from tests.support.settings import Setting


def make_coded(setting: Setting, up: str) -> Program:
    groups = {name: msgspec.structs.replace(group, up=up) for name, group in setting.program.groups.items()}
    return msgspec.structs.replace(setting.program, groups=groups)


def round_of(world: World, setting: Setting, program: Program, number: int, *, accepted: bool | None) -> Tensors:
    """One round's upload as it came; `accepted` None: the coordinator says nothing."""
    result = world.result(setting, program=program, round=number)
    upload = world.server.fetch(result.upload)
    if accepted is not None:
        world.server.acknowledge(result, accepted=accepted)
        world.server.mark()
    return upload


@pytest.mark.parametrize("up", ["int8", "top_k:share=0.05"])
def test_what_coding_left_out_comes_with_the_next_result(world: World, fedavg: Setting, digits: Path, up: str) -> None:
    """Accepted, refused, accepted again, with a restart between: every upload is the round's delta and what was still
    owed, coded; every round begins with the same values."""
    world.device()
    program, start, codec = make_coded(fedavg, up), fedavg.start(), make_codec(up)
    residual: Tensors = {}
    for number, accepted in ((1, True), (2, False), (3, None), (4, True), (5, True)):
        trained = train_here(fedavg, program, start, digits, round=number)
        total = delta({name: trained.get(name, value) for name, value in start.items()}, start)
        total = {name: value + residual.get(name, np.float32(0)) for name, value in total.items()}
        upload = round_of(world, fedavg, program, number, accepted=accepted)
        expected = codec.encode(total)
        assert pack(upload) == pack(expected), f"round {number}"
        if accepted:
            got = decode(expected, {name: spec.shape for name, spec in program.tensors.items()})
            residual = {name: value - got[name] for name, value in total.items()}
        if number == 1:
            world.devices[-1].stop()
            world.device()


def test_a_device_makes_a_blob_from_what_it_has(world: World, fedavg: Setting) -> None:
    """It fetches the patch alone, and trains from the very target."""
    device = world.device()
    old, new, delta_step = with_a_patch(world, fedavg, honest=True)
    first = world.result(fedavg, kind="evaluate", group_values={"model": old})
    world.server.acknowledge(first)
    second = world.result(fedavg, round=2, kind="evaluate", group_values={"model": new}, recipes=(delta_step,))
    assert second.use.fetched_bytes == delta_step.patch.size
    assert device.blobs.get(delta_step.target) == pack(new)
    world.server.acknowledge(second)
    third = world.result(fedavg, round=3, kind="evaluate", group_values={"model": new}, recipes=(delta_step,))
    assert third.use.fetched_bytes == 0
    assert not device.blobs.has(delta_step.base), "what it began with is not kept for longer than needed"


def test_a_device_without_the_base_fetches_the_whole(world: World, fedavg: Setting) -> None:
    world.device()
    _, new, delta_step = with_a_patch(world, fedavg, honest=True)
    result = world.result(fedavg, kind="evaluate", group_values={"model": new}, recipes=(delta_step,))
    assert isinstance(result, Result)
    assert result.use.fetched_bytes is not None
    assert result.use.fetched_bytes > len(pack(new))


def test_delta_chain_with_another_result_is_reported_and_not_used_again(world: World, fedavg: Setting) -> None:
    device = world.device()
    old, new, delta_step = with_a_patch(world, fedavg, honest=False)
    world.server.acknowledge(world.result(fedavg, kind="evaluate", group_values={"model": old}))
    task = {"kind": "evaluate", "group_values": {"model": new}, "recipes": (delta_step,)}
    reason = world.failure(fedavg, round=2, **task)
    assert delta_step.target in reason
    assert not device.blobs.has(delta_step.target)
    result = world.result(fedavg, round=3, **task)
    assert result.use.fetched_bytes == len(pack(new))


def test_delta_steps_in_a_circle_end_the_task_and_not_the_device(world: World, fedavg: Setting) -> None:
    """Every digest leads to every other one: 24! ways. The next task is done."""
    world.device()
    _, new, delta_step = with_a_patch(world, fedavg, honest=True)
    names = [delta_step.target, *(digest_of(bytes([number])) for number in range(23))]
    circle = tuple(
        DeltaStep(target, base, delta_step.patch) for target, base in zip(names, (*names[1:], names[0]), strict=True)
    )
    woven = tuple(DeltaStep(one, other, delta_step.patch) for one in names[:12] for other in names[:12] if one != other)
    for number, steps in enumerate((circle, woven), 1):
        reason = world.failure(fedavg, round=number, kind="evaluate", group_values={"model": new}, recipes=steps)
        assert "circle" in reason
    assert isinstance(world.result(fedavg, round=3, kind="evaluate", group_values={"model": new}), Result)
