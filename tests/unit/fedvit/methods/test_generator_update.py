"""What servers do about generated tensors: by hand on a product of two numbers, and end to end on models."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedvit.errors import EmptyCohort
from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, Method, RoundContext, ServerState, StepInputs, Upload, list_trained
from fedvit.methods.generators.base import Generator, drawing
from fedvit.methods.optimizers import AdamW, MomentumSgd, Sgd
from fedvit.methods.rules.generator_update import GeneratorUpdate, Spread
from fedvit.methods.rules.together import Together
from fedvit.methods.step import whole_step
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from fedvit.tensors import Tensors, pack, unpack
from tests.support.method_steps import make_context
from tests.support.uploads import upload

CLASSES = 4
MODEL = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2, "mlp_ratio": 2.0, "qkv_bias": False}


def context(vit: PatchViT | None = None) -> RoundContext:
    return make_context(vit or build_vit(SMALL, CLASSES, seed=0, options=MODEL))


# --- by hand ------------------------------------------------------------------------------------------


class Product(Generator):
    """w = s e; s begins at 2, every e at 3."""

    def shared(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {"s": torch.tensor(2.0, dtype=torch.float64)}

    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {"e": torch.tensor(3.0, dtype=torch.float64)}

    def generate(self, shared: Mapping[str, Tensor], personal: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"w": shared["s"] * personal["e"]}


class Many(Product):
    """w = e times the sum of 30 numbers, each with a factor of its own."""

    def shared(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {f"s{number}": torch.tensor(1.0) for number in range(30)}

    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {"e": torch.tensor(3.0)}

    def generate(self, shared: Mapping[str, Tensor], personal: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"w": sum((shared[f"s{k}"] * 1.37**k for k in range(30)), torch.tensor(0.0)) * personal["e"]}


def product(**changes: Any) -> GeneratorUpdate:
    return replace(GeneratorUpdate(generator=Product(), optimizer=Sgd(), lr=0.1), **changes)


def begin(rule: GeneratorUpdate) -> ServerState:
    return ServerState({}, rule.begin(0))


def close(rule: GeneratorUpdate, state: ServerState, *deltas: tuple[str, int, float]) -> ServerState:
    uploads = [upload(device, samples, {"w": np.float64(delta)}) for device, samples, delta in deltas]
    return rule.close(state, uploads, context())[0]


def numbers(state: ServerState) -> dict[str, float]:
    return {name: float(value) for name, value in state.memory.items()}


def test_the_generator_follows_the_device() -> None:
    """w = 2 * 3 = 6; the device moved it by -0.5. g_s = e * 0.5 = 1.5, g_e = s * 0.5 = 1; at rate 0.1 s becomes 1.85
    and e 2.9, so that the next w is 5.365: it went where the device went."""
    state = close(product(), begin(product()), ("a", 7, -0.5))
    assert numbers(state) == pytest.approx({"generator/s": 1.85, "device/a/e": 2.9})
    assert product().generate(state, "a", 0)["w"] == pytest.approx(5.365)


@pytest.mark.parametrize(("weights", "of_a", "of_b"), [("samples", 0.25, 0.75), ("equal", 0.5, 0.5), ("sum", 1.0, 1.0)])
def test_what_each_device_weighs(weights: Any, of_a: float, of_b: float) -> None:
    """Deltas -1 and -2 from 1 and 3 images: g_s = 3 (w_a + 2 w_b), g_e = 2 w_a and 4 w_b."""
    state = close(product(weights=weights), begin(product()), ("a", 1, -1.0), ("b", 3, -2.0))
    expected = {"generator/s": 2 - 0.3 * (of_a + 2 * of_b), "device/a/e": 3 - 0.2 * of_a, "device/b/e": 3 - 0.4 * of_b}
    assert numbers(state) == pytest.approx(expected)


@pytest.mark.parametrize("at_once_bytes", [1, 16, 64 << 20])
def test_devices_count_the_same_however_many_are_pulled_back_at_a_time(
    monkeypatch: pytest.MonkeyPatch, at_once_bytes: int
) -> None:
    """g_s = 3 * (1 + 2 + 3 + 4 + 5) / 5 = 9; g_e of the k-th = 2 k / 5."""
    monkeypatch.setattr("fedvit.methods.rules.generator_update.AT_ONCE_BYTES", at_once_bytes)
    state = close(product(), begin(product()), *((f"d{number}", 1, -float(number)) for number in range(1, 6)))
    expected = {"generator/s": 2 - 0.9} | {f"device/d{number}/e": 3 - 0.04 * number for number in range(1, 6)}
    assert numbers(state) == pytest.approx(expected)


def test_a_device_without_an_image_has_no_say() -> None:
    rule = product(weights="equal")
    both = close(rule, begin(rule), ("a", 1, -1.0), ("b", 0, 5.0))
    assert numbers(both) == numbers(close(rule, begin(rule), ("a", 1, -1.0)))


@pytest.mark.parametrize("deltas", [[], [("a", 0, 1.0)]])
def test_without_an_image_there_is_no_step(deltas: list[tuple[str, int, float]]) -> None:
    with pytest.raises(EmptyCohort):
        close(product(), begin(product()), *deltas)


def test_figures_of_a_round() -> None:
    # the report says how large the gradient was: g_s = 3 * 4 / 3 = 4 and g_e = 2 * 4 / 3: sqrt(16 + 64 / 9)
    rule = product()
    _, figures = rule.close(begin(rule), [upload("a", 1, {"w": np.float64(-4 / 3)})], context())
    assert figures == pytest.approx({"generator_gradient_norm": np.sqrt(16 + 64 / 9)})
    # figures have the difference between devices: After a round of device a alone s = 1.7 and its e = 2.8, while
    # b's is 3
    rule = product()
    state = close(rule, begin(rule), ("a", 1, -1.0))
    assert numbers(state) == pytest.approx({"generator/s": 1.7, "device/a/e": 2.8})
    _, figures = rule.close(state, [upload(name, 1, {"w": np.float64(-1)}) for name in "ab"], context())
    assert figures["generated_difference"] == pytest.approx(0.2 / np.sqrt((2.8**2 + 3**2) / 2))
    spread = Spread()
    spread.add({"w": torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2**-20]])})
    assert spread.difference() == pytest.approx(2**-20 / np.sqrt(2), rel=1e-3)


def test_a_parameter_may_have_a_rate_of_its_own() -> None:
    class Slower(Product):
        @property
        def relative_rates(self) -> Mapping[str, float]:
            return {"s": 0.5}

    deltas = (("a", 1, -1.0),)
    plain, slower = (numbers(close(rule, begin(rule), *deltas)) for rule in (product(), product(generator=Slower())))
    assert slower["generator/s"] - 2 == pytest.approx((plain["generator/s"] - 2) / 2)
    assert slower["device/a/e"] == plain["device/a/e"]


def test_a_memory_of_many_devices_is_searched_once() -> None:
    """Not once for each of ten thousand devices."""

    class Counted(dict[str, Any]):
        searches = 0

        def __iter__(self) -> Iterator[str]:
            Counted.searches += 1
            return super().__iter__()

    rule = product()
    state, _ = rule.close(begin(rule), [upload(name, 1, {"w": np.float64(-1)}) for name in "abcde"], context())
    state = replace(state, memory=Counted(state.memory))
    Counted.searches = 0
    made = {name: rule.generate(state, name, 0)["w"].item() for name in "abcdef"}
    assert Counted.searches == 1
    assert len(set(made.values())) > 1


def test_the_order_in_which_a_file_gives_the_memory_changes_no_bit() -> None:
    """Of 30 numbers of very different size, whose sum of squares depends on the order."""
    rule = product(generator=Many(), clip_norm=1.0)
    state, delta = begin(rule), upload("a", 1, {"w": np.float32(-1.0)})
    turned = replace(state, memory=dict(reversed(state.memory.items())))
    one, other = (rule.close(given, [delta], context()) for given in (state, turned))
    assert pack(one[0].memory) == pack(other[0].memory)
    assert one[1] == other[1]


@pytest.mark.parametrize(("clip_norm", "scale"), [(100.0, 1.0), (1.0, 1 / np.sqrt(13))])
def test_the_whole_gradient_is_clipped(clip_norm: float, scale: float) -> None:
    """(g_s, g_e) = (3, 2) has the norm sqrt(13)."""
    state = close(product(clip_norm=clip_norm), begin(product()), ("a", 1, -1.0))
    assert numbers(state) == pytest.approx({"generator/s": 2 - 0.3 * scale, "device/a/e": 3 - 0.2 * scale})


MOMENTUM = MomentumSgd(momentum=0.5, weight_decay=0.1)


def test_the_embedding_of_a_device_that_was_not_asked_stays() -> None:
    """Bit for bit, though the optimizer has momentum and weight decay, and both devices are known to it."""
    rule = product(optimizer=MOMENTUM)
    first = close(rule, begin(rule), ("a", 1, -1.0), ("b", 1, -1.0))
    second = close(rule, first, ("a", 1, -1.0))
    kept = [name for name in first.memory if "/b/" in name]
    assert sorted(kept) == ["device/b/e", "optimizer/momentum_buffer/device/b/e"]
    for name in kept:
        assert second.memory[name].tobytes() == first.memory[name].tobytes()
    assert second.memory["device/a/e"] != first.memory["device/a/e"]


def test_a_dense_table_moves_every_known_embedding() -> None:
    """b alone in round 1: buffer = g + 0.1 e = 2 + 0.3 = 2.3, e = 3 - 0.23 = 2.77. In round 2 only a answers: b's
    buffer = 0.5 * 2.3 + 0.1 * 2.77 = 1.427, e = 2.77 - 0.1427."""
    rule = product(optimizer=MOMENTUM, all_embeddings=True)
    state = close(rule, close(rule, begin(rule), ("b", 1, -1.0)), ("a", 1, -1.0))
    assert numbers(state)["device/b/e"] == pytest.approx(2.77 - 0.1427)


def test_a_late_device_is_taken_in_by_its_embedding_alone() -> None:
    """The shared part keeps its bits; e of the newcomer goes as before: 3 - 0.1 * 2 = 2.8."""
    rule = product(optimizer=MomentumSgd(momentum=0.9), trains="embeddings")
    start = close(product(optimizer=MomentumSgd(momentum=0.9)), begin(rule), ("a", 1, 0.0))
    state = close(rule, start, ("new", 1, -1.0))
    assert numbers(state)["generator/s"] == 2.0
    assert numbers(state)["device/new/e"] == pytest.approx(2.8)
    assert {name for name in state.memory if "new" not in name} == set(start.memory)


@pytest.mark.parametrize("optimizer", [MOMENTUM, AdamW(weight_decay=0.1)])
def test_what_is_remembered_survives_a_restart(optimizer: Any) -> None:
    """Five rounds with changing cohorts; one server is started anew from its files after each of them."""
    rule = product(optimizer=optimizer)
    rounds = [("a",), ("a", "b"), ("c",), ("a", "c"), ("b",)]
    straight, restarted = begin(rule), begin(rule)
    for number, cohort in enumerate(rounds):
        deltas = [(device, 1 + number, 0.1 * number - 0.3) for device in cohort]
        straight = close(rule, straight, *deltas)
        restarted = ServerState({}, unpack(pack(close(rule, restarted, *deltas).memory)))
    assert straight.memory.keys() == restarted.memory.keys()
    for name, value in straight.memory.items():
        assert value.dtype == restarted.memory[name].dtype
        assert value.tobytes() == restarted.memory[name].tobytes()


def test_a_rule_leaves_what_it_is_given_as_it_was() -> None:
    rule = product(optimizer=MOMENTUM)
    state = close(rule, begin(rule), ("a", 1, -1.0))
    before = pack(state.memory)
    close(rule, state, ("a", 1, -1.0))
    assert pack(state.memory) == before


# --- end to end ---------------------------------------------------------------------------------------

PLAIN = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None, "server_lr": 1.0}
HN = {"server_momentum": 0.0, "server_weight_decay": 0.0, "server_clip_norm": None, "hidden": 20}
PG = {"tokens": 3, "server_weights": "samples", "server_optimizer": "sgd"}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedtp": ("fedtp", {}),
    "fedtp encoder": ("fedtp", {"parts": "encoder"}),
    "fedtp rod": ("fedtp", {"head": "rod"}),
    "fedtp local head": ("fedtp", {"head": "local"}),
    "pfedpg": ("pfedpg", PG),
    "pfedpg per prompt": ("pfedpg", {**PG, "descriptor_tokens": 3}),
    "pfedpg mlp": ("pfedpg", {**PG, "generator": "mlp"}),
    "pfedpg adain": ("pfedpg", {**PG, "generator": "adain"}),
    "pfedpg basis": ("pfedpg", {**PG, "generator": "basis"}),
    "pfedhn": ("pfedhn", HN),
    "pfedhn personal head": ("pfedhn", {**HN, "personal_head": True}),
}
DEVICES = {"a": 3, "b": 5}
"""Name -> number of images."""


class Data(NamedTuple):
    patches: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Fleet:
    """A method in float64, and two devices with all that a device has."""

    method: Method
    vit: PatchViT
    rule: GeneratorUpdate
    state: ServerState
    data: dict[str, Data]

    @functools.cached_property
    def uploads(self) -> dict[str, Upload]:
        return {device: upload(device, count, self.delta(device)) for device, count in DEVICES.items()}

    def inputs(self, device: str) -> StepInputs:
        patches, labels = self.data[device]
        return StepInputs(
            images=Images(patches, None),
            labels=labels,
            weight=torch.ones(len(labels), dtype=torch.float64),
            anchors={},
            facts={"class_counts": torch.bincount(labels, minlength=CLASSES).double()},
            draws={},
            lr=torch.tensor(self.method.lr, dtype=torch.float64),
            last=None,
        )

    def delta(self, device: str) -> Tensors:
        """after - start of one full-batch step on a device, which starts from what the server generated."""
        made = {name: torch.from_numpy(value) for name, value in self.rule.generate(self.state, device, 0).items()}
        values = {**self.method.tensors(self.vit), **made}
        given = self.inputs(device)
        inputs = {f"tensor/{name}": value for name, value in values.items()}
        inputs |= {"batch/patches": given.images.patches, "batch/labels": given.labels, "batch/weight": given.weight}
        inputs |= {"fact/class_counts": given.facts["class_counts"], "hyper/lr": given.lr}
        (phase,) = self.method.phases(self.vit)
        outputs = whole_step(self.method, self.vit, phase)({**inputs, "hyper/step": torch.tensor(1.0)})
        sent_back = self.method.names_with(self.vit, Role.SHARED, Role.GENERATED)
        assert set(sent_back) <= set(list_trained(self.method, self.vit, phase))
        return {name: (outputs[f"new/tensor/{name}"] - values[name]).detach().numpy() for name in sent_back}

    def loss(self, memory: Mapping[str, Tensor], device: str) -> Tensor:
        """Of a device's images with the tensors that are generated from `memory`."""
        shared = {name.removeprefix("generator/"): v for name, v in memory.items() if name.startswith("generator/")}
        own = f"device/{device}/"
        personal = {name.removeprefix(own): value for name, value in memory.items() if name.startswith(own)}
        made = self.rule.generator.generate(shared, personal)
        (phase,) = self.method.phases(self.vit)
        values = {**self.method.tensors(self.vit), **made}
        return self.method.objective(self.vit, phase, values, self.inputs(device)).loss


