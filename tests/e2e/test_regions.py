"""A centre and two regions: real processes, each coordinator with a mosquitto of its own."""

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.record.record import open_record
from coordinator.record.tables import ResultRecord
from coordinator.security.broker.process import claim_port
from fedvit.tensors import unpack
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.forked import Forked
from tests.support.once import make_once
from tests.support.programs import CONFIG, DEVICES, Stage, said, toml, wait_for

VALUES: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 2,
    "seed": 5,
    "classes": [str(digit) for digit in range(10)],  # a region has not images of all
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
        return self.begin("centre", "coordinator.cli", "start", "--run", "run", "--devices", str(devices))

    def region(self, name: str, *arguments: str, of: str = "centre", run: str = "run") -> Forked:
        """A region of the centre, or of another region."""
        centre = f"127.0.0.1:{self.stages[of].port}"
        return self.begin(name, "fleet.cli", "region", "--centre", centre, "--id", name, "--run", run, *arguments)

    def begin(self, name: str, module: str, *arguments: str) -> Forked:
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
    return make_once(
        shared / "e2e" / "without-regions",
        lambda out: simulate(RunRequest(folders, values, out=out, run="single", graph_cache=graph_cache)),
    )


def images_by_class(results: Sequence[ResultRecord]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for count in (count for result in results for count in result.by_class):
        counts[count.label] += count.images
    return dict(counts)


def counts(stage: Stage, kind: str, number: str) -> dict[str, float]:
    """A number of the last round's results, by device."""
    return dict(stage.query(f"select device, {number} from results where round = 2 and kind = '{kind}'"))


@pytest.mark.slow
def test_two_regions_give_the_mean_of_one_coordinator_though_one_is_killed(
    world: World, single: Path, tmp_path: Path
) -> None:
    """One region is killed after one of its two devices has answered, and started again: that answer counts. The final
    tensors are those of a run of all three devices, but for the rounding of float32."""
    north, south = world.stages["north"], world.stages["south"]
    regions = {"north": world.region("north", "--devices", "2"), "south": world.region("south")}
    devices = {name: north.device(name, "--class-counts") for name in NORTH} | {
        name: south.device(name, "--class-counts") for name in SOUTH
    }
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

    with open_record(world.stages["centre"].out, check=False) as store:
        tested = store.tasks.read_results("run", 2, "evaluate")
    resumed = Forked(
        "coordinator.cli", ["start", "--resume", "run", "--runs", str(north.out)], tmp_path / "log", north.environment
    )
    assert north.finish(north.keep(resumed), "coordinator") == 2
    assert "the same `fleet region` command resumes it" in (tmp_path / "log").read_text()

    with open_record(single, check=False) as store:
        tested_alone = store.tasks.read_results("single", 2, "evaluate")
    assert images_by_class(tested) == images_by_class(tested_alone)
    assert sum(result.samples for result in tested) == sum(result.samples for result in tested_alone)
    world.check_model(single / "single")
    assert north.model() == south.model() == world.stages["centre"].model()


def test_region_that_cannot_send_a_mean_is_refused_before_it_begins(world: World) -> None:
    process = world.region("north", "--robust.aggregator", "median")
    assert world.stages["north"].finish(process, "coordinator") == 2
    assert "aggregator = 'median' compares the updates of single devices" in world.stages["north"].log("coordinator")
    assert not (world.stages["north"].out / "run").exists()


@pytest.mark.slow
def test_region_of_regions_gives_the_mean_of_one_coordinator(world: World, single: Path) -> None:
    """The centre has one device, the region south; that one has a device of its own, and the region north with two."""
    north, south = world.stages["north"], world.stages["south"]
    coordinators = {
        "north": world.region("north", "--devices", "2", of="south"),
        "south": world.region("south", "--devices", "2"),
        "centre": world.centre(devices=1),
    }
    devices = {name: ("north", north.device(name, "--class-counts")) for name in NORTH}
    devices |= {name: ("south", south.device(name, "--class-counts")) for name in SOUTH}
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
    with open_record(world.stages["centre"].out, check=False) as store:
        tested = store.tasks.read_results("run", 2, "evaluate")
    with open_record(single, check=False) as store:
        tested_alone = store.tasks.read_results("single", 2, "evaluate")
    assert images_by_class(tested) == images_by_class(tested_alone)
    world.check_model(single / "single")


@pytest.mark.slow
def test_region_adds_up_its_devices_in_secret_though_it_is_killed(world: World, single: Path) -> None:
    """kill -9 in the sum of the first round. Neither centre nor region has a number of a single device."""
    north = world.stages["north"]
    region, centre = world.region("north", "--devices", "3", "--secure"), world.centre(devices=1)
    devices = {name: north.device(name, "--class-counts") for name in DEVICES}
    wait_for(lambda: north.query("select 1 from results where device = 'device-0'"), "the answer of one device")
    devices["device-0"].send_signal(signal.SIGSTOP)
    wait_for(lambda: north.query("select count(*) from results where round = 1")[0][0] >= 3, "all answers")
    region.kill()
    region.wait()
    devices["device-0"].send_signal(signal.SIGCONT)
    region = world.region("north", "--devices", "3", "--secure")
    placed = {name: ("north", process) for name, process in devices.items()}
    world.finish({"centre": centre, "north": region}, placed)
    rows = north.query("select device, samples, upload from results where kind = 'train' order by round, device")
    assert [device for device, *_ in rows] == ["(sum)", *DEVICES] * 2
    assert all(not samples and upload is None for device, samples, upload in rows if device != "(sum)")
    images = sum(samples for device, samples, _ in rows if device == "(sum)")
    assert world.stages["centre"].query("select sum(samples) from results where kind = 'train'") == [(images,)]
    world.check_model(single / "single")


@pytest.mark.slow
def test_region_with_a_certificate_of_its_centre(world: World) -> None:
    """Its name, the broker and the federation are those of its certificate. When that is revoked, the region is left
    out as a device is, and its operator reads why."""
    centre, north = world.stages["centre"], world.stages["north"]
    deployment, state = str(world.folder / "deployment"), str(world.folder / "state-of-north")
    ports = [str(claim_port()) for _ in range(2)]
    said(
        centre, "coordinator.cli", "init", deployment, "--listen", "127.0.0.1", "--host", "localhost",
        "--port", ports[0], "--enrolment-port", ports[1], "--federation", "fleet-7",
    )  # fmt: skip
    file = world.folder / "centre.toml"
    file.write_text(toml(VALUES | {"devices": 1, "broker": {"deployment": deployment}}))
    given = ["start", "--run", "run", "--config", str(file), "--runs", str(centre.out)]
    centre.fork("coordinator", *given)
    wait_for(lambda: "broker: mosquitto" in centre.log("coordinator"), "the broker")
    token = said(centre, "coordinator.cli", "enroll", "north", "--deployment", deployment, "--no-wait").split()[-1]
    said(north, "edge_client.cli", "join", token, "--state", state)
    region = world.begin("north", "fleet.cli", "region", "--state", state)
    device = north.device("device-0")
    wait_for(lambda: north.query("select 1 from results where round = 1 and kind = 'train'"), "the first round")
    device.send_signal(signal.SIGSTOP)
    wait_for(lambda: centre.query("select 1 from results where device = 'north'"), "the region's update")
    said(centre, "coordinator.cli", "revoke", "north", "--deployment", deployment)
    wait_for(lambda: "revoked or expired" in north.log("coordinator"), "the region to be cut off")
    wait_for(lambda: centre.query("select 1 from refusals where device = 'north'"), "the region to be left out")
    assert centre.query("select reason from refusals") == [("its certificate was revoked",)]
    assert north.query("select id from runs") == [("north",)], "the name is that of its certificate"
    region.terminate()
    assert north.finish(region, "coordinator") == 130
    device.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_region_of_a_service_takes_part_in_one_run_after_another(world: World) -> None:
    """The second run waits for the region while it is in the first, and has a task for it before the region has noticed
    that its run is over: that task waits for the region's next run."""
    centre, north = world.stages["centre"], world.stages["north"]
    given = ["serve", "--runs", str(centre.out), "--broker", "mosquitto", "--broker.port", str(centre.port)]
    given += ["--side-by-side", "2"]
    centre.fork("service", *given)
    values = {key: value for key, value in VALUES.items() if key != "broker"} | {"rounds": 1}
    for run, more in {"first": {"devices": 2}, "second": {"devices": 1, "devices_where": "role=region"}}.items():
        centre.submit(run, **values | more)
    direct = centre.device("device-2")
    device = north.device("device-0")
    region = world.region("north", "--rounds", "1", run="first")
    wait_for(lambda: north.query("select 1 from tasks"), "a task of the region's device")
    device.send_signal(signal.SIGSTOP)
    wait_for(lambda: centre.query("select 1 from results where device = 'device-2'"), "the update of the other device")
    direct.send_signal(signal.SIGSTOP)  # the first run does not end before it goes on
    device.send_signal(signal.SIGCONT)
    wait_for(lambda: centre.query("select 1 from results where device = 'north' and kind = 'evaluate'"), "its answer")
    region.send_signal(signal.SIGSTOP)
    direct.send_signal(signal.SIGCONT)
    wait_for(lambda: centre.query("select 1 from tasks where run = 'second'"), "a task of the second run")
    region.send_signal(signal.SIGCONT)
    assert north.finish(region, "coordinator") == 0, north.log("coordinator")
    assert north.finish(device, "device-0") == 0
    world.region("north", "--rounds", "1", run="second")
    device = north.device("device-0")
    wait_for(lambda: centre.query("select 1 from runs where id = 'second' and status = 'finished'"), "the second run")
    assert north.finish(device, "device-0") == 0
    assert centre.query("select run, device from results where kind = 'train' order by run, device") == [
        ("first", "device-2"), ("first", "north"), ("second", "north")
    ]  # fmt: skip
    assert not centre.query("select 1 from refusals")


def test_queued_run_of_a_service_is_no_region(world: World) -> None:
    north = world.stages["north"]
    north.submit("run", **{key: value for key, value in VALUES.items() if key != "broker"})
    process = world.region("north")
    assert north.finish(process, "coordinator") == 2
    assert "run 'run' is not that of a region: choose another --run" in north.log("coordinator")
    assert north.query("select status from runs") == [("queued",)]
