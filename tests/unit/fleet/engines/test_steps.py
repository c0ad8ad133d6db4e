"""Steps of several devices in one batch give what steps one after the other give, captured or not, compiled or not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedvit.program import Batch
from fleet.engines.steps import (
    BatchedStep,
    BatchWork,
    CapturedRunner,
    Named,
    Runner,
    batched_step,
    compile_step,
    one_by_one,
    skip_finished,
    to_numpy,
)

HALF = (0.5, 0.5, 0.5)
BATCH = Batch(image_size=4, patch_size=4, batch_size=2, mean=HALF, std=HALF)
ENDS = [5, 3, 2]
"""Steps of three devices."""


def step(inputs: Named) -> Named:
    """A step that depends on everything that it is given."""
    x = inputs["batch/patches"].mean(dim=(1, 2)) * inputs["batch/weight"] + inputs["batch/labels"]
    slope = x.sum() * inputs["tensor/fixed"] + inputs["anchor/own"]
    updated = inputs["tensor/w"] - inputs["hyper/lr"] * slope * inputs["hyper/step"] + inputs["hyper/last"]
    return {"new/tensor/w": updated, "metric/loss": updated.sum(), "collect/x": x}


def stubborn(inputs: Named) -> Named:
    """A step that branches on a value, so that it cannot be mapped over devices."""
    return step(inputs) if float(inputs["tensor/w"].sum()) < 1e9 else {}


def work() -> BatchWork:
    draw = np.random.default_rng(0)
    arrays = {
        "rows": torch.from_numpy(draw.integers(0, 6, (5, 3, 2))),
        "labels": torch.from_numpy(draw.integers(0, 3, (5, 3, 2))),
        "weight": torch.ones(5, 3, 2),
    }
    return BatchWork(
        updated={"tensor/w": torch.arange(6.0).reshape(3, 2)},
        own={"anchor/own": torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])},
        common={"tensor/fixed": torch.tensor([0.5, -0.5])},
        arrays=arrays,
        ends=torch.tensor(ENDS),
        last=torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]),
        lr=torch.tensor(0.1),
    )


@pytest.fixture
def pixels() -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (6, 4, 4, 3)).astype(np.uint8))


def outcome(runner: Runner) -> tuple[Tensor, Tensor, list[Tensor]]:
    losses = torch.zeros(5, 3)
    collected: list[Tensor] = []
    updated = runner.run(work(), 0, 5, losses, lambda _, outputs: collected.append(outputs["collect/x"].clone()))
    return updated["tensor/w"], losses, collected


def refuse_line(text: str) -> None:
    raise AssertionError(text)


RUNNERS: dict[str, Callable[[BatchedStep, Tensor], Runner]] = {
    "captured": lambda batched, pixels: CapturedRunner(skip_finished(batched), pixels, BATCH, recorded=False),
    "compiled": lambda batched, pixels: Runner(compile_step(skip_finished(batched), backend="eager"), pixels, BATCH),
    "compiled for one device": lambda _, pixels: Runner(
        skip_finished(one_by_one(compile_step(step, backend="eager"))), pixels, BATCH
    ),
}


@pytest.mark.parametrize("kind", RUNNERS)
def test_runner_of_each_kind_gives_the_same_tensors(kind: str, pixels: Tensor) -> None:
    """Also when it is used again: nothing of earlier work remains."""
    batched = batched_step(step, refuse_line)
    plain = outcome(Runner(skip_finished(batched), pixels, BATCH))
    runner = RUNNERS[kind](batched, pixels)
    for _ in range(2):
        for ours, theirs in zip(outcome(runner), plain, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.allclose(one, other, atol=1e-6)


def test_device_without_further_batches_is_not_updated(pixels: Tensor) -> None:
    """Each device alone, for as many steps as it has, ends with the same."""
    together, _, _ = outcome(Runner(skip_finished(batched_step(step, refuse_line)), pixels, BATCH))
    for device, end in enumerate(ENDS):
        part = slice(device, device + 1)
        whole = work()
        alone = BatchWork(
            {name: value[part] for name, value in whole.updated.items()},
            {name: value[part] for name, value in whole.own.items()},
            whole.common,
            {name: value[:, part] for name, value in whole.arrays.items()},
            whole.ends[part],
            whole.last,
            whole.lr,
        )
        updated = Runner(skip_finished(batched_step(step, refuse_line)), pixels, BATCH).run(
            alone, 0, end, torch.zeros(5, 1)
        )
        assert torch.allclose(updated["tensor/w"][0], together[device], atol=1e-6)


def test_step_that_cannot_be_mapped_runs_device_by_device_and_is_logged(pixels: Tensor) -> None:
    lines: list[str] = []
    updated, _, _ = outcome(Runner(skip_finished(batched_step(stubborn, lines.append)), pixels, BATCH))
    assert torch.allclose(
        updated, outcome(Runner(skip_finished(batched_step(step, refuse_line)), pixels, BATCH))[0], atol=1e-6
    )
    assert len(lines) == 1
    assert lines[0].startswith("devices are computed one after the other: ")


def test_tensors_become_arrays_with_their_shapes() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(8.0).reshape(2, 2, 2), "c": torch.ones(2)}
    arrays = to_numpy({name: value.reshape(2, -1) if value.ndim == 1 else value for name, value in tensors.items()})
    assert {name: array.shape for name, array in arrays.items()} == {"a": (2, 3), "b": (2, 2, 2), "c": (2, 1)}
    assert all(np.array_equal(arrays[name].ravel(), tensors[name].numpy().ravel()) for name in tensors)
    assert to_numpy({}) == {}
