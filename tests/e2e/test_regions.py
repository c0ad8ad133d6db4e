"""A centre and two regions: real processes, each coordinator with a mosquitto of its own."""

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.record.store import Store
from coordinator.record.tables import ResultRecord
from fedvit.tensors import unpack
from fleet.simulate import simulate
from tests.support.forked import Forked
from tests.support.programs import CONFIG, DEVICES, Stage, toml, wait_for

VALUES: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 2,
    "seed": 5,
    "options": {"batch_size": 8, "epochs": 2, "lr": 0.05, "momentum": 0.9},
    "model_options": CONFIG["model_options"],
    "deadline_s": 120.0,
    "rejoin_grace_s": 60.0,
    "broker": {"broker": "mosquitto"},
}
NORTH, SOUTH = DEVICES[:2], DEVICES[2:]


class World:
    """A stage for the centre, and one for each region."""

    def __init__(self, folder: Path, parts: Path, cache: Path) -> None:
        self.stages: dict[str, Stage] = {}
        for name in ("centre", "north", "south"):
            (folder / name).mkdir()
            self.stages[name] = Stage(folder / name, parts, cache)
        self.file = folder / "run.toml"
        self.file.write_text(toml(VALUES))

    def centre(self) -> Forked:
        return self._begin("centre", "coordinator.cli", "start", "--run", "run", "--devices", "2")

    def region(self, name: str, *arguments: str) -> Forked:
        centre = f"127.0.0.1:{self.stages['centre'].port}"
        return self._begin(name, "fleet.cli", "region", "--centre", centre, "--id", name, "--run", "run", *arguments)

    def _begin(self, name: str, module: str, *arguments: str) -> Forked:
        stage = self.stages[name]
        given = [*arguments, "--runs", str(stage.out), "--config", str(self.file), "--broker.port", str(stage.port)]
        return stage.keep(Forked(module, given, stage.log_path("coordinator"), stage.environment))


@pytest.fixture
def world(tmp_path: Path, parts: Path, cache: Path) -> Iterator[World]:
    made = World(tmp_path, parts, cache)
    yield made
    for stage in made.stages.values():
        stage.close()


def images_by_class(results: Sequence[ResultRecord]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for count in (count for result in results for count in result.by_class):
        counts[count.label] += count.images
    return dict(counts)


def test_two_regions_give_the_mean_of_one_coordinator_though_one_is_killed(
    world: World, parts: Path, graph_cache: Path, tmp_path: Path
) -> None:
    """One region is killed after one of its two devices has answered, and started again: that answer counts. The final
    tensors are those of a run of all three devices, but for the rounding of float32."""
    north, south = world.stages["north"], world.stages["south"]
    regions = {"north": world.region("north", "--devices", "2"), "south": world.region("south")}
    devices = {name: north.device(name) for name in NORTH} | {name: south.device(name) for name in SOUTH}
    wait_for(lambda: all(f"{name} joined" in north.log("coordinator") for name in NORTH), "the devices of the north")
    devices["device-0"].send_signal(signal.SIGSTOP)
    centre = world.centre()
    wait_for(lambda: north.query("select 1 from results where device = 'device-1'"), "the answer of one device")
    regions["north"].kill()
    regions["north"].wait()
    devices["device-0"].send_signal(signal.SIGCONT)
    regions["north"] = world.region("north", "--devices", "2")
    for name, process in {"centre": centre, **regions}.items():
        stage = world.stages[name]
        assert stage.finish(process, "coordinator") == 0, stage.log("coordinator")
    for name, process in devices.items():
        stage = north if name in NORTH else south
        assert stage.finish(process, name) == 0, stage.log(name)

    counted = "select round, device from results where kind = 'train' order by round, device"
    assert north.query(counted) == [(number, name) for number in (1, 2) for name in NORTH]
    assert world.stages["centre"].query(counted) == [(number, name) for number in (1, 2) for name in ("north", "south")]

    with closing(Store.in_folder(world.stages["centre"].out, check=False)) as store:
        tested = store.results("run", 2, "evaluate")
    resumed = Forked(
        "coordinator.cli", ["start", "--resume", "run", "--runs", str(north.out)], tmp_path / "log", north.environment
    )
    assert north.finish(north.keep(resumed), "coordinator") == 2
    assert "resume it with `fleet region --run run`" in (tmp_path / "log").read_text()

    values = {key: value for key, value in VALUES.items() if key != "broker"}
    single = simulate([parts / name for name in DEVICES], values, out=tmp_path, run="single", graph_cache=graph_cache)
    with closing(Store.in_folder(tmp_path, check=False)) as store:
        tested_alone = store.results("single", 2, "evaluate")
    assert images_by_class(tested) == images_by_class(tested_alone)
    assert sum(result.samples for result in tested) == sum(result.samples for result in tested_alone)
    expected = unpack((single.folder / "model.safetensors").read_bytes())
    model = unpack(world.stages["centre"].model())
    assert model.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(model[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert north.model() == south.model() == world.stages["centre"].model()


def test_region_that_cannot_send_a_mean_is_refused_before_it_begins(world: World) -> None:
    process = world.region("north", "--robust.aggregator", "median")
    assert world.stages["north"].finish(process, "coordinator") == 2
    assert "aggregator = 'median' compares the updates of single devices" in world.stages["north"].log("coordinator")
    assert not (world.stages["north"].out / "run").exists()
