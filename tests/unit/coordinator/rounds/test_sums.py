"""The coordinator's side of secure sums, with devices in memory that answer at once, wrongly, or never."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from coordinator.record.tables import SUM
from coordinator.rounds import sums
from coordinator.rounds.open_round import OpenRound, RoundPlan
from fedvit.blobs import digest_of
from fedvit.errors import EmptyCohort
from fedvit.program_versions import SECURE_VERSION
from fedvit.resources import ResourceUse
from fedvit.secure.layout import make_training_payload, make_vector
from fedvit.tensors import unpack
from fedvit.wire.messages import (
    DeviceState,
    FromCoordinator,
    Manifest,
    Result,
    SumAsk,
    SumId,
    SumInbox,
    SumInvite,
    SumKeys,
    SumMasked,
    SumPeers,
    SumQuestion,
    SumRefused,
    SumShares,
    SumSurvivors,
)
from tests.support.codes import has_code
from tests.support.parts import Parts
from tests.support.sums import MemoryDevice, make_terms
from tests.unit.coordinator.rounds.conftest import MakeParts

NAMES = "abcd"
Spoil = Callable[[str, FromCoordinator], bool]
"""Return True if a device does not answer a message."""


class Scene:
    """Devices have trained in a round. Each has 20 images and the update (0.1, 0.2) times its number."""

    def __init__(self, parts: Parts, spoil: Spoil, names: str) -> None:
        self.parts = parts
        self.wrong_size = ""  # the device whose masked numbers have another size
        self._spoil = spoil
        self._names = names
        program = msgspec.structs.replace(parts.work.program, secure=True, v=SECURE_VERSION)
        work = dict.fromkeys(names, parts.work._replace(program=program))
        parts.arrive(*names)
        parts.state.store.rounds.open("r", 1, list(names), len(names))
        self.opened = OpenRound(RoundPlan("r", 1, "train", list(names), len(names), work))
        parts.ports.trainer.open(self.opened)
        results = [(name, Result("r", 1, "train", 0, {}, ResourceUse()), 1) for name in names]
        parts.state.add_results(parts.state.store.tasks.add_results(results))
        self.devices = {
            name: MemoryDevice(name, make_vector("train", _payload(number), make_terms(len(names)), [number]))
            for number, name in enumerate(names, 1)
        }
        parts.state.send = self.send

    def send(self, device: str, message: FromCoordinator) -> None:
        """Let a device answer a message of the coordinator."""
        if self._spoil(device, message) or not isinstance(message, SumQuestion):
            return
        if isinstance(message, SumInvite):  # the terms decide on the integers
            number = self._names.index(device) + 1
            self.devices[device].payload = make_vector("train", _payload(number), message.terms, [number])
        answer = self.devices[device].answer(message)
        if isinstance(answer, bytes):
            content = answer + b"more" if device == self.wrong_size else answer
            manifest = Manifest(digest_of(content), len(content), 126_976)
            answer = SumMasked(message.sum, manifest, content)
        self.parts.sums.on_answer(device, answer)

    def add_up(self) -> None:
        self.parts.sums.add_up(self.opened)


def _payload(number: int) -> dict[str, np.ndarray]:
    return make_training_payload({"w": np.float32([0.1, 0.2]) * number}, 20, 0.5)


@pytest.fixture
def make_scene(make_parts: MakeParts) -> Callable[[Spoil], Scene]:
    def make(spoil: Spoil = lambda device, message: False, names: str = NAMES) -> Scene:
        values = {"secure": True, "devices": 3, "sums": {"step_s": 0.3}, "rejoin_grace_s": 0.1}
        return Scene(make_parts(**values), spoil, names)

    return make


def test_sum_is_one_result_of_the_round(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.add_up()
    scene.add_up()  # once more: it is there already
    [added] = [result for result in scene.parts.state.store.tasks.read_used_in("r", 1) if result.device == SUM]
    assert (added.samples, added.metrics["devices"], added.metrics["loss"]) == (80, 4.0, 0.5)
    assert added.upload
    mean = unpack(scene.parts.state.blobs.get(added.upload))["w"]
    assert np.allclose(mean, [0.25, 0.5], atol=added.metrics["error_bound"] + 1e-7)
    assert not (scene.parts.folder / "sum.msgpack").exists()


@pytest.mark.parametrize("step", [SumInvite, SumPeers, SumInbox, SumSurvivors, SumAsk])
def test_silent_device_is_left_out(make_scene: Callable[..., Scene], step: type[FromCoordinator]) -> None:
    scene = make_scene(lambda device, message: device == "d" and isinstance(message, step))
    scene.add_up()
    [added] = [result for result in scene.parts.state.results(1, "train") if result.device == SUM]
    assert added.metrics["devices"] == (4.0 if step in (SumSurvivors, SumAsk) else 3.0)


def test_device_with_a_wrong_answer_is_left_out_with_the_reason(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.wrong_size = "b"
    scene.add_up()
    [added] = [result for result in scene.parts.state.results(1, "train") if result.device == SUM]
    assert added.metrics["devices"] == 3.0
    [refusal] = scene.parts.refusals("b")
    assert refusal.startswith("sum: ")


def test_device_that_leaves_during_its_upload_holds_up_no_other(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One masked result is fetched at a time, and the first one is that of a device that leaves."""
    monkeypatch.setattr(sums, "AT_ONCE", 1)
    held: dict[str, SumInbox] = {}

    def upload(device: str, message: FromCoordinator) -> bool:
        if isinstance(message, SumInbox):
            held[device] = message
            if device == "a":
                answer("a")
                scene.parts.inbox.handler.on_message("a", DeviceState("a1", online=False))
            for name in sorted(held.keys() - {"a"}) if "a" in held else ():
                answer(name)
        return isinstance(message, SumInbox)

    def answer(device: str) -> None:
        content = scene.devices[device].answer(held[device])
        assert isinstance(content, bytes)
        if device != "a":  # it is here as soon as it is asked for
            scene.parts.state.blobs.put(content)
        vector = Manifest(digest_of(content), len(content), 126_976)
        scene.parts.sums.on_answer(device, SumMasked(held[device].sum, vector))

    scene = make_scene(upload)
    scene.add_up()
    [added] = [result for result in scene.parts.state.results(1, "train") if result.device == SUM]
    assert added.metrics["devices"] == 3.0


