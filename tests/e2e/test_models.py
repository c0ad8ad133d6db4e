"""Models in use, with real processes: from a run to a canary, a promotion and a roll back, also under faults."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from typing import Any

import psutil
import pytest

from edge_client.storage.models import DeviceModels
from edge_client.storage.serving import ServingStatus, write_serving
from fedvit.errors import FedvitError
from fedvit.wire.messages import ModelReport
from tests.support.draws import choose_count
from tests.support.federation import BROKER_MARKS
from tests.support.forked import Forked
from tests.support.programs import CONFIG, Stage, program, query_record, said, toml, wait_for
from tests.support.served import PictureStream, Supervisor, encode_picture, split_digits
from tests.support.waiting import WAIT_S

SITES = {"device-0": "berlin", "device-1": "munich"}
ACTS = {"device-0": "('canary', 'promoted')", "device-1": "('promoted')"}
"""Acts by which a model may be used on a device: canaries are in Berlin."""
RULES = {"min_gain": -1.0, "min_images": 5, "canary": "site=berlin", "after": "1s", "max_worse": 1.0}
"""Any model passes: the story is the same whatever the devices learn."""
RUN: dict[str, Any] = {
    "method": "fedavg",
    "options": {"epochs": 1, "batch_size": 8, "lr": 1e-3},
    "devices": 2,
    "promote": RULES,
}
FAULTS = choose_count(12, 30)
TARGETS = ["service", "broker", *SITES, *(f"serving {name}" for name in SITES)]
PICTURES = [encode_picture(pixels) for pixels in split_digits(0).stream.pixels[:50]]


def serve(stage: Stage, *options: str) -> Forked:
    given = ["serve", "--runs", str(stage.out), "--broker", "embedded", "--broker.port", str(stage.port)]
    return stage.fork("service", *given, *options)


def start_device(stage: Stage, name: str) -> "subprocess.Popen[bytes]":
    command = [*program("edge_client.cli"), "--broker", f"127.0.0.1:{stage.port}", "--data", str(stage.parts / name)]
    command += ["--state", str(stage.folder / "state" / name), "--id", name, "--threads", "1"]
    return stage.start(name, [*command, "--label", f"site={SITES[name]}"])


def read_states(stage: Stage, name: str) -> dict[str, str]:
    """The states of a device's models, as its list has them."""
    models = DeviceModels(stage.folder / "state" / name)
    return {model.name: model.state for model in models.read().models}


def find_serving(stage: Stage, name: str) -> str:
    """The model with which a device would answer pictures now; "": none."""
    serving = DeviceModels(stage.folder / "state" / name).read().serving()
    return serving.name if serving else ""


def find_stages(stage: Stage) -> dict[str, str]:
    return dict(stage.query("select name, stage from models"))


def change(stage: Stage, *words: str) -> str:
    return said(stage, "coordinator.cli", "models", *words, "--runs", str(stage.out))


@pytest.mark.slow
def test_model_goes_from_a_run_over_a_canary_to_all_devices_and_back(stage: Stage) -> None:
    service = serve(stage)
    observer = stage.observer()
    devices = {name: start_device(stage, name) for name in SITES}
    stage.submit("first", **RUN)
    wait_for(lambda: find_stages(stage) == {"first-1": "champion"}, "the first model to be used")
    wait_for(lambda: [find_serving(stage, name) for name in SITES] == ["first-1"] * 2, "both devices to use it")
    stage.submit("second", **{**RUN, "promote": {**RULES, "after": "1h"}})
    wait_for(lambda: find_serving(stage, "device-0") == "second-1", "the canary")
    assert read_states(stage, "device-0") == {"first-1": "champion", "second-1": "canary"}
    assert read_states(stage, "device-1") == {"first-1": "champion", "second-1": "challenger"}
    wait_for(observer.find(ModelReport, device="device-0", serving="second-1", since_start=True), "its report")
    [listed] = [model for model in stage_models(stage) if model["model"] == "second-1"]
    assert (listed["stage"], listed["score"]["champion_accuracy"] is not None) == ("canary", True)
    assert change(stage, "promote", "second-1") == "model second-1 becomes champion on 2 devices\n"
    wait_for(lambda: [find_serving(stage, name) for name in SITES] == ["second-1"] * 2, "both devices to use it")
    assert read_states(stage, "device-1") == {"first-1": "former", "second-1": "champion"}
    assert change(stage, "rollback", "second-1") == "model second-1 is rolled back on 2 devices\n"
    wait_for(lambda: [read_states(stage, name) for name in SITES] == [{"first-1": "champion"}] * 2, "the way back")
    acts = [row[0] for row in stage.query("select act from audit where subject = 'second-1' order by id")]
    assert acts == ["compare model", "promote model", "roll back model"]
    for name, process in devices.items():
        assert process.poll() is None, stage.log(name)
        assert "Traceback" not in stage.log(name)
    assert "Traceback" not in stage.log("service")
    service.send_signal(signal.SIGTERM)
    assert stage.finish(service, "service") == 130


@pytest.mark.slow
def test_drift_on_a_device_starts_a_run_by_rule(stage: Stage) -> None:
    """Once, as the next one begins a day later; the file is what the process that serves writes."""
    file = stage.folder / "again.toml"
    again = {**CONFIG, **RUN, "variants": {}, "rounds": 1}
    file.write_text(toml({key: value for key, value in again.items() if key != "promote"}))
    serve(stage, "--drift-run", str(file), "--drift-devices", "1")
    stage.observer()
    for name in SITES:
        start_device(stage, name)
    stage.submit("first", **{**RUN, "promote": {**RULES, "after": 0}})
    wait_for(lambda: [find_serving(stage, name) for name in SITES] == ["first-1"] * 2, "both devices to use it")
    write_serving(stage.folder / "state" / "device-0", ServingStatus(name="first-1", drift={"blur": time.time()}))
    runs = "select status from runs where id like 'drift-%'"
    wait_for(lambda: stage.query(runs) == [("finished",)], "the run of the rule")
    [listed] = [model for model in stage_models(stage) if model["model"] == "first-1"]
    assert [device["device"] for device in listed["devices"] if device["drifted_since"]] == ["device-0"]
    assert "pictures of device-0 have drifted from those of model first-1" in stage.log("service")
    assert "Traceback" not in stage.log("service")


