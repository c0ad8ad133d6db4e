"""IFCA: choice, step and server beside the paper's algorithm, and devices of two kinds that find each other."""

import numpy as np
import pytest
import torch

from fedvit.errors import EmptyCohort
from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, ServerState, cross_entropy
from fedvit.methods.ifca import CHOOSE, IFCA, TOTAL
from fedvit.methods.one_of_k import CHOICE, TAKE, MeanOfEachPart, name_other
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from fedvit.tensors import Array
from tests.support.method_steps import make_context, run_step
from tests.support.quadratic import BATCH, Inputs, after, in_double, small
from tests.support.steps import whole
from tests.support.uploads import upload

MODELS = 3


def inputs_of(method: IFCA, vit: PatchViT, graph: str, seed: int) -> Inputs:
    [phase] = [phase for phase in method.phases(vit) if phase.graph == graph]
    return in_double(example_inputs(method, vit, BATCH, whole(phase), seed=seed))


def find_losses(method: IFCA, vit: PatchViT, inputs: Inputs) -> torch.Tensor:
    """Sum of the losses of a batch's samples with each model."""
    losses = []
    for number in range(method.models):
        own = {name: inputs[f"tensor/{name}"] for name in vit.tensors()}
        own |= {name: inputs[f"tensor/{name_other(number, name)}"] for name in method.list_of_k(vit)}
        logits = method.forward(vit, own, Images(inputs["batch/patches"], None)).logits
        losses.append((cross_entropy(logits, inputs["batch/labels"]) * inputs["batch/weight"]).sum())
    return torch.stack(losses)


def test_equal_losses_and_such_that_are_no_numbers_leave_one_choice(vit: PatchViT) -> None:
    """Models 1 and 2 are equal and better than 0, whose loss is not a number after that."""
    method = IFCA(models=MODELS, spread=1.0)
    inputs = inputs_of(method, vit, CHOOSE, 0)
    for name in method.list_of_k(vit):
        inputs[f"tensor/{name_other(2, name)}"] = inputs[f"tensor/{name_other(1, name)}"]
    for first in (1e6, float("nan")):
        inputs[f"slot/{TOTAL}/{CHOICE}"] = torch.tensor([first, *[0.0] * (MODELS - 1)], dtype=torch.float64)
        chosen = run_step(method, vit, inputs, CHOOSE)[f"new/tensor/{CHOICE}"]
        torch.testing.assert_close(chosen.sum(), torch.ones((), dtype=torch.float64))
        assert not chosen[0]


@pytest.mark.parametrize("of_k", ["model", "head"])
def test_a_device_chooses_the_model_with_the_lowest_loss_on_all_its_images(vit: PatchViT, of_k: str) -> None:
    method = IFCA(models=MODELS, spread=1.0, of_k=of_k)
    total, state = torch.zeros(MODELS, dtype=torch.float64), torch.zeros(MODELS, dtype=torch.float64)
    for batch in range(4):
        inputs = inputs_of(method, vit, CHOOSE, batch)
        inputs |= {
            name: value for name, value in inputs_of(method, vit, CHOOSE, 0).items() if name.startswith("tensor/")
        }
        inputs[f"slot/{TOTAL}/{CHOICE}"] = state
        result = run_step(method, vit, inputs, CHOOSE)
        state = result[f"new/slot/{TOTAL}/{CHOICE}"]
        total = total + find_losses(method, vit, inputs)
        want = torch.nn.functional.one_hot(total.argmin(), MODELS).double()
        torch.testing.assert_close(result[f"new/tensor/{CHOICE}"], want)
    torch.testing.assert_close(state, total)


@pytest.mark.parametrize("chosen", range(MODELS))
def test_training_begins_at_the_chosen_model_and_answers_are_its_own(vit: PatchViT, chosen: int) -> None:
    method, plain = IFCA(models=MODELS, lr=0.1), make_method("fedavg", {"lr": 0.1})
    inputs = inputs_of(method, vit, "train", 1)
    inputs[f"tensor/{CHOICE}"] = torch.nn.functional.one_hot(torch.tensor(chosen), MODELS).double()
    own = {name: inputs[f"tensor/{name_other(chosen, name)}"] for name in vit.tensors()}
    images = Images(inputs["batch/patches"], None)
    tensors = {name.removeprefix("tensor/"): value for name, value in inputs.items() if name.startswith("tensor/")}
    torch.testing.assert_close(method.predict(vit, tensors, images, None), plain.forward(vit, own, images).logits)
    inputs = after(inputs, run_step(method, vit, inputs, TAKE))
    trained = run_step(method, vit, inputs, "train")
    [phase] = plain.phases(vit)
    want = whole_step(plain, vit, whole(phase))({**inputs, **{f"tensor/{name}": value for name, value in own.items()}})
    for name in vit.tensors():
        torch.testing.assert_close(trained[f"new/tensor/{name}"], want[f"new/tensor/{name}"])


