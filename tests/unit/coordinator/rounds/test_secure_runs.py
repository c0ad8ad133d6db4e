"""Whole secure runs in memory: the model is that of a plain run, and devices send masked numbers only."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvit.wire.messages import FromDevice, SumMasked, Task
from tests.support.runs import Configure, Fake, Stage
from tests.support.summing import SummingFake

DEVICES = {"a": 3, "b": 41, "c": 7}
"""Images of each device."""


def answer_drawn(device: Fake, task: Task) -> None:
    """Answer with an update that differs by device, round and tensor."""
    draw = np.random.default_rng(zlib.crc32(f"{device.name} {task.round}".encode()))
    updates = sorted(device.upload(task).items())
    device.bring(device.answer(task, {name: np.float32(draw.normal(0.0, 0.01, old.shape)) for name, old in updates}))


class Counting(SummingFake):
    """A device that counts the bytes of its masked updates, by round."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.sent: dict[int, int] = {}
        super().__init__(*arguments, **options)

    def say(self, message: FromDevice) -> None:
        if isinstance(message, SumMasked) and message.sum.kind == "train":
            self.sent[message.sum.round] = message.vector.size
        super().say(message)


@pytest.mark.parametrize(("codec", "bits"), [("fp16", 16), ("int8", 16), ("none", 32)])
def test_codec_has_fewer_bits_from_the_second_round_on(
    configure: Configure, tmp_path: Path, graph_cache: Path, codec: str, bits: int
) -> None:
    """The range follows from the devices' largest numbers, so that 16 bits are fine enough."""
    secure, plain = (Stage(tmp_path / name, configure, graph_cache) for name in ("secure", "plain"))
    for name, samples in DEVICES.items():
        secure.fake(name, answer_drawn, samples=samples, kind=Counting)
        plain.fake(name, answer_drawn, samples=samples)
    secure.start(devices=3, rounds=3, secure=True, updates={"up": codec})
    plain.start(devices=3, rounds=3)
    assert [secure.finish(), plain.finish()] == ["finished"] * 2
    numbers = sum(value.size for value in plain.model().values())
    for device in secure.fakes:
        assert isinstance(device, Counting)
        assert {number: size // numbers for number, size in device.sent.items()} == {1: 4, 2: bits // 8, 3: bits // 8}
    figures = [entry.figures for entry in secure.store.rounds.read_all("r")]
    assert [entry["sum_clipped"] for entry in figures] == [0, 0, 0]
    assert ("sum_largest" in figures[0]) == (codec != "none")
    bound = sum(entry["sum_error_bound"] for entry in figures)
    assert bound < (1e-6 if codec == "none" else 5e-4)
    for name, value in plain.model().items():
        np.testing.assert_allclose(secure.model()[name], value, atol=bound + 1e-6, err_msg=name)
    for stage in (secure, plain):
        stage.stop()
