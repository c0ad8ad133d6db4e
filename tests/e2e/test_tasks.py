"""Real processes train tasks other than one class for each image; a device's bundle answers in the task's terms."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner

import edge_client.cli
from fedvit.answers import unscale_outputs
from fedvit.data.folder import DeviceData
from fedvit.data.images import read_mask
from fedvit.data.label_file import read_class_names
from fedvit.errors import ConfigError
from fedvit.label_forms import LabelForm
from fedvit.program import Batch
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from tests.support.federation import Federation
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MODEL = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
OPTIONS: dict[str, Any] = {"batch_size": 16, "optimizer": "adamw", "lr": 0.005}
RUNS: dict[str, dict[str, Any]] = {
    "multi_label": {"rounds": 6, "options": {**OPTIONS, "epochs": 10}},
    "regression": {"rounds": 3, "options": {**OPTIONS, "epochs": 2}, "number_range": [0.0, 1.0]},
    "segmentation": {"rounds": 4, "options": {**OPTIONS, "epochs": 5}},
}
DATA = {"multi_label": "digits-pairs", "regression": "digits-dimmed", "segmentation": "digits-masks"}
DEVICE = "device-0"


@pytest.fixture(scope="module", params=list(RUNS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A finished run of two devices, and its folder."""
    home = tmp_path_factory.mktemp(request.param)
    deal(DATA[request.param], "iid", 2, home / "parts", DealSettings(size=16, samples=600))
    values = {"method": "fedper", "task": request.param, "model_options": MODEL, **RUNS[request.param]}
    federation = Federation(home, device_folders(home / "parts", 2), values, None)
    with federation.links:
        try:
            for name in federation.devices:
                federation.start_device(name)
            federation.start_run("run")
            wait_until(lambda: federation.exit_code() is not None, "the run does not end", wait_s=300)
            assert federation.exit_code() == 0, federation.log("coordinator").read_text()[-2000:]
            [(totals,)] = federation.query("select totals from rounds order by round desc limit 1")
            (home / "totals.json").write_text(totals)
        finally:
            federation.close()
    return request.param, home


def test_devices_learn_it(trained: tuple[str, Path]) -> None:
    """Who always answers all classes has an F1 of 0.32; who always answers the middle, an error of a quarter; who
    always answers background, 0.65.

    By the policy of a device nothing is counted by class, so that there is no AUC, and no R2.
    """
    task, home = trained
    totals = json.loads((home / "totals.json").read_text())
    if task == "multi_label":
        assert totals["accuracy_mean"] > 0.45
        assert totals["scores"] == {}
    elif task == "segmentation":
        assert totals["accuracy_mean"] > 0.72
        assert totals["scores"] == {}
    else:
        assert totals["scores"].keys() == {"mae"}
        assert totals["scores"]["mae"] < 0.15


def call(*arguments: str | Path) -> str:
    result = CliRunner().invoke(edge_client.cli.cli, [str(part) for part in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_bundle_answers_in_the_terms_of_the_task(trained: tuple[str, Path]) -> None:
    task, home = trained
    data, bundle = home / "parts" / DEVICE, home / "bundle"
    call("export", "run", "--data", data, "--state", home / "state" / DEVICE, "--out", bundle, "--threads", "1")
    form = LabelForm(task=task)  # type: ignore[arg-type]
    batch = Batch(batch_size=1, image_size=16, patch_size=4, labels=form)
    classes = json.loads((bundle / "labels.json").read_text())
    images = DeviceData.open(data).relabel(classes).fit_to(batch).test
    answers = json.loads(call("predict", *images.paths, "--bundle", bundle, "--threads", "1", "--json"))
    session = onnxruntime.InferenceSession(bundle / "model.onnx")
    names = {output.name for output in session.get_outputs()}
    right = []
    for labels, entry in zip(images.labels, answers, strict=True):
        if task == "multi_label":
            known = {str(place) for place in np.flatnonzero(labels)}
            given = {answer["label"] for answer in entry["answers"]}
            assert all(answer["probability"] >= 0.5 for answer in entry["answers"])
            right.append(2 * len(known & given) / max(1, len(known) + len(given)))
        elif task == "segmentation":
            assert sum(answer["number"] for answer in entry["answers"]) == pytest.approx(1)
        else:
            [answer] = entry["answers"]
            assert answer["label"] == "brightness"
            number = float(unscale_outputs(form, labels)[0])
            right.append(max(0.0, 1 - abs(answer["number"] - number)))
    if task == "segmentation":
        call("predict", *images.paths, "--bundle", bundle, "--threads", "1", "--masks", home / "masks")
        assert read_class_names(home / "masks" / "classes.txt") == tuple(classes)
        for labels, mask in zip(images.labels, sorted((home / "masks").glob("*.png")), strict=True):
            right.append((read_mask(mask, 16, 4, 11) == labels).mean())
    card = json.loads((bundle / "card.json").read_text())
    accuracy = card["files"]["fp32"]["accuracy"]
    assert accuracy["correct"] / accuracy["images"] == pytest.approx(np.mean(right), abs=1e-3)
    assert ("numbers" if task == "regression" else "probabilities") in names
    assert card["calibration"] is None
    text = call("predict", images.paths[0], "--bundle", bundle, "--threads", "1")
    assert images.paths[0].name in text


def test_a_model_of_another_task_is_not_served(trained: tuple[str, Path]) -> None:
    _, home = trained
    arguments = ["models", "add", "run", "--data", home / "parts" / DEVICE, "--state", home / "state" / DEVICE]
    result = CliRunner().invoke(edge_client.cli.cli, [str(part) for part in arguments])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.code == "FV2492"
