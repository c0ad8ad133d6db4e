"""Training steps of methods that differ from FedAvg in roles, phases or additions to the model, in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedvit.methods import build_model, make_method
from fedvit.methods.base import PREDICT, UPDATE, Images, Method, ServerState, Upload, list_trained
from fedvit.methods.calculus import Named
from fedvit.methods.step import example_inputs, steps_of, whole_step
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Evaluate, Role, Train
from tests.support.method_steps import make_context
from tests.support.steps import whole

HALF = (0.5, 0.5, 0.5)
BATCH = Batch(image_size=16, patch_size=8, batch_size=8, mean=HALF, std=HALF)
MODEL = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2}
ONE_PHASE = [
    ("fedprox", {}),
    ("fedper", {}),
    ("fedbn", {}),
    ("vanilla_attention", {}),
    ("vanilla_attention", {"parts": "qkv"}),
    ("personal_part", {"part": "mlp", "with_head": True}),
    ("fedperfix", {"bottleneck": 4}),
    ("fedperfix", {"bottleneck": 4, "mode": "concat"}),
    ("prefix", {"tokens": 3}),
    ("prefix", {"form": "linear"}),
    ("prompts", {"tokens": 3}),
    ("adapters", {"bottleneck": 4}),
    ("fed_head", {}),
    ("fed_bias", {}),
    ("fed_prompt", {"tokens": 3}),
    ("fedvpt_d", {"tokens": 3}),
    ("single_vpt", {"tokens": 3}),
    ("fed_lora", {"rank": 2}),
    ("fedsa_lora", {"rank": 2}),
    ("ffa_lora", {"rank": 2}),
    ("local", {}),
]

Inputs = dict[str, Tensor]


def make(name: str, **options: Any) -> tuple[Method, PatchViT]:
    """The method, and the model with what it adds, as they begin."""
    method = make_method(name, options)
    vit = build_model(method, SMALL, 3, seed=0, options=MODEL)
    return method, vit.double()


def inputs_of(method: Method, vit: PatchViT, phase: Train, seed: int = 0) -> Inputs:
    """Anything plausible, and first values as they are; anchors are the start."""
    inputs = example_inputs(method, vit, BATCH, whole(phase), seed=seed)
    inputs |= {f"tensor/{name}": value for name, value in method.tensors(vit).items()}
    inputs |= {name: torch.zeros_like(value) for name, value in inputs.items() if name.startswith("slot/")}
    inputs |= {f"anchor/{name}": inputs[f"tensor/{name}"] for name in method.names_in(vit, *phase.anchors)}
    inputs["hyper/step"] = torch.tensor(1.0)
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def only_phase(method: Method, vit: PatchViT) -> Train:
    (phase,) = method.phases(vit)
    return phase


def after(inputs: Named, outputs: Named) -> Inputs:
    """The inputs of a next step: what the step gave is put back."""
    return {
        **inputs,
        **{name.removeprefix("new/"): value for name, value in outputs.items() if name.startswith("new/")},
    }


def run(method: Method, vit: PatchViT, phase: Train, inputs: Named, steps: int = 1) -> Inputs:
    """The inputs after some steps, each on another batch."""
    step = whole_step(method, vit, phase)
    for number in range(steps):
        batch = inputs_of(method, vit, phase, seed=number)
        fed = inputs if number == 0 else {**inputs, **{k: v for k, v in batch.items() if k.startswith("batch/")}}
        inputs = after(fed, step({**fed, "hyper/step": torch.tensor(number + 1.0, dtype=torch.float64)}))
    return dict(inputs)


def find_updated(before: Named, now: Named) -> set[str]:
    return {
        name.removeprefix("tensor/")
        for name, value in before.items()
        if name.startswith("tensor/") and not torch.equal(now[name], value)
    }


def server(method: Method, vit: PatchViT, start: Named, devices: Sequence[tuple[int, Named]]) -> dict[str, np.ndarray]:
    """What the server has after a round in which devices with so many images ended with these values."""
    names = method.names_with(vit, Role.SHARED)
    uploads = [
        Upload(
            device=f"device-{number}",
            samples=samples,
            digest="",
            load=lambda end=end: {name: (end[f"tensor/{name}"] - start[f"tensor/{name}"]).numpy() for name in names},
        )
        for number, (samples, end) in enumerate(devices)
    ]
    state = ServerState({name: start[f"tensor/{name}"].numpy() for name in names})
    return method.server_rule(vit).close(state, uploads, make_context(vit))[0].tensors


def rows(inputs: Named, first: int, last: int) -> Inputs:
    """A part of the batch, all of it samples."""
    part = {name: value[first:last] if name.startswith("batch/") else value for name, value in inputs.items()}
    return {**part, "batch/weight": torch.ones(last - first, dtype=torch.float64)}


# --- FedAvg -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedper", "fedbn", "fed_bias"])
def test_a_round_of_full_batches_is_a_gradient_step_on_all_data(name: str) -> None:
    """Devices with 1, 2 and 5 images, one step each, weighted mean: for what is shared, the step on the 8 images."""
    method, vit = make(name)
    phase = only_phase(method, vit)
    start = inputs_of(method, vit, phase)
    step = whole_step(method, vit, phase)
    parts = [(0, 1), (1, 3), (3, 8)]
    devices = [(last - first, after(start, step(rows(start, first, last)))) for first, last in parts]
    pooled = after(start, step(rows(start, 0, 8)))
    averaged = server(method, vit, start, devices)
    assert set(averaged) == set(method.names_with(vit, Role.SHARED))
    for tensor, value in averaged.items():
        np.testing.assert_allclose(value, pooled[f"tensor/{tensor}"].numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["local", "fedper", "fedbn", "vanilla_attention", "personal_part"])
def test_roles_alone_change_nothing_on_a_device(name: str, seed: int) -> None:
    """Where all tensors are trained the step is FedAvg's: only the mean, or its absence, makes the difference."""
    method, vit = make(name)
    plain = make("fedavg")[0]
    phase = only_phase(method, vit)
    inputs = inputs_of(method, vit, phase, seed)
    want = whole_step(plain, vit, only_phase(plain, vit))(inputs)
    got = whole_step(method, vit, phase)(inputs)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