@functools.cache
def fleet(name: str) -> Fleet:
    kind, options = SETTINGS[name]
    method = make_method(kind, {**PLAIN, **options})
    vit = build_model(method, SMALL, CLASSES, seed=0, options=MODEL).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in vit.parameters():  # zeros and ones would hide what is forgotten
            value += 0.1 * torch.randn(value.shape, generator=draw, dtype=value.dtype)
    server = method.server_rule(vit)
    rules = server.rules if isinstance(server, Together) else (server,)
    (rule,) = [each for each in rules if isinstance(each, GeneratorUpdate)]
    memory = rule.begin(0)
    for device in DEVICES:
        own = rule.generator.personal(drawing(0, "device", device))
        memory |= {f"device/{device}/{name}": value.numpy() for name, value in own.items()}
    data: dict[str, Data] = {}
    for device, count in DEVICES.items():
        patches = torch.randn(count, 4, 192, generator=draw, dtype=torch.float64)
        data[device] = Data(patches, torch.randint(0, CLASSES, (count,), generator=draw))
    double = {name: value.astype(np.float64) for name, value in memory.items()}
    return Fleet(method, vit, rule, ServerState({}, double), data)


each_setting = pytest.mark.parametrize("name", SETTINGS)


def gradient(of: Fleet, *devices: str, **changes: Any) -> Tensors:
    """What the optimizer was given of the devices' uploads: at rate 1, before - after."""
    rule = replace(of.rule, **changes)
    after = rule.close(of.state, [of.uploads[device] for device in devices], context(of.vit))[0].memory
    assert after.keys() == of.state.memory.keys()
    return {name: of.state.memory[name] - value for name, value in after.items()}


