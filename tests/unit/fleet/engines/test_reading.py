"""Features of a frozen backbone, computed once in a run, give the results that images give."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.compute.planning.batch import method_batch
from coordinator.config import ImageConfig
from coordinator.record.record import open_record
from fedvit.methods import make_method
from fedvit.models import build_vit
from fleet.datasets.digits import read_digits
from fleet.devices import device_folders
from fleet.engines import cohort
from fleet.engines.reading import reads_features
from fleet.partition import write_device_folders
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.tiny import TINY_MODEL


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fed_head", {"batch_size": 16, "epochs": 2, "lr": 0.05}),
        ("analytic", {"batch_size": 8}),
        ("personal_analytic", {"batch_size": 8}),
    ],
)
def test_features_train_as_images_do(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = np.split(np.random.default_rng(0).permutation(90), [20, 50])
    write_device_folders(read_digits(8), parts, tmp_path / "parts", test_share=0.2, seed=0)
    folders = device_folders(tmp_path / "parts", 3)
    values = {"method": method, "rounds": 3, "options": options, "model_options": TINY_MODEL}
    reads = []
    read_features = cohort.read_features
    monkeypatch.setattr(cohort, "read_features", lambda *given: (reads.append(len(given[2])), read_features(*given))[1])

    def run(name: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray[Any, Any]]]:
        request = RunRequest(folders, values, out=tmp_path, run=name, engine="torch", at_once=1)
        outcome = simulate(request)
        return [entry.accuracy for entry in outcome.summary.rounds], load_file(outcome.folder / "model.safetensors")

    by_features = run("features")
    assert reads == [90]
    monkeypatch.setattr(cohort, "reads_features", lambda *_: False)
    by_images = run("images")
    assert reads == [90]
    assert by_features[0] == by_images[0] != []
    assert by_features[1].keys() == by_images[1].keys()
    for name, value in by_images[1].items():
        np.testing.assert_allclose(by_features[1][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_devices_with_another_backbone_have_other_features(tmp_path: Path) -> None:
    """A backbone in int8 on one device changes nothing for the other one, in any order."""
    parts = np.split(np.random.default_rng(0).permutation(60), [30])
    write_device_folders(read_digits(8), parts, tmp_path / "parts", test_share=0.2, seed=0)
    folders = device_folders(tmp_path / "parts", 2)
    tuned = {"batch_size": 16, "epochs": 2, "lr": 0.05}
    values = {"method": "fed_head", "rounds": 1, "options": tuned, "model_options": TINY_MODEL}

    def run(name: str, variants: dict[str, Any]) -> dict[str, float]:
        given = {**values, "variants": variants, "evaluate_every": 1}
        request = RunRequest(folders, given, out=tmp_path, run=name, engine="torch", at_once=1)
        simulate(request)
        with open_record(tmp_path) as store:
            losses = {one.device: one.metrics["loss"] for one in store.tasks.read_used_in(name, 1, "train")}
        return losses

    plain = run("plain", {})
    for packed, other in (("device-0", "device-1"), ("device-1", "device-0")):
        mixed = run(packed, {packed: {"frozen_precision": "int8"}})
        assert mixed[other] == pytest.approx(plain[other], rel=1e-6)
        assert mixed[packed] != pytest.approx(plain[packed], rel=1e-6)


@pytest.mark.parametrize(
    ("method", "options", "varied", "expected"),
    [
        ("fed_head", {}, {}, True),
        ("analytic", {}, {}, True),
        ("fed_head", {"mask": 0.5}, {}, False),
        ("fed_head", {"dropout": 0.1}, {}, False),
        ("fed_head", {}, {"flip": True}, False),
        ("fed_head", {}, {"crop_padding": 1}, False),
        ("fed_head", {}, {"brightness": 0.1}, False),
        ("fed_bias", {}, {}, False),
        ("fedavg", {}, {}, False),
    ],
)
def test_methods_whose_features_never_change(
    method: str, options: dict[str, Any], varied: dict[str, Any], expected: bool
) -> None:
    made = make_method(method, options)
    vit = build_vit("vit_small_images", 10, seed=0, options=TINY_MODEL)
    batch = method_batch(made, vit, ImageConfig(**varied))
    assert reads_features(made, vit, batch) is expected