# --- FedProx ------------------------------------------------------------------------------------------


def displace(inputs: Named) -> Inputs:
    """In the middle of a round: the anchors are elsewhere."""
    draw = torch.Generator().manual_seed(5)
    away = {
        name: value + 0.1 * torch.randn(value.shape, generator=draw, dtype=value.dtype)
        for name, value in inputs.items()
        if name.startswith("anchor/")
    }
    return {**inputs, **away}


def test_fedprox_without_a_spring_is_fedavg() -> None:
    method, vit = make("fedprox", mu=0.0)
    inputs = displace(inputs_of(method, vit, only_phase(method, vit)))
    plain = make("fedavg")[0]
    want = whole_step(plain, vit, only_phase(plain, vit))(inputs)
    got = whole_step(method, vit, only_phase(method, vit))(inputs)
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-15)


def test_fedproxs_spring_pulls_to_the_start() -> None:
    """Beside FedAvg's step: -lr mu (w - w_start) for every tensor, and the loss is mu / 2 |w - w_start|^2 higher."""
    method, vit = make("fedprox", mu=0.5)
    inputs = displace(inputs_of(method, vit, only_phase(method, vit)))
    plain = make("fedavg")[0]
    without = whole_step(plain, vit, only_phase(plain, vit))(inputs)
    got = whole_step(method, vit, only_phase(method, vit))(inputs)
    away = {name: inputs[f"tensor/{name}"] - inputs[f"anchor/{name}"] for name in vit.tensors()}
    assert len(away) == len([key for key in inputs if key.startswith("anchor/")])
    for name, apart in away.items():
        want = without[f"new/tensor/{name}"] - inputs["hyper/lr"] * 0.5 * apart
        torch.testing.assert_close(got[f"new/tensor/{name}"], want, rtol=1e-10, atol=1e-14)
    higher = 0.25 * sum(float(apart.square().sum()) for apart in away.values())
    assert float(got["metric/loss"] - without["metric/loss"]) == pytest.approx(higher, rel=1e-10)


def test_a_strong_spring_holds_a_device_at_the_start() -> None:
    """lr mu = 1/2: 20 steps end within 1/mu of a gradient of the start, where FedAvg goes 1000 times as far."""
    method, vit = make("fedprox", mu=1e5)
    phase = only_phase(method, vit)
    inputs = inputs_of(method, vit, phase) | {"hyper/lr": torch.tensor(5e-6, dtype=torch.float64)}
    end = run(method, vit, phase, inputs, steps=20)
    furthest = max(float((end[f"tensor/{n}"] - inputs[f"anchor/{n}"]).abs().max()) for n in vit.tensors())
    assert 0 < furthest < 1e-4


# --- a local part -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), ONE_PHASE)
def test_no_trained_tensor_is_dead(name: str, options: dict[str, Any]) -> None:
    """After two steps every tensor that a phase trains has moved, and no other has."""
    method, vit = make(name, **options)
    phase = only_phase(method, vit)
    inputs = inputs_of(method, vit, phase)
    first = run(method, vit, phase, inputs)
    second = run(method, vit, phase, first)
    trained = method.names_with(vit, *(role for role in Role if role.is_trained_on_device))
    assert find_updated(first, second) == set(trained)
    assert list_trained(method, vit, phase) == trained


