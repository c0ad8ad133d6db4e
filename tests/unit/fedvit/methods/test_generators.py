"""The functions from an embedding to tensors, each by its own laws."""

import math

import pytest
import torch
from torch import Tensor

from fedvit.methods.generators.base import drawing
from fedvit.methods.generators.hypernetwork import Hypernetwork
from fedvit.methods.generators.prompts import MATRICES, PromptAttention, PromptBasis, PromptStatistics

# --- random numbers -----------------------------------------------------------------------------------


def test_draws_depend_on_everything() -> None:
    def number(seed: int, *of: str) -> float:
        return float(torch.rand((), generator=drawing(seed, *of)))

    assert number(1, "device", "a") == number(1, "device", "a")
    others = [(1, "device", "a"), (2, "device", "a"), (1, "device", "b"), (1, "shared"), (12, "device", "a")]
    assert len({number(seed, *of) for seed, *of in others}) == len(others)


# --- hypernetwork -------------------------------------------------------------------------------------


def hypernetwork(targets: dict[str, tuple[int, ...]], embedding_dim: int = 5, hidden: int = 7) -> Hypernetwork:
    return Hypernetwork(targets=targets, embedding_dim=embedding_dim, hidden=hidden)


def parameters(of: Hypernetwork) -> int:
    """Weights and biases, counted without making them."""
    return sum((inputs + 1) * outputs for inputs, outputs in of.layers.values())


@pytest.mark.parametrize(("inner", "expected"), [(512, 237_575_364), (128, 59_448_516)])
def test_fedtps_size(inner: int, expected: int) -> None:
    """150 * 32 + 150, three times 150 * 151, and for each of 8 blocks 151 * 3 * inner * 128."""
    targets = {f"blocks.{block}.attn.qkv.weight": (3 * inner, 128) for block in range(8)}
    assert 150 * 32 + 150 + 3 * 22_650 + 8 * 151 * 3 * inner * 128 == expected
    assert parameters(hypernetwork(targets, 32, 150)) == expected


def test_the_parameters_are_those_of_the_layers() -> None:
    of = hypernetwork({"w": (2, 3), "b": (4,)})
    shared = of.shared(drawing(0))
    assert sum(value.numel() for value in shared.values()) == parameters(of)
    assert {name: tuple(value.shape) for name, value in shared.items() if "trunk" not in name} == {
        "head.w.weight": (6, 7),
        "head.w.bias": (6,),
        "head.b.weight": (4, 7),
        "head.b.bias": (4,),
    }
    assert of.personal(drawing(0))["embedding"].shape == (5,)


def test_it_is_torchs_network() -> None:
    """Four linear layers with ReLU between them and none behind the last, then one per target, row by row."""
    of = hypernetwork({"w": (2, 3), "b": (4,)})
    shared, personal = of.shared(drawing(0)), of.personal(drawing(1))
    layers: list[torch.nn.Module] = []
    for number in range(4):
        inputs, outputs = of.layers[f"trunk.{number}"]
        layer = torch.nn.Linear(inputs, outputs)
        layer.load_state_dict({part: shared[f"trunk.{number}.{part}"] for part in ("weight", "bias")})
        layers += [torch.nn.ReLU(), layer] if number else [layer]
    hidden = torch.nn.Sequential(*layers)(personal["embedding"]).detach()
    assert (hidden < 0).any()
    flat = shared["head.w.weight"] @ hidden + shared["head.w.bias"]
    made = of.generate(shared, personal)
    torch.testing.assert_close(made["w"], torch.stack([flat[:3], flat[3:]]))
    torch.testing.assert_close(made["b"], shared["head.b.weight"] @ hidden + shared["head.b.bias"])


