"""The story step by step: two devices are used, a class appears, it gets labels, is learned, tried and promoted.

All programs are real processes: a service with its broker, and for each device one that trains and one that answers.
"""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from coordinator.api import open_existing_record
from coordinator.model_view import ModelView, list_models, read_model
from coordinator.security.broker.process import claim_port
from edge_client.commands.options import BROKER_VARIABLE
from edge_client.storage.serving import read_serving
from fedvit.data.images import Indices
from fedvit.errors import FedvitError
from fedvit.files import private_files
from fedvit.quantities import format_count
from fleet.datasets import IMAGE_SIZE, read_samples
from fleet.loop.labels import give_labels
from fleet.loop.pictures import EVERY_S, ArrivingPictures, PicturePlan, choose_classes, plan_pictures
from fleet.processes import Fleet, last_line, program

SITES = {"garden": "berlin", "gate": "munich"}
"""Site of each device, by its name."""
TEST_SHARE = 0.4
LABELS = 20
"""Pictures to which each owner gives a label."""
STEP_S = 240.0
"""Longest wait for a step; only one that fails takes so long."""
LOOK_EVERY_S = 0.2
RUN: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 16,
    "seed": 0,
    "devices": len(SITES),
    "options": {"epochs": 8, "batch_size": 16, "optimizer": "adamw", "lr": 2e-3},
    "model_options": {"image_size": 32, "patch_size": 4, "width": 64, "depth": 2, "heads": 4},
    "images": {"crop_padding": 2},
}
CANARY = "5s"
"""Time for which the second model is a canary."""
RULES: dict[str, Any] = {"min_images": 40, "canary": "site=berlin"}


class LoopSettings(NamedTuple):
    """Settings of the demo."""

    out: Path
    data: str = "digits"
    classes: tuple[str, ...] = ()  # the third one is new; (): the first three of the data set
    seed: int = 0


class ServedClass(Struct, frozen=True):
    """Answers to the pictures of one class."""

    pictures: int = 0
    right: int = 0
    unsure: int = 0


class LoopOutcome(Struct, frozen=True, kw_only=True):
    """What happened."""

    classes: tuple[str, ...]
    first: str  # the model that knew two classes
    second: str
    drift: dict[str, list[str]]  # measures by device
    drift_after: dict[str, int]  # pictures of the new class until the alert was seen, by device
    false_alarms: int  # devices with an alert before the new class appeared
    labels: dict[str, int]  # given, by class
    reason: str  # of the promotion
    canaries: list[str]
    before: dict[str, ServedClass]  # answers of the first model, by class
    after: dict[str, ServedClass]  # answers of the second one
    seconds: float


class LoopDevice(NamedTuple):
    """One device: its pictures, and the files of its two processes."""

    name: str
    pictures: ArrivingPictures
    plan: PicturePlan
    state: Path
    answers: Path

    def read_answers(self) -> list[dict[str, Any]]:
        """Return the lines that are whole."""
        if not self.answers.is_file():
            return []
        return [msgspec.json.decode(line) for line in self.answers.read_bytes().split(b"\n")[:-1]]

    def read_drift(self) -> list[str]:
        """Return the measures that have drifted."""
        serving = read_serving(self.state)
        return sorted(serving.drift) if serving else []

    def is_served_by(self, model: str) -> bool:
        """Return whether a model answers."""
        serving = read_serving(self.state)
        return serving is not None and serving.name == model