@each_setting
def test_one_step_of_sgd_gives_the_gradient_of_the_whole(name: str) -> None:
    """Devices take one full-batch step of SGD at rate 0.5. What the server gets of it is 0.5 times the gradient of
    3/8 L_a + 5/8 L_b by all that the generator has, differentiated from the embedding to the loss in one piece; and
    nothing of the generator is idle."""
    of = fleet(name)
    found = gradient(of, "a", "b")
    leaves = {name: torch.from_numpy(value).clone().requires_grad_() for name, value in of.state.memory.items()}
    (of.loss(leaves, "a") * 3 / 8 + of.loss(leaves, "b") * 5 / 8).backward()
    for key, leaf in leaves.items():
        assert leaf.grad is not None, f"{key} is idle"
        assert float(leaf.grad.abs().max()) > 0, f"{key} is idle"
        np.testing.assert_allclose(found[key], 0.5 * leaf.grad.numpy(), rtol=1e-10, atol=1e-14, err_msg=key)


@each_setting
def test_a_device_that_did_not_move_teaches_nothing(name: str) -> None:
    of = fleet(name)
    still = {key: np.zeros_like(value) for key, value in of.uploads["a"].load().items()}
    state, figures = of.rule.close(of.state, [upload("a", 3, still)], context(of.vit))
    assert figures["generator_gradient_norm"] == 0.0
    assert pack(state.memory) == pack(of.state.memory)