def test_failed_sum_says_why_and_the_next_attempt_has_another_number(make_scene: Callable[..., Scene]) -> None:
    silent = {"c", "d"}
    scene = make_scene(lambda device, message: device in silent)
    with pytest.raises(EmptyCohort, check=has_code("FV1521", "c: no answer")):
        scene.add_up()
    assert not any(device.revealed for device in scene.devices.values())
    silent.clear()
    scene.add_up()
    attempts = {device.kept.invite.sum.attempt for device in scene.devices.values() if device.kept}
    assert attempts == {2}


@pytest.mark.parametrize("step", [SumPeers, SumInbox])
def test_sum_begins_again_with_the_devices_that_are_left(
    make_scene: Callable[..., Scene], step: type[FromCoordinator]
) -> None:
    """Two of five leave, of which four are needed; a sum of the other three succeeds."""
    scene = make_scene(lambda device, message: device in "ce" and isinstance(message, step), "abcde")
    scene.add_up()
    [added] = [result for result in scene.parts.state.results(1, "train") if result.device == SUM]
    assert (added.metrics["devices"], added.metrics["attempt"]) == (3.0, 2.0)


def test_answers_out_of_turn_change_nothing(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    keys = scene.devices["a"].answer(SumInvite(SumId("r", 1, "train", 7), make_terms(4)))
    assert isinstance(keys, SumKeys)
    for answer in (keys, SumRefused(keys.sum, "no"), SumShares(keys.sum, {}, bytes(32))):
        scene.parts.sums.on_answer("a", answer)  # no sum is under way
    scene.devices["a"].kept = None
    scene.add_up()
    assert not scene.parts.refusals("a")
