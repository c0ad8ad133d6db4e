"""Secure sums in simulations: in memory with all messages, and on torch as integers without masks."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.record.record import open_record
from coordinator.record.tables import SUM
from fleet.datasets.digits import read_digits
from fleet.devices import device_folders
from fleet.partition import write_device_folders
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.tiny import TINY_MODEL

DEVICES = 3
VALUES: dict[str, Any] = {
    "method": "fedper", "rounds": 1, "options": {"batch_size": 16, "lr": 0.05}, "model_options": TINY_MODEL,
    "devices": DEVICES,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three devices with 20, 30 and 40 digits, of which each tests with a fifth."""
    out = tmp_path_factory.mktemp("dealt") / "parts"
    parts = np.split(np.random.default_rng(0).permutation(90), [20, 50])
    write_device_folders(read_digits(8), parts, out, test_share=0.2, seed=0)
    return device_folders(out, DEVICES)


@pytest.mark.slow
def test_both_engines_have_the_sum_of_a_plain_run(folders: list[Path], tmp_path: Path, graph_cache: Path) -> None:
    models, shown = {}, {}
    for name, engine, secure in (("plain", "onnx", False), ("onnx", "onnx", True), ("torch", "torch", True)):
        out = tmp_path / name
        request = RunRequest(
            folders, {**VALUES, "secure": secure}, out=out, run="run", engine=engine, at_once=1, graph_cache=graph_cache
        )
        outcome = simulate(request)
        models[name] = load_file(outcome.folder / "model.safetensors")
        [entry] = outcome.summary.rounds
        shown[name] = entry.cohort, entry.accepted, entry.accuracy_weighted
    with closing(open_record(tmp_path / "onnx")) as store:
        [added] = [result for result in store.tasks.read_used_in("run", 1) if result.device == SUM]
        [tested] = [result for result in store.tasks.read_used_in("run", 1, "evaluate") if result.device == SUM]
    bound = added.metrics["error_bound"]
    assert added.metrics["devices"] == DEVICES
    assert sum(count.images for count in tested.by_class) == tested.samples
    assert shown["plain"] == pytest.approx(shown["onnx"])
    for name, value in models["plain"].items():
        assert np.abs(models["onnx"][name] - value).max() <= bound + 2**-22  # float32 near 1
        assert np.allclose(models["torch"][name], models["onnx"][name], atol=1e-4)


def test_a_head_from_a_secure_sum_is_that_of_a_plain_run(
    folders: list[Path], tmp_path: Path, graph_cache: Path
) -> None:
    """The rounding of the sum moves no score by a hundredth of the largest one."""
    heads = {}
    for name, engine, secure in (("plain", "onnx", False), ("onnx", "onnx", True), ("torch", "torch", True)):
        values = {**VALUES, "method": "analytic", "options": {"batch_size": 8}, "secure": secure}
        request = RunRequest(
            folders, values, out=tmp_path / name, run="run", engine=engine, at_once=1, graph_cache=graph_cache
        )
        outcome = simulate(request)
        heads[name] = load_file(outcome.folder / "model.safetensors")["head.weight"]
        [entry] = outcome.summary.rounds
        assert entry.figures["kept_devices"] == (1 if secure else DEVICES)
    largest = np.abs(heads["plain"]).max()
    for name in ("onnx", "torch"):
        assert np.abs(heads[name] - heads["plain"]).max() <= 1e-2 * largest