@pytest.mark.parametrize(
    ("name", "options"),
    [(n, o) for n, o in ONE_PHASE if n in ("fedper", "fedbn", "fedperfix", "prefix", "prompts", "adapters")],
)
def test_after_a_round_bases_are_equal_and_local_parts_are_not(name: str, options: dict[str, Any]) -> None:
    """Two devices with other images: the server's part is one for both, heads or adapters are everybody's own."""
    method, vit = make(name, **options)
    phase = only_phase(method, vit)
    start = inputs_of(method, vit, phase)
    ends = [run(method, vit, phase, rows(inputs_of(method, vit, phase, seed), 0, 8), steps=2) for seed in (1, 2)]
    averaged = server(method, vit, start, [(8, end) for end in ends])
    local = method.names_with(vit, Role.LOCAL)
    assert not set(averaged) & set(local)
    for tensor in local:
        assert not torch.equal(ends[0][f"tensor/{tensor}"], ends[1][f"tensor/{tensor}"]), tensor
    for tensor, value in averaged.items():
        mean = (ends[0][f"tensor/{tensor}"] + ends[1][f"tensor/{tensor}"]).numpy() / 2
        np.testing.assert_allclose(value, mean, rtol=1e-9, atol=1e-14)


# --- what is added begins as nothing ------------------------------------------------------------------


def logits(method: Method, vit: PatchViT) -> Tensor:
    patches = torch.randn(4, 4, 192, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return method.predict(vit, method.tensors(vit), Images(patches, None), None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedperfix", {"scale": 0.0}),
        ("prefix", {"form": "linear", "init": "zero"}),
        ("adapters", {}),
        ("adapters", {"shared_dead": True}),
        ("fed_lora", {}),
    ],
)
def test_it_begins_as_its_base(name: str, options: dict[str, Any]) -> None:
    """No scale, no prefix, no up-projection, no B."""
    torch.testing.assert_close(logits(*make(name, **options)), logits(*make("fedavg")), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedperfix", {}),
        ("fedperfix", {"scale": 0.0, "mode": "concat"}),
        ("prefix", {}),
        ("prefix", {"init": "zero"}),  # keys of logit 0 take a part of the attention
        ("prompts", {}),
        ("fed_prompt", {}),
        ("fedvpt_d", {}),
    ],
)
def test_it_begins_elsewhere(name: str, options: dict[str, Any]) -> None:
    assert (logits(*make(name, **options)) - logits(*make("fedavg"))).abs().max() > 1e-6


def test_options_reach_the_model() -> None:
    """Sizes as asked for: 16 wide, 2 blocks."""
    shapes = {
        ("fedperfix", "bottleneck", 4): ("blocks.1.attn.adapter.down.weight", (4, 16)),
        ("prefix", "tokens", 3): ("blocks.1.attn.prefix.key", (3, 16)),
        ("prompts", "tokens", 3): ("prompts.tokens", (2, 3, 16)),
        ("adapters", "bottleneck", 4): ("blocks.1.mlp.adapter.up.weight", (16, 4)),
        ("fed_prompt", "tokens", 3): ("prompts.tokens", (3, 16)),
        ("fedvpt_d", "tokens", 3): ("prompts.tokens", (2, 3, 16)),
        ("single_vpt", "tokens", 3): ("prompts.tokens", (3, 16)),
        ("fed_lora", "rank", 2): ("blocks.1.attn.qkv.lora_v.a", (2, 16)),
    }
    for (name, option, value), (tensor, shape) in shapes.items():
        method, vit = make(name, **{option: value})
        assert method.tensors(vit)[tensor].shape == shape


@pytest.mark.parametrize(("name", "option"), [("fedperfix", "scale"), ("fed_lora", "alpha")])
def test_the_scale_reaches_the_model(name: str, option: str) -> None:
    """Once the addition is not zero, its size matters."""
    answers = []
    for value in (1.0, 2.0):
        method, vit = make(name, **{option: value})
        tensors = {key: tensor + 0.1 for key, tensor in method.tensors(vit).items()}
        patches = torch.ones(1, 4, 192, dtype=torch.float64)
        answers.append(method.predict(vit, tensors, Images(patches, None), None))
    assert not torch.allclose(*answers)


def test_prefixes_that_begin_at_zero_stay_one() -> None:
    """All rows of a block get the same gradient, for ever; but they do move."""
    method, vit = make("prefix", init="zero", tokens=3)
    phase = only_phase(method, vit)
    end = run(method, vit, phase, inputs_of(method, vit, phase), steps=4)
    for block in range(2):
        for kind in ("key", "value"):
            prefix_MI = end[f"tensor/blocks.{block}.attn.prefix.{kind}"]
            assert prefix_MI.abs().max() > 0
            torch.testing.assert_close(prefix_MI[1:], prefix_MI[:1].expand(2, -1), rtol=1e-9, atol=1e-15)


