"""Regions: their centre, the regions and all devices in memory; the regions' links to the centre are the real ones."""

import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from coordinator.record.tables import SUM
from coordinator.rounds.coordinator import Cancelled
from coordinator.rounds.leading import Owner
from coordinator.rounds.regional import RegionLead
from fedvit.errors import ConfigError, PeerRefused
from fedvit.tensors import Tensors
from fedvit.transport.memory import MemoryTransport
from fedvit.wire.messages import Cancel, Task
from fleet.region import CentreLink
from tests.support.runs import Configure, Fake, Stage, silent
from tests.support.summing import SummingFake
from tests.support.waiting import wait_until

SAMPLES = {"a": 3, "b": 41, "c": 7, "d": 500}
NORTH, SOUTH = ("a", "b"), ("c", "d")


def drawn(device: Fake, task: Task) -> None:
    """Answer with an update that differs by device, round and tensor."""
    draw = np.random.default_rng(zlib.crc32(f"{device.name} {task.round}".encode()))
    tensors = {
        name: draw.normal(0.0, 0.1, value.shape).astype(value.dtype) for name, value in device.upload(task).items()
    }
    device.bring(device.answer(task, tensors))


def only_in(number: int) -> Callable[[Fake, Task], None]:
    """Answer in this round alone."""
    return lambda device, task: drawn(device, task) if task.round == number else None


class World:
    """A centre, and its regions by name."""

    def __init__(self, folder: Path, configure: Configure, graph_cache: Path) -> None:
        self._new = partial(Stage, configure=configure, graph_cache=graph_cache)
        self._folder = folder
        self.centre = self._new(folder / "centre")
        self.regions: dict[str, Stage] = {}
        self.links: dict[str, CentreLink] = {}

    def region(self, name: str, *devices: str, least: int = 1, kind: type[Fake] = Fake) -> Stage:
        stage = self.regions[name] = self._new(self._folder / name)
        for device in devices:
            stage.fake(device, drawn, samples=SAMPLES[device], kind=kind)
        self.join(name, least)
        return stage

    def join(self, name: str, least: int = 1) -> None:
        """A link to the centre for the coordinator that this region starts next, in a process of its own."""
        link = self.links[name] = CentreLink(
            name=name,
            federation="home",
            transport=lambda: MemoryTransport(SimpleQueue(), self.centre.broker, f"{name}-{len(self.links)}"),
            state=self._folder / name / "link",
        )
        self.regions[name].owner = Owner(lead=partial(RegionLead, centre=link, least_results=least))

    def stages(self) -> list[Stage]:
        return [self.centre, *self.regions.values()]

    def drive(self, until: Callable[[], bool]) -> None:
        wait_until(
            until,
            lambda: f"it did not happen: {[(stage.outcome, stage.lines[-3:]) for stage in self.stages()]}",
            pause_s=0.002,
            meanwhile=lambda: [device.step() for stage in self.stages() for device in stage.fakes],
        )

    def finish(self) -> list[str | BaseException | None]:
        """The outcomes of the centre and its regions."""
        self.drive(lambda: all(stage.outcome is not None for stage in self.stages()))
        return [stage.outcome for stage in self.stages()]

    def stop(self) -> None:
        for stage in self.stages():
            stage.stop()


@pytest.fixture
def world(tmp_path: Path, configure: Configure, graph_cache: Path) -> Iterator[World]:
    made = World(tmp_path, configure, graph_cache)
    yield made
    made.stop()


def assert_same_but_for_rounding(regional: Tensors, single: Tensors) -> None:
    """The update of a region is float32: it is rounded once more. Where both nearly cancel, the error is that of the
    larger numbers, which are below 1."""
    assert regional.keys() == single.keys()
    for name, value in single.items():
        np.testing.assert_allclose(regional[name], value, rtol=2e-7, atol=2e-7, err_msg=name)


