"""Which graphs a method is given, and that each computes what torch computes."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from fedvit.methods.step import Update, example_inputs, gather_step, predict_step, steps_of
from tests.support.steps import run

if TYPE_CHECKING:
    from tests.unit.export.conftest import Made


def test_every_phase_and_every_part_of_an_evaluation_has_its_graph(everything: "Made") -> None:
    """Training, tuning before an evaluation, the update that both make, looking at the device's images, answering;
    all verified."""
    [train] = everything.method.phases(everything.vit)
    evaluate = everything.method.evaluate(everything.vit)
    assert steps_of(everything.method, everything.vit) == {
        "train": train,
        "update": Update(everything.method.optimizer_rule()),
        "tune": evaluate.adapt[0],
        "look": evaluate.gather,
        "predict": None,
    }
    assert set(everything.graphs) == {"train", "update", "tune", "look", "predict"}
    assert all(exported.max_difference < 1e-5 for exported in everything.graphs.values())


def test_what_an_evaluation_gathers_is_what_its_answers_read(everything: "Made") -> None:
    """Eager torch in one go, and two graphs of which the second is fed with what the first gave."""
    method, vit, batch, graphs = everything.method, everything.vit, everything.batch, everything.graphs
    evaluate = method.evaluate(vit)
    assert evaluate.gather is not None
    look = example_inputs(method, vit, batch, evaluate.gather, seed=3)
    ask = example_inputs(method, vit, batch, None, seed=3)
    got = run(graphs["look"].content, look)["collect/looks"]
    with torch.no_grad():
        want = gather_step(method, vit, evaluate.gather)(look)["collect/looks"]
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
    ask["gathered/looks"] = torch.cat([torch.from_numpy(got), torch.zeros(1, vit.width)])
    ask["gathered/labels"] = torch.tensor([2, 2, 1, 0, 1])
    answers = {}
    for weight in ([1.0, 1, 1, 1, 0], [1.0, 1, 0, 0, 0]):
        ask["gathered/weight"] = torch.tensor(weight)
        answers[sum(weight)] = run(graphs["predict"].content, ask)["logits"]
        with torch.no_grad():
            want = predict_step(method, vit)(ask)["logits"]
        np.testing.assert_allclose(answers[sum(weight)], want.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(answers[4] - answers[2]).max() > 1e-3, "what was gathered has a say"


def test_a_last_repeat_and_numbers_drawn_are_inputs(everything: "Made") -> None:
    """The loss is (1 + last) (1 + mean of the numbers) times what it is without: 2 * (1 + 6) against 1 * (1 + 0)."""
    method, vit, batch = everything.method, everything.vit, everything.batch
    [phase] = method.phases(vit)
    inputs = example_inputs(method, vit, batch, phase)
    assert inputs["draw/picks"].tolist() == sorted(inputs["draw/picks"].tolist())
    plain = {**inputs, "hyper/last": torch.tensor(0.0), "draw/picks": torch.zeros(4, dtype=torch.int64)}
    other = {**inputs, "hyper/last": torch.tensor(1.0), "draw/picks": torch.tensor([3, 5, 7, 9])}
    losses = [run(everything.graphs["train"].content, fed)["metric/loss"] for fed in (plain, other)]
    np.testing.assert_allclose(losses[1], 14 * losses[0], rtol=1e-5)
