"""Simulations of tasks other than one class for each image learn, with both engines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.run_view import RoundView
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError
from fedvit.label_forms import LabelForm
from fedvit.program import Batch
from fleet.datasets import SOURCES
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from fleet.request import RunOutcome, RunRequest
from fleet.simulate import simulate
from tests.support.codes import has_code

DATA = {"multi_label": "digits-pairs", "regression": "digits-dimmed", "segmentation": "digits-masks"}
MODEL = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
OPTIONS: dict[str, Any] = {"batch_size": 16, "epochs": 2, "optimizer": "adamw", "lr": 0.005}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for task, dataset in DATA.items():
        settings = DealSettings({"alpha": 2.0}, size=16, samples=600)
        deal(dataset, "dirichlet", 2, folder / task, settings)
    return folder


def run(parts: Path, out: Path, cache: Path, task: str, **values: Any) -> RunOutcome:
    engine = values.pop("engine", "torch")
    config = {
        "method": "fedavg", "rounds": 3, "evaluate_every": 3, "model_options": MODEL, "task": task,
        "options": {**OPTIONS, **values.pop("options", {})}, **values,
    }  # fmt: skip
    if task == "regression":
        config["number_range"] = [0.0, 1.0]
    folders = device_folders(parts / task, 2)
    return simulate(RunRequest(folders, config, out=out, run="run", graph_cache=cache, engine=engine, at_once=1))


def last(outcome: RunOutcome) -> RoundView:
    return outcome.summary.rounds[-1]


@pytest.mark.parametrize("task", DATA)
def test_engines_train_the_same_model(parts: Path, tmp_path: Path, graph_cache: Path, task: str) -> None:
    """The onnx engine runs real agents, whose checks follow the graphs of these losses."""
    options = {"optimizer": "sgd", "lr": 0.005, "epochs": 1}
    outcomes = {
        engine: run(parts, tmp_path / engine, graph_cache, task, options=options, rounds=1, engine=engine)
        for engine in ("onnx", "torch")
    }
    onnx, torch = (load_file(outcomes[engine].folder / "model.safetensors") for engine in ("onnx", "torch"))
    assert all(np.allclose(onnx[name], torch[name], atol=1e-4) for name in onnx)
    first, second = (last(outcomes[engine]) for engine in ("onnx", "torch"))
    assert first.accuracy_mean == pytest.approx(second.accuracy_mean, abs=1e-3)
    assert first.scores == pytest.approx(second.scores, abs=1e-2)


@pytest.mark.slow
def test_sets_of_digits_are_learned(parts: Path, tmp_path: Path, graph_cache: Path) -> None:
    """By chance, AUC is 0.5, and the mean precision the share of images with a class, 0.19."""
    scores = last(run(parts, tmp_path, graph_cache, "multi_label", rounds=25)).scores
    assert scores["auc"] > 0.75
    assert scores["mean_ap"] > 0.4
    assert scores["macro_f1"] > 0.25


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fed_head"])
def test_brightness_is_learned(parts: Path, tmp_path: Path, graph_cache: Path, method: str) -> None:
    """Who always answers the middle has R2 = 0, and an error of a quarter of the range."""
    outcome = last(run(parts, tmp_path, graph_cache, "regression", method=method))
    assert outcome.scores["r2"] > 0.5
    assert outcome.scores["mae"] < 0.15
    assert outcome.accuracy_mean == pytest.approx(1 - outcome.scores["mae"], abs=0.02)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fed_prompt", "fedperfix"])
def test_patches_of_digits_are_learned(parts: Path, tmp_path: Path, graph_cache: Path, method: str) -> None:
    """Who always answers background is right in 0.6 of the patches, with a mean IoU of 0.6 / 11."""
    options = {"lr": 0.003, "epochs": 4, **({"head": "shared"} if method == "fed_prompt" else {})}
    newest = last(run(parts, tmp_path, graph_cache, "segmentation", method=method, rounds=6, options=options))
    assert newest.scores["miou"] > 0.12


@pytest.mark.parametrize("task", ["multi_label", "regression"])
def test_eftvit_trains_its_server_on_features_with_labels_of_the_task(
    parts: Path, tmp_path: Path, graph_cache: Path, task: str
) -> None:
    """Devices send one feature of each image, and keep counts by class; of a regression errors are known."""
    outcome = run(parts, tmp_path, graph_cache, task, method="eftvit", options={"local_blocks": 1})
    newest = last(outcome)
    images = sum(device.train_samples for device in outcome.summary.devices)
    assert newest.figures["uploaded_features"] == images
    assert newest.scores.keys() == ({"mae"} if task == "regression" else set())
    losses = [entry.figures["server_loss"] for entry in outcome.summary.rounds]
    assert losses[-1] < losses[0]


def test_auc_is_counted_where_it_is_asked_for(tmp_path: Path, graph_cache: Path) -> None:
    deal("digits", "iid", 2, tmp_path / "classification", DealSettings(size=16, samples=200))
    outcome = run(tmp_path, tmp_path, graph_cache, "classification", auc=True, rounds=12, options={"lr": 0.003})
    assert last(outcome).scores["auc"] > 0.6
    plain = run(tmp_path, tmp_path / "plain", graph_cache, "classification", rounds=1, evaluate_every=1)
    assert last(plain).scores == {}


def test_devices_get_label_files_that_add_up(parts: Path) -> None:
    for task, dataset in DATA.items():
        samples = SOURCES[dataset](16)
        opened = [DeviceData.open(folder) for folder in device_folders(parts / task, 2)]
        assert {data.classes for data in opened} == {samples.classes}
        assert sum(len(data.train) + len(data.test) for data in opened) == 600
        for data in opened:
            fitted = data.fit_to(Batch(batch_size=1, image_size=16, patch_size=4, labels=LabelForm(task=task)))
            form = fitted.train.labels.shape[1:]
            assert form == ((16,) if task == "segmentation" else (len(samples.classes),))
            assert all(path.is_file() for path in data.train.paths)


@pytest.mark.parametrize(
    ("code", "values", "named"),
    [
        ("FV1004", {"task": "regression"}, "number_range"),
        ("FV1004", {"task": "regression", "number_range": [1.0, 0.0]}, "number_range"),
        ("FV1004", {"task": "multi_label", "number_range": [0.0, 1.0]}, "number_range"),
        ("FV1004", {"task": "multi_label", "secure": True}, "secure"),
        ("FV1004", {"task": "multi_label", "promote": {}}, "[promote]"),
        ("FV1004", {"task": "regression", "number_range": [0.0, 1.0], "classes": ["a", "b"]}, "one number"),
        ("FV2490", {"task": "multi_label", "method": "fedproto"}, "averages features by class"),
        (
            "FV2490",
            {"task": "multi_label", "method": "eftvit", "options": {"sampler": "balanced", "local_blocks": 1}},
            "balanced",
        ),
        ("FV2490", {"task": "segmentation", "method": "eftvit", "options": {"local_blocks": 1}}, "mask = 0.75"),
        (
            "FV2490",
            {"task": "segmentation", "method": "eftvit", "options": {"local_blocks": 1, "mask": 0.0}},
            "one label each",
        ),
        ("FV2490", {"task": "segmentation", "method": "moon"}, "one feature of each image"),
        ("FV1004", {"task": "segmentation", "images": {"flip": True}}, "not cropped or mirrored"),
        ("FV2490", {"auc": True, "method": "eftvit", "options": {"local_blocks": 1}}, "keeps on devices"),
    ],
)
def test_what_does_not_fit_a_task_is_refused_by_name(
    tmp_path: Path, code: str, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, check=has_code(code, named)):
        simulate(RunRequest([tmp_path], {"model_options": MODEL, **values}, out=tmp_path, run="run"))


def test_images_of_other_tasks_are_not_set_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV2004")):
        deal("digits-pairs", "iid", 2, tmp_path / "parts", DealSettings(global_test=0.1, size=8))