def test_linear_layers_begin_as_torchs_do() -> None:
    """Uniform in +-1/sqrt(inputs): of 10 000 numbers the largest is near the bound, and the standard deviation is
    bound / sqrt(3). Embeddings are standard normal."""
    of = hypernetwork({"w": (100, 100)}, 2000, 100)
    shared = of.shared(drawing(0))
    for name, inputs in (("trunk.0", 2000), ("trunk.3", 100), ("head.w", 100)):
        for part in ("weight", "bias"):
            value, bound = shared[f"{name}.{part}"], inputs**-0.5
            assert 0.9 * bound < float(value.abs().max()) <= bound
            assert float(value.std()) == pytest.approx(bound / math.sqrt(3), rel=0.15)
    embedding = of.personal(drawing(0))["embedding"]
    assert float(embedding.std()) == pytest.approx(1, rel=0.1)
    assert abs(float(embedding.mean())) < 0.1


def test_factors_of_norms_begin_around_one() -> None:
    """Fresh layers give values near 0; a norm multiplied by them would leave nothing of its features."""
    names = ["blocks.0.norm1.weight", "norm.weight", "norm.bias", "blocks.0.mlp.fc1.weight"]
    of = hypernetwork(dict.fromkeys(names, (1000,)))
    made = of.generate(of.shared(drawing(0)), of.personal(drawing(1)))
    assert [round(float(made[name].mean())) for name in names] == [1, 1, 0, 0]
    assert float(made["norm.weight"].std()) > 0


# --- prompts ------------------------------------------------------------------------------------------

K, WIDTH = 4, 6
FIRST = torch.randn(K, WIDTH, generator=drawing(0, "first"), dtype=torch.float64)


def attention(tokens: int = 1, **options: bool) -> PromptAttention:
    return PromptAttention(target="p", first=FIRST, bound=0.5, descriptor_tokens=tokens, **options)


def double(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in values.items()}


def make_by(of: PromptBasis, shared: dict[str, Tensor], device: str = "a") -> Tensor:
    return of.generate(shared, double(of.personal(drawing(0, device))))["p"]


def test_the_basis_is_the_same_for_all() -> None:
    of = PromptBasis(target="p", first=FIRST)
    assert of.personal(drawing(0)) == {}
    assert torch.equal(of.generate(of.shared(drawing(0)), {})["p"], FIRST)


@pytest.mark.parametrize("tokens", [1, K])
def test_with_a_zero_output_matrix_all_devices_get_the_base(tokens: int) -> None:
    of = attention(tokens, zero_output=True)
    shared = double(of.shared(drawing(0)))
    for device in ("a", "b"):
        assert torch.equal(make_by(of, shared, device), FIRST)


@pytest.mark.parametrize("normalise", [True, False])
def test_attention_by_the_book(normalise: bool) -> None:
    """The same by torch's own attention, a descriptor token at a time: scaled cosines, or the paper's equation."""
    of = attention(K, normalise=normalise)
    shared, personal = double(of.shared(drawing(0))), double(of.personal(drawing(1)))
    queries, keys, scale = personal["descriptor"] @ shared["query"], FIRST @ shared["key"], WIDTH**-0.5
    if normalise:
        queries, keys = (rows / rows.norm(dim=1, keepdim=True) for rows in (queries, keys))
        scale = math.log(9 * (K - 1))
    for row in range(K):
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries[row : row + 1][None], keys[None], (FIRST @ shared["value"])[None], scale=scale
        )[0]
        expected = FIRST[row] + (attended @ shared["output"])[0]
        torch.testing.assert_close(of.generate(shared, personal)["p"][row], expected, rtol=0, atol=1e-12)


def test_one_prompt_gets_nine_tenths_of_the_attention_at_most() -> None:
    """The query equals the first key, and the other keys are orthogonal to it."""
    of = PromptAttention(target="p", first=torch.eye(K, dtype=torch.float64), bound=0.5)
    shared = {"base": of.first, **{name: torch.eye(K, dtype=torch.float64) for name in MATRICES}}
    made = of.generate(shared, {"descriptor": 1000 * of.first[:1]})["p"]
    torch.testing.assert_close(made[0] - of.first[0], torch.tensor([0.9, *[0.1 / 3] * 3], dtype=torch.float64))


