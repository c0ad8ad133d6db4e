"""A bundle of a device's model, and its answers beside those of the bundle in use."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_client.work.runtime import Challenge, Compared, GraphRunner, ModelSource, ModelTest, Seeds, Stopped, Watch
from export.bundle.read import Bundle
from fedvit.data.folder import DeviceData
from fedvit.tensors import Tensors
from tests.support.agents import SILENT
from tests.support.settings import Setting

SEEDS = Seeds(5, 1, "pi")


def compare(
    runner: GraphRunner, setting: Setting, values: Tensors, data: DeviceData, champion: Path | None = None
) -> Compared:
    graph = setting.blobs.path(setting.program.graphs[setting.program.evaluate.graph].digest)
    challenge = Challenge(ModelSource("run", 1, "pi", 0), graph, champion, "x86_64", 2, "may be sent: no update")
    return runner.compare(ModelTest(setting.program, values, data, SEEDS), SILENT, challenge)


def write(folder: Path, compared: Compared) -> Path:
    folder.mkdir()
    for name, content in compared.files.items():
        (folder / name).write_bytes(content)
    return folder


def always(setting: Setting, answer: int) -> Tensors:
    """Tensors with which each answer is the same class."""
    bias = np.zeros(len(setting.program.classes), np.float32)
    bias[answer] = 9.0
    return {**setting.start(), "head.weight": np.zeros_like(setting.start()["head.weight"]), "head.bias": bias}


@pytest.fixture
def uneven(uneven_digits: Path, fedavg: Setting) -> DeviceData:
    """One zero, two ones and three twos to test."""
    return DeviceData.open(uneven_digits).relabel(fedavg.program.classes)


def test_counts_are_those_of_both_models_on_the_same_images(
    fedavg: Setting, uneven: DeviceData, tmp_path: Path
) -> None:
    runner = fedavg.runtime()
    first = compare(runner, fedavg, always(fedavg, 1), uneven)
    assert (first.with_champion, first.comparison.only_challenger, first.comparison.neither) == (False, 2, 4)
    champion = write(tmp_path / "champion", first)
    training = Bundle.open(champion, None, 1).card.training
    assert training
    assert (training.train_images, training.test_images) == (len(uneven.train), len(uneven.test))
    assert training.policy[-1] == "may be sent: no update"
    second = compare(runner, fedavg, always(fedavg, 2), uneven, champion)
    counts = second.comparison
    assert second.with_champion
    assert (counts.both, counts.only_challenger, counts.only_champion, counts.neither) == (0, 3, 2, 1)
    same = compare(runner, fedavg, always(fedavg, 2), uneven, write(tmp_path / "same", second)).comparison
    assert (same.both, same.only_challenger, same.only_champion, same.neither) == (3, 0, 0, 3)


def test_bundle_answers_as_the_evaluation_does(fedavg: Setting, data: DeviceData, tmp_path: Path) -> None:
    data = data.relabel(fedavg.program.classes)
    runner = fedavg.runtime()
    compared = compare(runner, fedavg, fedavg.start(), data)
    evaluated = runner.evaluate(ModelTest(fedavg.program, fedavg.start(), data, SEEDS), SILENT)
    assert (compared.comparison.only_challenger, compared.comparison.images) == (evaluated.correct, evaluated.samples)
    bundle = Bundle.open(write(tmp_path / "bundle", compared), None, 1)
    assert (bundle.card.origin.run, bundle.card.origin.round, bundle.card.origin.device) == ("run", 1, "pi")


def test_models_with_other_classes_are_compared_by_name(fedavg: Setting, uneven: DeviceData, tmp_path: Path) -> None:
    """The champion knows the same classes in the opposite order."""
    runner = fedavg.runtime()
    compared = compare(runner, fedavg, always(fedavg, 0), uneven)
    champion = write(tmp_path / "champion", compared)
    labels = list(fedavg.program.classes)[::-1]
    (champion / "labels.json").write_bytes(msgspec.json.encode(labels))
    counts = compare(runner, fedavg, always(fedavg, 2), uneven, champion).comparison
    assert (counts.both, counts.neither) == (3, 3)


def test_damaged_champion_counts_as_none(fedavg: Setting, uneven: DeviceData, tmp_path: Path) -> None:
    champion = write(tmp_path / "champion", compare(fedavg.runtime(), fedavg, fedavg.start(), uneven))
    (champion / "model.onnx").write_bytes(b"damaged")
    assert not compare(fedavg.runtime(), fedavg, fedavg.start(), uneven, champion).with_champion


def test_stopped_comparison_ends(fedavg: Setting, uneven: DeviceData) -> None:
    graph = fedavg.blobs.path(fedavg.program.graphs[fedavg.program.evaluate.graph].digest)
    challenge = Challenge(ModelSource("run", 1, "pi", 0), graph, None, "x86_64", 2, "may be sent: no update")
    with pytest.raises(Stopped):
        fedavg.runtime().compare(
            ModelTest(fedavg.program, fedavg.start(), uneven, SEEDS), Watch(lambda *_: None, lambda: True), challenge
        )


@pytest.mark.parametrize("name", ["fedavg", "eftvit"])
def test_each_program_makes_a_bundle(name: str, settings: Mapping[str, Setting], data: DeviceData) -> None:
    setting = settings[name]
    compared = compare(setting.runtime(), setting, setting.start(), data.relabel(setting.program.classes))
    assert set(compared.files) == {"model.onnx", "card.json", "labels.json", "preprocessing.json", "README.md"}