@each_setting
def test_the_gradient_of_a_cohort_is_the_sum_of_its_devices(name: str) -> None:
    of = fleet(name)
    both = gradient(of, "a", "b", weights="sum")
    alone = [gradient(of, device, weights="sum") for device in DEVICES]
    for key, value in both.items():
        np.testing.assert_allclose(value, alone[0][key] + alone[1][key], rtol=0, atol=1e-13, err_msg=key)


@each_setting
def test_a_device_does_not_move_the_embedding_of_another(name: str) -> None:
    updated = gradient(fleet(name), "a")
    for key, value in updated.items():
        assert value.any() == (not key.startswith("device/b/")), key


@each_setting
def test_the_server_makes_the_cohorts_loss_smaller(name: str) -> None:
    """A small step in the wrong direction would make it larger."""
    of = fleet(name)
    rule = replace(of.rule, lr=1e-3)
    before = {name: torch.from_numpy(value) for name, value in of.state.memory.items()}
    after = rule.close(of.state, list(of.uploads.values()), context(of.vit))[0].memory
    updated = {name: torch.from_numpy(value) for name, value in after.items()}

    def cohort(memory: Mapping[str, Tensor]) -> float:
        return float(of.loss(memory, "a") * 3 / 8 + of.loss(memory, "b") * 5 / 8)

    assert cohort(updated) < cohort(before) - 1e-9