@pytest.mark.parametrize("normalise", [True, False])
def test_a_single_prompt_is_the_same_for_all_devices(normalise: bool) -> None:
    """The softmax of one key is 1, whatever the descriptor."""
    of = PromptAttention(target="p", first=FIRST[:1], bound=0.5, normalise=normalise)
    shared = double(of.shared(drawing(0)))
    assert torch.equal(make_by(of, shared, "a"), make_by(of, shared, "b"))


def test_entropy_of_attention_is_a_share_of_its_maximum() -> None:
    of = PromptAttention(target="p", first=torch.eye(K, dtype=torch.float64), bound=0.5)
    shared = {"base": of.first, **{name: torch.eye(K, dtype=torch.float64) for name in MATRICES}}
    even = of.describe(shared, {"descriptor": torch.ones(1, K, dtype=torch.float64)})
    assert float(even["attention_entropy"]) == pytest.approx(1.0)
    peaked = of.describe(shared, {"descriptor": of.first[:1]})
    expected = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 3)) / math.log(4)
    assert float(peaked["attention_entropy"]) == pytest.approx(expected)


def test_one_descriptor_token_moves_all_prompts_alike() -> None:
    """P - P_base has equal rows; with a token for each prompt it has not."""

    def update(tokens: int) -> Tensor:
        of = attention(tokens)
        return make_by(of, double(of.shared(drawing(0)))) - FIRST

    torch.testing.assert_close(update(1), update(1)[:1].expand(K, -1), rtol=0, atol=1e-15)
    assert float(update(1).abs().max()) > 1e-3
    assert float((update(K)[0] - update(K)[1]).abs().max()) > 1e-6


def test_one_descriptor_token_does_not_see_the_order_of_prompts() -> None:
    """With the rows of P_base in another order, P has the same rows in that order."""
    of, order = attention(), torch.tensor([2, 0, 3, 1])
    shared = double(of.shared(drawing(0)))
    other = make_by(of, {**shared, "base": FIRST[order]})
    torch.testing.assert_close(other, make_by(of, shared)[order], rtol=0, atol=1e-14)


def test_matrices_begin_as_xavier_says() -> None:
    """Uniform in +-sqrt(6 / (l + l)), and descriptors in +-bound."""
    of = PromptAttention(target="p", first=torch.zeros(2, 100), bound=0.5)
    for name, value in of.shared(drawing(0)).items():
        if name != "base":
            assert 0.99 * math.sqrt(0.03) < float(value.abs().max()) <= math.sqrt(0.03)
    descriptor = of.personal(drawing(0))["descriptor"]
    assert descriptor.shape == (1, 100)
    assert 0.9 * 0.5 < float(descriptor.abs().max()) <= 0.5


def test_every_row_has_the_descriptors_statistics() -> None:
    """Up to eps = 1e-5 beside a standard deviation of about 1. The rows still differ as the base's do."""
    of = PromptStatistics(target="p", first=FIRST, bound=0.5)
    shared, personal = of.shared(drawing(0)), double(of.personal(drawing(1)))
    assert shared.keys() == {"base"}
    rows, descriptor = of.generate(shared, personal)["p"], personal["descriptor"]
    torch.testing.assert_close(rows.mean(dim=1), descriptor.mean().expand(K), rtol=0, atol=1e-12)
    torch.testing.assert_close(rows.std(dim=1, correction=0), descriptor.std(correction=0).expand(K), rtol=1e-4, atol=0)
    standard = (FIRST - FIRST.mean(dim=1, keepdim=True)) / FIRST.std(dim=1, correction=0, keepdim=True)
    torch.testing.assert_close((rows - descriptor.mean()) / descriptor.std(correction=0), standard, rtol=1e-4, atol=0)
