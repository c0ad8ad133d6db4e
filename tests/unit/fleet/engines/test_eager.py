"""The eager engine: the results of the other engines, without graphs, and errors that name a method's line."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from coordinator.record.record import open_record
from fedvit.errors import ConfigError
from fedvit.methods import METHODS, fedavg
from fedvit.methods.base import StepInputs
from fedvit.methods.calculus import Objective
from fedvit.methods.failures import MethodFailed
from fedvit.models.vit import PatchViT
from fedvit.program import Train
from fleet.request import RunOutcome, RunRequest
from fleet.simulate import simulate
from tests.support.codes import has_code
from tests.support.tiny import TINY_MODEL

DEVICES = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {"momentum": 0.9},
    "fedper": {"optimizer": "adamw", "lr": 0.002},
    "eftvit": {"local_blocks": 1, "lr": 0.01},
    "fedtp": {"knn_weight": 0.6, "head": "rod", "capacity": 20},
    "per_fedavg": {},
    "ditto": {},
    "personal_analytic": {},
    "fedra": {"layers": 1},
    "flexlora": {"own_rank": 2},
}
"""Methods with each kind of step: gradients, whole steps, sums, generated, gathered and collected tensors, draws of the
server."""


def run(folders: list[Path], out: Path, method: str, engine: Any, **more: Any) -> RunOutcome:
    options = {"batch_size": 16, "lr": 0.05, **OPTIONS.get(method, {})}
    if "analytic" in method:
        options = {"batch_size": 16}
    values = {"method": method, "rounds": 2, "options": options, "model_options": TINY_MODEL}
    return simulate(RunRequest(folders, values, out=out, run=engine, engine=engine, at_once=1, **more))


@pytest.mark.parametrize("method", OPTIONS)
def test_results_are_those_of_batches_of_devices(method: str, folders: list[Path], tmp_path: Path) -> None:
    outcomes = [run(folders, tmp_path, method, engine) for engine in ("torch", "eager")]
    batched, eager = (load_file(outcome.folder / "model.safetensors") for outcome in outcomes)
    assert batched.keys() == eager.keys()
    for name, value in batched.items():
        np.testing.assert_allclose(eager[name], value, rtol=2e-3, atol=1e-4, err_msg=name)
    left, right = (outcome.summary.devices for outcome in outcomes)
    assert [(one.device, one.flops_per_round) for one in left] == [(one.device, one.flops_per_round) for one in right]


def test_nothing_is_exported_unless_asked(folders: list[Path], tmp_path: Path) -> None:
    for engine in ("torch", "eager"):
        run(folders, tmp_path / "runs", "fedavg", engine, graph_cache=tmp_path / "graphs")
    assert not (tmp_path / "graphs").exists()
    run(folders, tmp_path / "checked", "fedavg", "eager", graph_cache=tmp_path / "graphs", checks_export=True)
    assert list((tmp_path / "graphs").rglob("*.onnx"))


def test_another_engine_does_not_resume_the_run(folders: list[Path], tmp_path: Path) -> None:
    run(folders, tmp_path, "fedavg", "eager")
    request = RunRequest(
        folders,
        {"method": "fedavg", "rounds": 2, "options": {"batch_size": 16, "lr": 0.05, "momentum": 0.9},
         "model_options": TINY_MODEL},
        out=tmp_path, run="eager", engine="torch", at_once=1, resume=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, check=has_code("FV1509", "eager")):
        simulate(request)
    with open_record(tmp_path) as record:
        assert [one.program for one in record.runs.read_all()] == ["eager"]


@dataclass(frozen=True)
class Curious(fedavg.FedAvg):
    """FedAvg that looks at its numbers, as with a debugger, and cannot be exported."""

    seen: ClassVar[list[float]] = []
    breaks: bool = False

    def objective(self, vit: PatchViT, phase: Train, tensors: Mapping[str, Tensor], given: StepInputs) -> Objective:
        value = super().objective(vit, phase, tensors, given)
        self.seen.append(float(value.loss.detach()))  # no traced step can do this
        if self.breaks:
            torch.zeros(3) @ torch.zeros(4)
        return value


@pytest.fixture
def curious(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "curious", Curious)


def test_a_method_may_look_at_its_numbers(folders: list[Path], tmp_path: Path, curious: None) -> None:
    Curious.seen.clear()
    outcome = run(folders, tmp_path, "curious", "eager")
    plain = run(folders, tmp_path / "plain", "fedavg", "eager")
    assert outcome.summary.mean_accuracy == plain.summary.mean_accuracy
    assert len(Curious.seen) > 10
    assert all(np.isfinite(Curious.seen))


def test_an_error_names_method_phase_and_line(folders: list[Path], tmp_path: Path, curious: None) -> None:
    values = {"method": "curious", "rounds": 1, "options": {"breaks": True}, "model_options": TINY_MODEL}
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "torch.zeros(3) @" in text)
    with pytest.raises(MethodFailed, check=has_code("FV2130", f"Curious, phase 'train', {__file__}:{line}: Runtime")):
        simulate(RunRequest(folders, values, out=tmp_path, run="run", engine="eager", at_once=1))