@each_setting
def test_equal_embeddings_make_equal_tensors(name: str) -> None:
    of = fleet(name)
    made = {device: of.rule.generate(of.state, device, 0) for device in DEVICES}
    same = {key.replace("/a/", "/b/"): v for key, v in of.state.memory.items() if key.startswith("device/a/")}
    twin = of.rule.generate(replace(of.state, memory={**of.state.memory, **same}), "b", 0)
    assert pack(twin) == pack(made["a"])
    if name != "pfedpg basis":
        assert pack(made["a"]) != pack(made["b"])


@each_setting
def test_generated_again_after_a_restart_it_has_the_same_bits(name: str) -> None:
    """Also of a device that is not remembered: its embedding follows from the seed and its name. The values are those
    of the Program: names, shapes and float32."""
    kind, options = SETTINGS[name]
    method = make_method(kind, options)
    vit = build_model(method, SMALL, CLASSES, seed=0, options=MODEL)
    rule = method.server_rule(vit)
    state = ServerState({}, rule.begin(5))
    again = ServerState({}, unpack(pack(method.server_rule(vit).begin(5))))
    made = rule.generate(state, "a", 5)
    assert pack(method.server_rule(vit).generate(again, "a", 5)) == pack(made)
    wanted = {key: method.tensors(vit)[key] for key in method.names_with(vit, Role.GENERATED)}
    assert {key: value.shape for key, value in made.items()} == {key: tuple(v.shape) for key, v in wanted.items()}
    assert {value.dtype for value in made.values()} == {np.dtype(np.float32)}
    if name != "pfedpg basis":
        assert pack(rule.generate(state, "b", 5)) != pack(made)
        assert pack(rule.generate(ServerState({}, rule.begin(6)), "a", 6)) != pack(made)


@each_setting
def test_rounds_go_on_after_a_restart(name: str) -> None:
    """Two rounds with momentum and weight decay on the server, without and with files in between."""
    of = fleet(name)
    rule = replace(of.rule, optimizer=MomentumSgd(momentum=0.9, weight_decay=1e-3))
    straight = restarted = of.state
    for _ in range(2):
        straight, restarted = (
            rule.close(state, list(of.uploads.values()), context(of.vit))[0] for state in (straight, restarted)
        )
        restarted = replace(restarted, memory=unpack(pack(restarted.memory)))
    assert pack(straight.memory) == pack(restarted.memory) != pack(of.state.memory)