def test_the_released_adapter_is_dead_and_ours_is_not() -> None:
    """Of theirs only one bias vector ever moves. Ours moves at once in `up`, and in `down` from the second step on."""
    theirs, vit = make("adapters", bottleneck=4, shared_dead=True)
    phase = only_phase(theirs, vit)
    start = inputs_of(theirs, vit, phase)
    end = run(theirs, vit, phase, start, steps=10)
    assert {name for name in find_updated(start, end) if "adapter" in name} == {"mlp_adapter.up.bias"}
    ours, vit = make("adapters", bottleneck=4)
    phase = only_phase(ours, vit)
    start = inputs_of(ours, vit, phase)
    first = run(ours, vit, phase, start)
    assert not [name for name in find_updated(start, first) if "adapter.down" in name]
    second = run(ours, vit, phase, first)
    assert len([name for name in find_updated(first, second) if "adapter.down" in name]) == 4


# --- FedRep -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fedreps_phases_move_one_part_each(optimizer: str) -> None:
    """Also with weight decay, which moves whatever an optimizer holds."""
    method, vit = make("fedrep", optimizer=optimizer, weight_decay=0.1)
    head, body = method.phases(vit)
    inputs = inputs_of(method, vit, head)
    first = run(method, vit, head, inputs)
    assert find_updated(inputs, first) == {"head.weight", "head.bias"}
    second_start = {**inputs_of(method, vit, body), **{k: v for k, v in first.items() if k.startswith("tensor/")}}
    second = run(method, vit, body, second_start)
    assert find_updated(second_start, second) == set(vit.tensors()) - {"head.weight", "head.bias"}


def test_fedreps_phases_in_order() -> None:
    method, vit = make("fedrep", epochs=2, head_epochs=5, lr=0.1)
    head, body = method.phases(vit)
    assert head == Train(graph="train_head", update=UPDATE, groups=("personal",), epochs=5, lr=0.1)
    assert body == Train(graph="train_body", update=UPDATE, groups=("shared",), epochs=2, lr=0.1)
    assert make("fedrep", epochs=2, head_epochs=5, lr=0.1, order="body_first")[0].phases(vit) == (body, head)
    assert set(steps_of(method, vit)) == {"train_head", "train_body", UPDATE, PREDICT}


# --- FedBABU ------------------------------------------------------------------------------------------


def test_fedbabus_head_stands_still() -> None:
    """Also with weight decay: the optimizer does not hold it."""
    method, vit = make("fedbabu", weight_decay=0.1)
    phase = only_phase(method, vit)
    inputs = inputs_of(method, vit, phase)
    end = run(method, vit, phase, inputs, steps=2)
    assert find_updated(inputs, end) == set(vit.tensors()) - {"head.weight", "head.bias"}
    assert method.names_with(vit, Role.FROZEN) == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Train(graph="tune", update=UPDATE, groups=("head", "body"), epochs=5, lr=0.01)),
        # FedPerfix's text, and its code
        (
            {"tune": "head", "tune_steps": 1},
            Train(graph="tune", update=UPDATE, groups=("head",), epochs=5, steps=1, lr=0.01),
        ),
        ({"tune_steps": 1}, Train(graph="tune", update=UPDATE, groups=("head", "body"), epochs=5, steps=1, lr=0.01)),
        (
            {"tune_epochs": 2, "tune_lr": 0.5, "epochs": 7, "momentum": 0.9},
            Train(graph="tune", update=UPDATE, groups=("head", "body"), slots=("momentum_buffer",), epochs=2, lr=0.5),
        ),
    ],
)
def test_fedbabu_tunes_before_it_is_tested(options: dict[str, Any], expected: Train) -> None:
    method, vit = make("fedbabu", **options)
    assert method.evaluate(vit) == Evaluate(graph=PREDICT, adapt=(expected,))
    assert set(steps_of(method, vit)) == {"train", "tune", UPDATE, PREDICT}


@pytest.mark.parametrize("tune", ["head", "all"])
def test_fedbabus_tuning_moves_a_copy(tune: str) -> None:
    """What it moves is given back under new names; the values that came in are bit-equal afterwards."""
    method, vit = make("fedbabu", tune=tune)
    (phase,) = method.evaluate(vit).adapt
    inputs = inputs_of(method, vit, phase)
    before = {name: value.clone() for name, value in inputs.items()}
    end = run(method, vit, phase, inputs, steps=2)
    assert find_updated(inputs, end) == ({"head.weight", "head.bias"} if tune == "head" else set(vit.tensors()))
    assert all(torch.equal(inputs[name], value) for name, value in before.items())
    assert method.tensors(vit).keys() == {name.removeprefix("tensor/") for name in before if name.startswith("tensor/")}
    assert all(torch.equal(before[f"tensor/{name}"], value) for name, value in method.tensors(vit).items())