def test_before_any_choice_the_first_model_answers(vit: PatchViT) -> None:
    method = IFCA(models=MODELS)
    inputs = inputs_of(method, vit, TAKE, 0) | {f"tensor/{CHOICE}": torch.zeros(MODELS, dtype=torch.float64)}
    taken = run_step(method, vit, inputs, TAKE)
    for name in vit.tensors():
        torch.testing.assert_close(taken[f"new/tensor/{name}"], inputs[f"tensor/{name}"])


def test_the_server_averages_by_choice() -> None:
    """Algorithm 1, line 18: model j becomes the mean of those that began with it; nobody chose the last one."""
    method, vit, draw = IFCA(models=MODELS, of_k="head"), small(), np.random.default_rng(0)
    state = ServerState({name: draw.normal(size=value.shape) for name, value in method.tensors(vit).items()})
    state.tensors[CHOICE] = np.zeros(MODELS)
    uploads, ends = [], dict[str, dict[str, Array]]()
    images, chosen = {"a": 6, "b": 2, "c": 4, "none": 0}, {"a": 0, "b": 1, "c": 1, "none": 2}
    for device in images:
        ends[device] = {name: draw.normal(size=value.shape) for name, value in vit.tensors().items()}
        deltas = {name: end - state.tensors[name] for name, end in ends[device].items()}
        uploads.append(upload(device, images[device], {**deltas, CHOICE: np.eye(MODELS)[chosen[device]]}))
    result, figures = method.server_rule(vit).close(state, uploads, make_context(small()))
    assert figures["models_chosen"] == 2
    for name in vit.tensors():
        if not name.startswith("head."):
            want = (6 * ends["a"][name] + 2 * ends["b"][name] + 4 * ends["c"][name]) / 12
            np.testing.assert_allclose(result.tensors[name], want)
            continue
        np.testing.assert_allclose(result.tensors[name], ends["a"][name])
        np.testing.assert_allclose(result.tensors[name_other(1, name)], (2 * ends["b"][name] + 4 * ends["c"][name]) / 6)
        np.testing.assert_array_equal(result.tensors[name_other(2, name)], state.tensors[name_other(2, name)])
    np.testing.assert_array_equal(result.tensors[CHOICE], 0)
    with pytest.raises(EmptyCohort):
        method.server_rule(vit).close(state, [uploads[-1]], make_context(small()))


def test_two_kinds_of_devices_find_each_other_and_fedavg_serves_neither() -> None:
    """Devices with the losses |x - target|^2 / 2 choose and train as the phases do."""
    targets = {"a": -1.2, "b": -0.8, "c": 2.8, "d": 3.2}

    def end(models: int) -> dict[str, float]:
        rule = MeanOfEachPart(models=models, of_k=frozenset({"x"}))
        start = {name_other(number, "x"): np.array([0.1 * number]) for number in range(models)}
        state, chosen = ServerState({CHOICE: np.zeros(models), **start}), dict[str, int]()
        for _ in range(20):
            uploads = []
            for device, target in targets.items():
                parts = [state.tensors[name_other(number, "x")] for number in range(models)]
                chosen[device] = int(np.argmin([abs(float(part[0]) - target) for part in parts]))
                x = parts[chosen[device]]
                for _ in range(5):
                    x = x - 0.2 * (x - target)
                delta = {"x": x - state.tensors["x"], CHOICE: np.eye(models)[chosen[device]]}
                uploads.append(upload(device, 4, delta))
            state, _ = rule.close(state, uploads, make_context(small()))
        return {device: float(state.tensors[name_other(number, "x")][0]) for device, number in chosen.items()}

    assert end(2) == pytest.approx({"a": -1.0, "b": -1.0, "c": 3.0, "d": 3.0}, abs=1e-3)
    assert end(1) == pytest.approx(dict.fromkeys(targets, 1.0), abs=1e-3)


def test_models_begin_apart_and_follow_from_the_runs_seed() -> None:
    method = IFCA(models=MODELS, spread=0.5)

    def extra(seed: int) -> dict[str, torch.Tensor]:
        options = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 2}
        return method.extra_tensors(build_model(method, SMALL, 3, seed=seed, options=options))

    weights = [name_other(number, "blocks.0.mlp.fc1.weight") for number in (1, 2)]
    first, again, another = extra(0), extra(0), extra(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[weights[0]], first[weights[1]])
    assert not torch.equal(first[weights[0]], another[weights[0]])
    start = small().tensors()["blocks.0.mlp.fc1.weight"]
    cosine = torch.cosine_similarity(first[weights[0]].flatten(), start.flatten(), dim=0)
    assert float(cosine) == pytest.approx(0.75**0.5, abs=0.1)
    assert float(first[weights[0]].std() / start.std()) == pytest.approx(1, abs=0.1)
    torch.testing.assert_close(first[name_other(1, "norm.weight")], torch.ones(8))


def test_a_novel_device_chooses_and_sends_nothing() -> None:
    vit, method = small(), IFCA(novel="own")
    groups = method.groups(vit)
    assert groups["choice"][0] is Role.LOCAL
    assert {role for group, (role, _) in groups.items() if group != "choice"} == {Role.FROZEN}