def test_regions_train_as_one_coordinator_with_all_devices(world: World, stage: Stage) -> None:
    """The mean weighs every device by its samples, wherever it is; so do loss and accuracy."""
    for name, devices in (("north", NORTH), ("south", SOUTH)):
        world.region(name, *devices).start(devices=2, rounds=2)
    world.centre.start(devices=2, rounds=2)
    assert world.finish() == ["finished"] * 3
    for name, samples in SAMPLES.items():
        stage.fake(name, drawn, samples=samples)
    stage.start(devices=4, rounds=2)
    assert stage.finish() == "finished"

    assert_same_but_for_rounding(world.centre.model(), stage.model())
    for region in world.regions.values():
        for name, value in world.centre.model().items():
            np.testing.assert_array_equal(region.model()[name], value, err_msg="the region tested the centre's tensors")
    trained = {result.device: result for result in world.centre.store.tasks.read_results("r", 1, "train")}
    assert {name: result.samples for name, result in trained.items()} == {"north": 44, "south": 507}
    assert trained["north"].metrics == {"loss": pytest.approx(0.5), "devices": 2}
    tested = {result.device: result for result in world.centre.store.tasks.read_results("r", 2, "evaluate")}
    assert {name: result.metrics for name, result in tested.items()} == {
        "north": {"correct": 10, "devices": 2}, "south": {"correct": 10, "devices": 2}
    }  # fmt: skip
    assert not world.centre.refusals("north")


def test_devices_of_a_region_are_added_up_in_secret(world: World, stage: Stage) -> None:
    """The centre gets the mean of the region as before, and the region has no number of a single device."""
    north = world.region("north", "a", "b", "c", kind=SummingFake)
    north.start(devices=3, rounds=2, secure=True)
    world.region("south", "d").start(rounds=2)
    world.centre.start(devices=2, rounds=2)
    assert world.finish() == ["finished"] * 3
    for name, samples in SAMPLES.items():
        stage.fake(name, drawn, samples=samples)
    stage.start(devices=4, rounds=2)
    assert stage.finish() == "finished"

    for name, value in stage.model().items():
        np.testing.assert_allclose(world.centre.model()[name], value, atol=1e-6, err_msg=name)
    results = north.store.tasks.read_results("r", 2, "train") + north.store.tasks.read_results("r", 2, "evaluate")
    assert {result.device for result in results} == {"a", "b", "c", SUM}
    assert not any(result.upload or result.samples for result in results if result.device != SUM)
    [trained] = [one for one in world.centre.store.tasks.read_results("r", 2, "train") if one.device == "north"]
    assert (trained.samples, trained.metrics) == (51, {"loss": pytest.approx(0.5), "devices": 3})
    [tested] = [one for one in world.centre.store.tasks.read_results("r", 2, "evaluate") if one.device == "north"]
    assert tested.metrics == {"correct": 15, "devices": 3}
    assert [entry.figures["sum_devices"] for entry in north.store.rounds.read_all("r")] == [3, 3]


def test_regions_are_added_up_in_secret(world: World, stage: Stage) -> None:
    """The centre learns the sum of its regions only."""
    for number, device in enumerate(("a", "b", "c")):
        world.region(f"region-{number}", device).start(rounds=2)
    world.centre.start(devices=3, rounds=2, secure=True)
    assert world.finish() == ["finished"] * 4
    for device in ("a", "b", "c"):
        stage.fake(device, drawn, samples=SAMPLES[device])
    stage.start(devices=3, rounds=2)
    assert stage.finish() == "finished"

    for name, value in stage.model().items():
        np.testing.assert_allclose(world.centre.model()[name], value, atol=1e-6, err_msg=name)
    trained = {result.device: result for result in world.centre.store.tasks.read_results("r", 2, "train")}
    assert trained.pop(SUM).samples == 51
    assert not any(result.upload or result.samples for result in trained.values())
    tested = {result.device: result for result in world.centre.store.tasks.read_results("r", 2, "evaluate")}
    assert (tested.pop(SUM).samples, {result.samples for result in tested.values()}) == (15, {0})


def test_region_announces_devices_that_join_later(world: World) -> None:
    """The centre refuses a result with more samples than were announced."""
    north = world.region("north", "a")
    north.start(rounds=2)
    world.centre.start(rounds=2)
    world.drive(lambda: bool(world.centre.accepted(1)))
    north.fake("b", drawn, samples=SAMPLES["b"])
    assert world.finish() == ["finished"] * 2
    assert [result.samples for result in world.centre.store.tasks.read_results("r", 2, "train")] == [44]
    assert not world.centre.refusals("north")


def test_region_with_too_few_results_fails_its_task_with_the_reason(world: World, stage: Stage) -> None:
    """The centre goes on with the other region, and asks again in the next round."""

    def fails_first(device: Fake, task: Task) -> None:
        if task.round == 1:
            device.fail(task, "no light")
        else:
            drawn(device, task)

    world.region("north", *NORTH, least=2).start(devices=2, rounds=2)
    world.regions["north"].fakes[1].on_task = fails_first
    world.region("south", *SOUTH).start(devices=2, rounds=2)
    world.centre.start(devices=2, rounds=2)
    assert world.finish() == ["finished"] * 3
    assert world.centre.refusals("north") == [
        "train: round 1: 1 of the 2 results came that an update of this region needs; without b (failed)"
    ]
    assert [world.centre.accepted(number) for number in (1, 2)] == [["south"], ["north", "south"]]
    assert [record.closed_at is not None for record in world.regions["north"].store.rounds.read_all("r")] == [
        True,
        True,
    ]


