"""The story step by step: two devices are used, a class appears, it gets labels, is learned, tried and promoted.

All programs are real processes (`fleet.loop.fleet`).
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from coordinator.model_view import ModelView
from fedvit.errors import ConfigError
from fedvit.files import private_files
from fedvit.quantities import format_count
from fleet.datasets import read_samples
from fleet.loop.fleet import LOOK_EVERY_S, SITES, LoopDevice, LoopFleet
from fleet.loop.pictures import ArrivingPictures, choose_classes, plan_pictures
from fleet.processes import Fleet

DRIFT_S = 20.0
"""Longest wait for drift after the pictures of the new class: of weak models it is not noticed in so few."""
RUN: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 16,
    "seed": 0,
    "devices": len(SITES),
    "options": {"epochs": 8, "batch_size": 16, "optimizer": "adamw", "lr": 2e-3},
    "model_options": {"image_size": 32, "patch_size": 4, "width": 64, "depth": 2, "heads": 4},
    "images": {"crop_padding": 2},
}
PRETRAINED_RUN: dict[str, Any] = {
    "method": "fed_head",
    "rounds": 4,
    "devices": len(SITES),
    "options": {"epochs": 10, "batch_size": 16, "optimizer": "adamw", "lr": 2e-3},
    "model": "deit_tiny_patch16_224",
    "model_options": {"image_size": 160},
}
"""The same with pretrained weights: devices train a head on features that they compute once for each picture."""
TEST_SHARE, PRETRAINED_TEST_SHARE = 0.4, 0.5
"""Share of a device's labelled pictures that test. A head needs few pictures, and more tests show a gain sooner."""
CANARY = "5s"
"""Time for which the second model is a canary."""
RULES: dict[str, Any] = {"min_images": 40, "canary": "site=berlin"}


class LoopSettings(NamedTuple):
    """Settings of the demo."""

    out: Path
    data: str = "digits"
    classes: tuple[str, ...] = ()  # the third one is new; (): the first three of the data set
    seed: int = 0
    pretrained: Path | None = None  # weights of PRETRAINED_RUN's model; None: a small model learns from the start

    @property
    def test_share(self) -> float:
        return TEST_SHARE if self.pretrained is None else PRETRAINED_TEST_SHARE

    def choose_run(self) -> dict[str, Any]:
        """Return the configuration of both runs. Raises ConfigError without the file of weights."""
        if self.pretrained is None:
            return {**RUN, "seed": self.seed}
        if not self.pretrained.is_file():
            raise ConfigError("FV1009", f"--pretrained {self.pretrained}: there is no such file")
        return {**PRETRAINED_RUN, "seed": self.seed, "pretrained": str(self.pretrained.resolve())}


class ServedClass(Struct, frozen=True):
    """Answers to the pictures of one class."""

    pictures: int = 0
    right: int = 0
    unsure: int = 0


class LoopOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of the story."""

    classes: tuple[str, ...]
    first: str  # the model that knew two classes
    second: str
    drift: dict[str, list[str]]  # measures by device
    drift_after: dict[str, int]  # pictures of the new class until the alert was seen, by device
    false_alarms: int  # devices with an alert before the new class appeared
    labels: dict[str, int]  # given, by class
    reason: str  # of the promotion
    canaries: int  # devices that used the second model first
    before: dict[str, ServedClass]  # answers of the first model, by class
    after: dict[str, ServedClass]  # answers of the second one
    seconds: float


def play_story(settings: LoopSettings, report: Callable[[str], None]) -> LoopOutcome:
    """Play the story, and report what happens; all processes have ended afterwards.

    Raises ConfigError and DataError for pictures that do not fit and for a folder `loop` of somebody else, FedvitError
    if a step does not happen.
    """
    began = time.monotonic()
    values = settings.choose_run()
    samples = read_samples(settings.data, values["model_options"]["image_size"])
    labels = choose_classes(samples, settings.classes)
    classes = tuple(samples.classes[label] for label in labels)
    plans = plan_pictures(samples, labels, len(SITES), settings.seed)
    with private_files(), ExitStack() as stack:
        home = clear_folder(settings.out / "loop")
        devices = []
        for name, plan in zip(SITES, plans, strict=True):
            pictures = ArrivingPictures(home / "pictures" / name, samples)
            pictures.write_labelled(plan.labelled)
            devices.append(LoopDevice(name, pictures, plan, home / "state" / name, home / "answers" / f"{name}.jsonl"))
        world = LoopFleet(home, devices, stack.enter_context(Fleet()), settings.test_share)
        story = LoopStory(world, classes, values, report)
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
        canaries=count_canaries(second),
        before=before,
        after=after,
        seconds=round(time.monotonic() - began, 1),
    )


def clear_folder(home: Path) -> Path:
    """Remove what an earlier demo left there, and return the folder. Raises ConfigError if it is somebody else's."""
    answers = home / "answers"
    if home.exists() and not answers.is_dir():
        raise ConfigError("FV2007", f"{home} is no earlier demo, so it is not overwritten; choose another --out")
    if home.exists():
        for folder in home.iterdir():
            if folder != answers:
                shutil.rmtree(folder)
        shutil.rmtree(home)  # after a kill that far, `answers` still says whose folder this is
    answers.mkdir(parents=True)
    return home


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
        until = time.monotonic() + DRIFT_S
        while not look() and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        before = count_answers(world.devices, model)
        self._report(f"{new} appears: {_describe({new: before[new]})}")
        for name, measures in drift.items():
            self._report(f"{name} has drift of {', '.join(measures)} after {after[name]} pictures of {new}")
        if drift:
            world.wait_for_drift(len(drift))
            self._report(f"the coordinator knows of drift on {format_count(len(drift), 'device')}")
        else:
            self._report(f"no device has noticed drift in {before[new].pictures} pictures of {new}")
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
        self._report(f"model {second.model} is canary on {format_count(count_canaries(second), 'device')} for {CANARY}")
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


def count_canaries(model: ModelView) -> int:
    """Count the devices that used a model first, from its history: all devices may use it by now."""
    return sum(change.devices for change in model.history if change.act == "canary")


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