class LoopFleet:
    """The processes of the demo, and the waits for what they do."""

    def __init__(self, home: Path, devices: Sequence[LoopDevice], fleet: Fleet) -> None:
        self.home, self.devices, self.runs = home, devices, home / "runs"
        self._fleet = fleet
        self._port = claim_port()
        self._environment = {BROKER_VARIABLE: f"mqtt://127.0.0.1:{self._port}"}

    def start(self) -> None:
        """Start the service, and the processes that train."""
        serve = ["serve", "--runs", str(self.runs), "--broker", "embedded", "--broker.port", str(self._port)]
        self._start("service", "coordinator.cli", serve)
        for device in self.devices:
            own = ["--id", device.name, "--label", f"site={SITES[device.name]}", "--test-share", str(TEST_SHARE)]
            self._start(device.name, "edge_client.cli", [*self._folders(device), *own])
        self.wait(lambda: (self.runs / "fedvit.db").is_file(), "the service has no record")

    def start_dashboard(self) -> str | None:
        """Start the dashboard; return its address, None if its packages are not installed."""
        if find_spec("nicegui") is None:
            return None
        self._start("dashboard", "coordinator.cli", ["dashboard", "--runs", str(self.runs), "--port", "0"])
        found = self.wait(lambda: list(self.runs.glob("dashboard-*.url")), "the dashboard does not open")
        address: str = found[0].read_text().strip()
        return address

    def start_serving(self, device: LoopDevice) -> None:
        """Start the process that answers pictures without a label."""
        watch = ["--listen", str(claim_port()), "--watch", str(device.pictures.unlabelled)]
        results = ["--results", str(device.answers)]
        self._start(f"{device.name}-serve", "edge_client.cli", ["serve", *self._folders(device), *watch, *results])
        self.wait(lambda: read_serving(device.state), f"{device.name} does not serve")

    def train(self, run: str, values: dict[str, Any]) -> ModelView:
        """Submit a run, and wait for the model that its devices have compared. Raises FedvitError if it fails."""
        file = self.home / f"{run}.toml"
        file.write_bytes(msgspec.toml.encode(values))
        self._start(f"submit-{run}", "coordinator.cli", ["submit", str(file), "--run", run, "--runs", str(self.runs)])
        if not self._fleet.wait([f"submit-{run}"], STEP_S) or self._fleet.exit_codes()[f"submit-{run}"]:
            raise self._make_error(f"run {run} was not submitted: {self._last_line(f'submit-{run}')}")

        def look() -> ModelView | None:
            with closing(open_existing_record(self.runs)) as store:
                found = [model for model in list_models(store) if model.run == run]
                if not found and (record := store.runs.read(run)).status in ("failed", "cancelled"):
                    raise self._make_error(f"run {run} is {record.status}: {record.reason}")
            return found[0] if found else None

        model: ModelView = self.wait(look, f"run {run} makes no model")
        if model.stage == "challenger":
            raise self._make_error(f"model {model.model} stays a challenger: {model.reason}")
        return model

    def wait_for_champion(self, model: str) -> None:
        """Wait until a model is promoted on all devices."""

        def look() -> bool:
            with closing(open_existing_record(self.runs)) as store:
                found = read_model(store, model)
            return found.stage == "champion" and found.states.get("champion") == len(self.devices)

        self.wait(look, f"model {model} is not promoted")

    def wait_for_answers(self, model: str) -> None:
        """Wait until all devices answer with a model."""
        self.wait(lambda: all(each.is_served_by(model) for each in self.devices), f"{model} does not answer")

    def wait_for_drift(self, devices: int) -> None:
        """Wait until the coordinator knows of drift on so many devices."""

        def look() -> bool:
            with closing(open_existing_record(self.runs)) as store:
                return store.models.count_drifted() >= devices

        self.wait(look, "the coordinator does not hear of drift")

    def label(self, device: LoopDevice, classes: Sequence[str]) -> Counter[str]:
        """Give labels to the pictures of which the device is least sure."""
        command = [*program("edge_client.cli"), "label", *self._folders(device), "--least-sure"]
        return give_labels(command, self._environment, classes, device.pictures.find_class, LABELS)

    def show(self, rows_of: Callable[[LoopDevice], Indices], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Let pictures arrive at all devices, and wait until they are answered."""
        stop, wanted = threading.Event(), {device.name: len(device.read_answers()) for device in self.devices}
        cameras = []
        for device in self.devices:
            rows = rows_of(device).tolist()
            wanted[device.name] += len(rows)
            cameras.append(threading.Thread(target=device.pictures.receive, args=(rows, EVERY_S, stop), daemon=True))
            cameras[-1].start()

        def look() -> bool:
            meanwhile()
            return all(len(device.read_answers()) >= wanted[device.name] for device in self.devices)

        try:
            self.wait(look, "pictures are not answered")
        finally:
            stop.set()
            for camera in cameras:
                camera.join()

    def wait(self, look: Callable[[], Any], fault: str) -> Any:
        """Return the first true value of `look()`. Raises FedvitError if none comes, or a process has ended."""
        until = time.monotonic() + STEP_S
        while not (value := look()):
            ended = [name for name in self._fleet.exit_codes() if not name.startswith("submit-")]
            if ended:
                raise self._make_error(f"{ended[0]} has ended: {self._last_line(ended[0])}")
            if time.monotonic() > until:
                raise self._make_error(f"{fault} within {STEP_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
        return value

    def _folders(self, device: LoopDevice) -> list[str]:
        return ["--data", str(device.pictures.folder), "--state", str(device.state), "--threads", "1"]

    def _start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        self._fleet.start(name, [*program(module), *arguments], self._log(name), environment=self._environment)

    def _log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    def _last_line(self, name: str) -> str:
        return last_line(self._log(name))

    def _make_error(self, what: str) -> FedvitError:
        return FedvitError("FV2128", f"{what}; logs: {self.home / 'logs'}")


def play_story(settings: LoopSettings, report: Callable[[str], None]) -> LoopOutcome:
    """Play the story, and report what happens; all processes have ended afterwards.

    Raises ConfigError and DataError for pictures that do not fit, FedvitError if a step does not happen.
    """
    began = time.monotonic()
    samples = read_samples(settings.data, IMAGE_SIZE)
    labels = choose_classes(samples, settings.classes)
    classes = tuple(samples.classes[label] for label in labels)
    plans = plan_pictures(samples, labels, len(SITES), settings.seed)
    home = settings.out / "loop"
    shutil.rmtree(home, ignore_errors=True)  # of an earlier demo
    with private_files(), ExitStack() as stack:
        devices = []
        for name, plan in zip(SITES, plans, strict=True):
            pictures = ArrivingPictures(home / "pictures" / name, samples)
            pictures.write_labelled(plan.labelled)
            devices.append(LoopDevice(name, pictures, plan, home / "state" / name, home / "answers" / f"{name}.jsonl"))
        (home / "answers").mkdir()
        world = LoopFleet(home, devices, stack.enter_context(Fleet()))
        story = LoopStory(world, classes, {**RUN, "seed": settings.seed}, report)
        first = story.use_first_model()
        false_alarms = story.show_usual(first.model)
        drift, drift_after, before = story.show_new_class(first.model)
        given = story.give_labels()
        second = story.learn_new_class()
        after = story.show_later(second.model)
    return LoopOutcome(
        classes=classes,
        first=first.model,
        second=second.model,
        drift=drift,
        drift_after=drift_after,
        false_alarms=false_alarms,
        labels=dict(given),
        reason=second.reason,
        canaries=find_canaries(second),
        before=before,
        after=after,
        seconds=round(time.monotonic() - began, 1),
    )


class LoopStory:
    """The steps of the story, in this order."""

    def __init__(
        self, world: LoopFleet, classes: tuple[str, ...], values: dict[str, Any], report: Callable[[str], None]
    ) -> None:
        self._world, self._report = world, report
        self._classes, self._new = classes, classes[-1]
        self._values = values

    def use_first_model(self) -> ModelView:
        """Train a model of two classes, and let the devices answer pictures with it."""
        world, known = self._world, self._classes[:-1]
        labelled = len(world.devices[0].plan.labelled)
        self._report(f"{' and '.join(SITES)} have {labelled} pictures of {' and '.join(known)} each")
        world.start()
        if address := world.start_dashboard():
            self._report(f"dashboard: {address}")
        values = {**self._values, "stop": {"accuracy": 0.97}, "promote": {**RULES, "after": 0}}
        first = world.train("first", {**values, "classes": list(known)})
        self._report(f"model {first.model} is trained: {first.reason}")
        world.wait_for_champion(first.model)
        for device in world.devices:
            world.start_serving(device)
        world.wait_for_answers(first.model)
        self._report(f"model {first.model} answers on {' and '.join(SITES)}")
        return first

    def show_usual(self, model: str) -> int:
        """Let pictures of the known classes arrive; return the number of devices that report drift."""
        self._world.show(lambda device: device.plan.usual)
        self._report(f"pictures arrive: {_describe(count_answers(self._world.devices, model))}")
        return sum(bool(device.read_drift()) for device in self._world.devices)

    def show_new_class(self, model: str) -> tuple[dict[str, list[str]], dict[str, int], dict[str, ServedClass]]:
        """Let pictures of the new class arrive.

        Return by device the measures that drift, and how many of the pictures were answered before; and the answers of
        the model.
        """
        world, new = self._world, self._new
        answered = {device.name: len(device.read_answers()) for device in world.devices}
        drift: dict[str, list[str]] = {}
        after: dict[str, int] = {}

        def look() -> bool:
            for device in world.devices:
                if measures := device.read_drift():
                    drift[device.name] = measures
                    after.setdefault(device.name, len(device.read_answers()) - answered[device.name])
            return bool(drift)

        world.show(lambda device: device.plan.new, look)
        world.wait(look, "no drift is reported")
        before = count_answers(world.devices, model)
        self._report(f"{new} appears: {_describe({new: before[new]})}")
        for name, measures in drift.items():
            self._report(f"{name} has drift of {', '.join(measures)} after {after[name]} pictures of {new}")
        world.wait_for_drift(len(drift))
        self._report(f"the coordinator knows of drift on {format_count(len(drift), 'device')}")
        return drift, after, before

    def give_labels(self) -> Counter[str]:
        """Give labels to the pictures of which each device is least sure; return their number by class."""
        given: Counter[str] = Counter()
        for device in self._world.devices:
            (device.pictures.folder / self._new).mkdir()
            given += self._world.label(device, self._classes)
        self._report(
            f"labels for the least sure pictures: {', '.join(f'{given[name]} {name}' for name in sorted(given))}"
        )
        return given

    def learn_new_class(self) -> ModelView:
        """Train a model of all classes; it is a canary first, then all devices answer with it."""
        world = self._world
        second = world.train(
            "second", {**self._values, "classes": list(self._classes), "promote": {**RULES, "after": CANARY}}
        )
        self._report(f"model {second.model} is trained: {second.reason}")
        self._report(f"model {second.model} is canary on {' and '.join(find_canaries(second))} for {CANARY}")
        world.wait_for_champion(second.model)
        world.wait_for_answers(second.model)
        self._report(f"model {second.model} is promoted, and answers on {' and '.join(SITES)}")
        return second

    def show_later(self, model: str) -> dict[str, ServedClass]:
        """Let pictures of all classes arrive; return the answers."""
        self._world.show(lambda device: device.plan.later)
        after = count_answers(self._world.devices, model)
        self._report(f"pictures arrive: {_describe(after)}")
        return after


def find_canaries(model: ModelView) -> list[str]:
    """Return the devices that use a model first."""
    return [each.device for each in model.devices if each.wanted == "canary"]


def count_answers(devices: Sequence[LoopDevice], model: str) -> dict[str, ServedClass]:
    """Count the answers of a model by the true class of the pictures."""
    counts: dict[str, ServedClass] = {}
    for device in devices:
        for line in device.read_answers():
            if line.get("model") == model:
                name = device.pictures.find_class(line["picture"])
                before = counts.get(name, ServedClass())
                counts[name] = ServedClass(
                    before.pictures + 1,
                    before.right + (line.get("label") == name),
                    before.unsure + (line.get("label") is None),
                )
    return dict(sorted(counts.items()))


def _describe(counts: dict[str, ServedClass]) -> str:
    return ", ".join(
        f"{each.right} of {each.pictures} {name} right" + (f" ({each.unsure} unsure)" if each.unsure else "")
        for name, each in counts.items()
    )