def test_region_without_devices_fails_its_task_with_the_reason(world: World) -> None:
    north = world.region("north", *NORTH)
    north.start(devices=2, rejoin_grace_s=0.0)
    world.drive(lambda: world.links["north"].task() is None and "waiting for a task of the centre" in doing(north))
    for device in north.fakes:
        device.transport.vanish()
    world.region("south", *SOUTH).start(devices=2)
    world.centre.start(devices=2)
    assert world.finish() == ["finished"] * 3
    reason = "round 1: 0 of the 1 devices that an answer of this region needs can be asked"
    assert world.centre.refusals("north") == [f"train: {reason}", f"evaluate: {reason}"]
    assert world.centre.accepted(1) == ["south"]


def doing(stage: Stage) -> str:
    return stage.coordinator.state.doing if stage.coordinator else ""


def test_region_that_is_gone_is_missing_in_its_round_and_joins_the_next(world: World) -> None:
    """Its coordinator ends while its devices train; another one resumes its run."""
    north = world.region("north", *NORTH)
    for device in north.fakes:
        device.on_task = silent
    north.start(devices=2, rounds=3)
    world.region("south", *SOUTH).start(devices=2, rounds=3)
    world.centre.start(devices=2, rounds=3, rejoin_grace_s=0.0)
    world.drive(lambda: all(device.tasks() == [1] for device in north.fakes) and world.centre.accepted(1) == ["south"])
    hold = world.regions["south"].fakes[0]
    hold.on_task = silent  # in round 2, until the other region is back
    north.stop()
    world.drive(lambda: hold.tasks() == [1, 2])
    for device in north.fakes:
        device.on_task = drawn
    world.join("north")
    north.start(devices=2, rounds=3, resume=True)
    world.drive(lambda: sum("north joined" in line for line in world.centre.lines) == 2)
    drawn(hold, hold.got(Task)[-1])
    hold.on_task = drawn
    assert world.finish() == ["finished"] * 3
    assert [world.centre.accepted(number) for number in (1, 2, 3)] == [["south"], ["south"], ["north", "south"]]


def test_region_resumes_the_round_of_its_centre(world: World, stage: Stage) -> None:
    """One of its devices has answered before its coordinator ends: that answer counts, and is not asked for again."""
    north = world.region("north", *NORTH)
    north.fakes[1].on_task = silent
    north.start(devices=2)
    world.centre.start()
    world.drive(lambda: north.fakes[0].answers() == [(1, True)])
    north.stop()
    north.fakes[1].on_task = drawn
    world.join("north")
    north.start(devices=2, resume=True)
    assert world.finish() == ["finished"] * 2
    assert north.fakes[0].tasks() == [1]
    assert [result.samples for result in world.centre.store.tasks.read_results("r", 1, "train")] == [44]


def test_region_sends_an_update_that_its_centre_has_not_got_again(world: World) -> None:
    """The link to the centre is down when the update is ready, and the region's coordinator ends then."""
    north = world.region("north", "a")
    device = north.fakes[0]
    device.on_task = silent
    north.start()
    world.centre.start()
    world.drive(lambda: bool(device.got(Task)))
    world.centre.broker.stop()
    drawn(device, device.got(Task)[0])
    world.drive(lambda: any("is stored for the centre" in line for line in north.lines))
    world.drive(lambda: any(line.startswith("centre: ") and "trying again" in line for line in north.lines))
    north.stop()
    world.centre.broker.start()
    world.join("north")
    north.start(resume=True)
    assert world.finish() == ["finished"] * 2
    assert device.tasks() == [1]
    assert world.centre.accepted(1) == ["north"]


@pytest.mark.parametrize("updates", [{"up": "fp16"}, {"down": "fp16"}, {"down_whole": "fp16"}])
def test_regions_use_the_codecs_of_their_centre(world: World, stage: Stage, updates: dict[str, str]) -> None:
    """Towards the centre and towards their devices; the mean is coded once more."""
    for name, devices in (("north", NORTH), ("south", SOUTH)):
        world.region(name, *devices).start(devices=2, rounds=2, updates=updates)
    world.centre.start(devices=2, rounds=2, updates=updates)
    assert world.finish() == ["finished"] * 3
    for name, samples in SAMPLES.items():
        stage.fake(name, drawn, samples=samples)
    stage.start(devices=4, rounds=2, updates=updates)
    assert stage.finish() == "finished"
    for name, value in stage.model().items():
        np.testing.assert_allclose(world.centre.model()[name], value, atol=1e-3, err_msg=name)