def stage_models(stage: Stage) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(change(stage, "--json"))
    return listed


class Watched:
    """A service and devices that are killed; the models that devices would answer with are looked at all the time."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.service = serve(stage)
        stage.observer()
        self.devices = {name: start_device(stage, name) for name in SITES}
        self.serving = {
            name: Supervisor(stage.folder / "state" / name, stage.log_path(f"{name}-serve")) for name in SITES
        }
        self.streams = {name: PictureStream(serving, PICTURES) for name, serving in self.serving.items()}
        self.used: set[tuple[str, str]] = set()
        self._closing = ExitStack()
        for serving in self.serving.values():
            self._closing.callback(serving.close)
        for stream in self.streams.values():
            self._closing.callback(stream.close)

    def close(self) -> None:
        self._closing.close()

    def check_answers(self) -> None:
        """Fail if a stream got an answer of a model before it was promoted for its device."""
        for name, stream in self.streams.items():
            acts = f"select model, min(at) from promotions where act in {ACTS[name]} group by model"
            since = {model: datetime.fromisoformat(at) for model, at in self.stage.query(acts)}
            wrong = [
                answer for answer in stream.answers if answer.model not in since or answer.at < since[answer.model]
            ]
            assert not wrong, (name, wrong[:3], since)

    def look(self) -> None:
        """Fail if a device would answer with a model that was not promoted before."""
        if self.service.poll() is not None:  # its broker was killed while both began; systemd would start it again
            self.service = serve(self.stage)
        for name in SITES:
            with suppress(FedvitError):
                serving = find_serving(self.stage, name)
                if serving and (name, serving) not in self.used:
                    promoted = f"select 1 from promotions where model = ? and act in {ACTS[name]}"
                    assert query_record(self.stage.out, promoted, serving), f"{name} uses {serving}"
                    self.used.add((name, serving))

    def kill(self, target: str) -> None:
        """End a process as by kill -9; it begins again, a broker by its service, what serves by its supervisor."""
        if target == "service":
            self.service.kill()
            self.service.wait(WAIT_S)
            self.service = serve(self.stage)
        elif target == "broker":
            with suppress(psutil.Error):
                for child in psutil.Process(self.service.pid).children(recursive=True):
                    if any(mark in part for part in child.cmdline() for mark in BROKER_MARKS):
                        child.kill()
        elif target.startswith("serving "):
            self.serving[target.removeprefix("serving ")].kill()
        else:
            self.devices[target].kill()
            self.devices[target].wait(WAIT_S)
            self.devices[target] = start_device(self.stage, target)

    def has_settled(self, name: str) -> bool:
        """Return whether a model was judged for good, and each device uses what the record wants it to use."""
        self.look()
        rows = self.stage.query("select device, model, wanted, actual from device_models")
        wanted = {device: model for device, model, state, _ in rows if state == "champion"}
        actual = {device: find_serving(self.stage, device) for device in SITES}
        return find_stages(self.stage).get(name) not in (None, "canary") and wanted == actual


@pytest.fixture
def world(stage: Stage) -> Iterator[Watched]:
    world = Watched(stage)
    yield world
    world.close()


@pytest.mark.slow
def test_states_converge_after_kills_and_no_model_answers_that_was_not_promoted(
    world: Watched, record_property: Any
) -> None:
    """Drawn kills of the service, its broker, devices and what serves there, while runs end, canaries pass and
    operators act. Both devices are asked for five pictures a second all the time."""
    stage, draw = world.stage, random.Random(7)
    killed = promoted = 0
    for number in range(1, 7):
        run = f"run{number}"
        stage.submit(run, **RUN)
        name = f"{run}-1"
        for _ in range(FAULTS // 6):
            wait_looking(world, draw.uniform(0.2, 5.0))
            world.kill(draw.choice(TARGETS))
            killed += 1
        wait_for(partial(world.has_settled, name), f"{name} to be used everywhere")
        promoted += find_stages(stage)[name] == "champion"
        if number % 2 == 0 and find_stages(stage)[name] == "champion":
            change(stage, "rollback", name)
            world.kill(draw.choice(["service", "device-0"]))
            wait_for(partial(world.has_settled, name), "the former model to be used again")
    assert killed == FAULTS
    assert promoted > 2, "most runs end with a promotion, whatever is killed"
    assert {device for device, _ in world.used} == set(SITES)
    assert "Traceback" not in stage.log("service")
    world.close()
    world.check_answers()
    for killed in (False, True):
        gaps = sorted(gap for stream in world.streams.values() for gap in stream.find_gaps(killed=killed))
        which = "with a kill of what serves" if killed else "else"
        record_property(f"longest_gap_{'killed' if killed else 'else'}_s", gaps[-1] if gaps else 0.0)
        print(f"{len(gaps)} gaps {which}: longest {[round(gap, 2) for gap in gaps[-5:]]} s")
    answers = [len(stream.answers) for stream in world.streams.values()]
    print(f"answers: {answers}; load average {os.getloadavg()[0]:.1f}")
    assert min(answers) > 50


def wait_looking(world: Watched, seconds: float) -> None:
    """Look at the models for a time: faults are drawn over the stages of a run, not over what they wait for."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        world.look()
        time.sleep(0.02)
