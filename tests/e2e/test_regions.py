"""A centre and two regions: real processes, each coordinator with a mosquitto of its own."""

import signal
import subprocess
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
from tests.support.once import made_once
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
Program = subprocess.Popen[bytes]


class World:
    """A stage for the centre, and one for each region."""

    def __init__(self, folder: Path, parts: Path, cache: Path) -> None:
        self.folder = folder
        self.stages: dict[str, Stage] = {}
        for name in ("centre", "north", "south"):
            (folder / name).mkdir()
            self.stages[name] = Stage(folder / name, parts, cache)
        self.file = folder / "run.toml"
        self.file.write_text(toml(VALUES))

    def centre(self, *, devices: int = 2) -> Forked:
        return self._begin("centre", "coordinator.cli", "start", "--run", "run", "--devices", str(devices))

    def region(self, name: str, *arguments: str, of: str = "centre", run: str = "run") -> Forked:
        """A region of the centre, or of another region."""
        centre = f"127.0.0.1:{self.stages[of].port}"
        return self._begin(name, "fleet.cli", "region", "--centre", centre, "--id", name, "--run", run, *arguments)

    def _begin(self, name: str, module: str, *arguments: str) -> Forked:
        stage = self.stages[name]
        given = [*arguments, "--runs", str(stage.out), "--config", str(self.file), "--broker.port", str(stage.port)]
        return stage.keep(Forked(module, given, stage.log_path("coordinator"), stage.environment))

    def finish(self, coordinators: dict[str, Forked], devices: dict[str, tuple[str, Program]]) -> None:
        """All end well: coordinators by stage, devices by name with their stage."""
        for name, process in coordinators.items():
            stage = self.stages[name]
            assert stage.finish(process, "coordinator") == 0, stage.log("coordinator")
        for name, (of, device) in devices.items():
            assert self.stages[of].finish(device, name) == 0, self.stages[of].log(name)

    def check_model(self, single: Path) -> None:
        """The centre's tensors are those of one coordinator with all devices, but for the rounding of float32."""
        expected = unpack((single / "model.safetensors").read_bytes())
        model = unpack(self.stages["centre"].model())
        assert model.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(model[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture
def world(tmp_path: Path, parts: Path, cache: Path) -> Iterator[World]:
    made = World(tmp_path, parts, cache)
    yield made
    for stage in made.stages.values():
        stage.close()


@pytest.fixture(scope="session")
def single(shared: Path, parts: Path, graph_cache: Path) -> Path:
    """The folder of runs in which the run `single` had one coordinator for all three devices."""
    values = {key: value for key, value in VALUES.items() if key != "broker"}
    folders = [parts / name for name in DEVICES]
    return made_once(
        shared / "e2e" / "without-regions",
        lambda out: simulate(folders, values, out=out, run="single", graph_cache=graph_cache),
    )


def images_by_class(results: Sequence[ResultRecord]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for count in (count for result in results for count in result.by_class):
        counts[count.label] += count.images
    return dict(counts)


def counts(stage: Stage, kind: str, number: str) -> dict[str, float]:
    """A number of the last round's results, by device."""
    return dict(stage.query(f"select device, {number} from results where round = 2 and kind = '{kind}'"))


def test_two_regions_give_the_mean_of_one_coordinator_though_one_is_killed(
    world: World, single: Path, tmp_path: Path
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
    placed = {name: ("north" if name in NORTH else "south", process) for name, process in devices.items()}
    world.finish({"centre": centre, **regions}, placed)

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

    with closing(Store.in_folder(single, check=False)) as store:
        tested_alone = store.results("single", 2, "evaluate")
    assert images_by_class(tested) == images_by_class(tested_alone)
    assert sum(result.samples for result in tested) == sum(result.samples for result in tested_alone)
    world.check_model(single / "single")
    assert north.model() == south.model() == world.stages["centre"].model()


def test_region_that_cannot_send_a_mean_is_refused_before_it_begins(world: World) -> None:
    process = world.region("north", "--robust.aggregator", "median")
    assert world.stages["north"].finish(process, "coordinator") == 2
    assert "aggregator = 'median' compares the updates of single devices" in world.stages["north"].log("coordinator")
    assert not (world.stages["north"].out / "run").exists()


def test_region_of_regions_gives_the_mean_of_one_coordinator(world: World, single: Path) -> None:
    """The centre has one device, the region south; that one has a device of its own, and the region north with two."""
    north, south = world.stages["north"], world.stages["south"]
    coordinators = {
        "north": world.region("north", "--devices", "2", of="south"),
        "south": world.region("south", "--devices", "2"),
        "centre": world.centre(devices=1),
    }
    devices = {name: ("north", north.device(name)) for name in NORTH}
    devices |= {name: ("south", south.device(name)) for name in SOUTH}
    world.finish(coordinators, devices)
    images = {name: counts(stage, "train", "samples") for name, stage in world.stages.items()}
    assert images["north"].keys() == set(NORTH)
    assert images["south"] == {"north": sum(images["north"].values()), SOUTH[0]: images["south"][SOUTH[0]]}
    assert images["centre"] == {"south": sum(images["south"].values())}
    right = {
        name: counts(stage, "evaluate", "json_extract(metrics, '$.correct')") for name, stage in world.stages.items()
    }
    assert right["south"]["north"] == sum(right["north"].values())
    assert right["centre"] == {"south": sum(right["south"].values())}
    with closing(Store.in_folder(world.stages["centre"].out, check=False)) as store:
        tested = store.results("run", 2, "evaluate")
    with closing(Store.in_folder(single, check=False)) as store:
        tested_alone = store.results("single", 2, "evaluate")
    assert images_by_class(tested) == images_by_class(tested_alone)
    world.check_model(single / "single")