def test_region_cancels_its_devices_when_the_centre_does_not_wait_any_longer(world: World) -> None:
    """The centre's quorum is one region; the next round finds the devices of the other one free."""
    north = world.region("north", *NORTH)
    south = world.region("south", *SOUTH)
    for region in (north, south):
        region.fakes[0].on_task = silent
        region.start(devices=2, rounds=2)
    world.centre.start(devices=2, rounds=2, quorum=0.5)

    def answer_when_both_are_asked(number: int, device: Fake) -> None:
        world.drive(lambda: all(region.fakes[0].tasks()[-1:] == [number] for region in (north, south)))
        drawn(device, [task for task in device.got(Task) if task.kind == "train"][-1])

    answer_when_both_are_asked(1, south.fakes[0])
    answer_when_both_are_asked(2, north.fakes[0])
    assert world.finish() == ["finished"] * 3
    assert [world.centre.accepted(number) for number in (1, 2)] == [["south"], ["north"]]
    world.drive(lambda: [cancel.round for cancel in north.fakes[0].got(Cancel)] == [1])
    world.drive(lambda: [cancel.round for cancel in south.fakes[0].got(Cancel)] == [2])


def test_region_ends_cancelled_when_the_run_of_its_centre_is_cancelled(world: World) -> None:
    north = world.region("north", *NORTH)
    for device in north.fakes:
        device.on_task = silent
    north.start(devices=2)
    world.centre.start()
    world.drive(lambda: all(device.tasks() == [1] for device in north.fakes))
    assert world.centre.coordinator is not None
    world.centre.coordinator.cancel("by the test")
    assert [type(outcome) for outcome in world.finish()] == [Cancelled] * 2
    assert north.store.runs.read("r").reason == "the centre's run was cancelled"
    world.drive(lambda: all([cancel.round for cancel in device.got(Cancel)] == [1] for device in north.fakes))


def test_region_ends_when_its_centre_begins_another_run(world: World) -> None:
    """It would fail every task of that run. The centre has the reason."""
    north = world.region("north", "a")
    north.fakes[0].on_task = only_in(1)
    north.start(rounds=2)
    world.centre.start(rounds=2)
    world.drive(lambda: north.fakes[0].tasks() == [1, 2])
    world.centre.stop()
    world.centre.store.runs.create("other", {})
    world.centre.start(run="other", rounds=2)
    world.drive(lambda: north.outcome is not None)
    assert isinstance(north.outcome, ConfigError)
    reason = "this region takes part in run 'r' of its centre, the task is of run 'other': begin another run"
    assert reason in str(north.outcome)

    def told() -> bool:
        return any(reason in refusal.reason for refusal in world.centre.store.devices.read_refusals("other"))

    world.drive(told)


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"options": {"lr": 0.07}}, "graphs|train"),
        ({"seed": 5}, "seed"),
        ({"classes": ("2", "1", "0")}, "classes"),
        ({"options": {"warmup_rounds": 1}}, "rounds or schedule"),
    ],
)
def test_region_of_another_configuration_ends_and_says_what_differs(
    world: World, changed: dict[str, object], differs: str
) -> None:
    north = world.region("north", *NORTH)
    north.start(devices=2, **changed)
    world.centre.start()
    world.drive(lambda: north.outcome is not None)
    assert isinstance(north.outcome, ConfigError)
    assert re.search(f"differ in .*({differs})", str(north.outcome))
    world.drive(lambda: bool(world.centre.refusals("north")))
    assert str(north.outcome)[:400] in world.centre.refusals("north")[0]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"robust": {"aggregator": "median"}}, "aggregator = 'median' compares the updates of single devices"),
        ({"privacy": {"noise_multiplier": 1.0, "clip": 1.0}}, "noise_multiplier = 1.0 hides the update of one device"),
    ],
)
def test_centre_refuses_regions_where_the_mean_of_updates_is_not_enough(
    world: World, table: dict[str, object], reason: str
) -> None:
    north = world.region("north", *NORTH)
    north.start(devices=2)
    world.centre.start(**table)
    world.drive(lambda: north.outcome is not None)
    assert isinstance(north.outcome, PeerRefused)
    assert f"it is a region: {reason}" in str(north.outcome)
    assert not world.centre.store.rounds.read_all("r")
