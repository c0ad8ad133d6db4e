"""From a configuration to what devices get."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import pytest
import torch

from coordinator.compute.planning import planner
from coordinator.compute.planning.batch import suitable_run_size
from coordinator.compute.planning.planned_device import PlannedDevice
from coordinator.compute.planning.planner import (
    PROTOCOLS,
    Plan,
    Variant,
    make_plan,
)
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import ConfigError, OverBudget
from fedvit.methods import METHODS
from fedvit.methods.base import PREDICT, GroupRule, ServerRule, ServerState
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import (
    Batch,
    Evaluate,
    Role,
    Train,
    decode_program,
)
from fedvit.program_versions import ASSIGNED_VERSION, PROGRAM_VERSION, SEEDED_VERSION
from fedvit.resources import Budget, ProductKind, ProductRate, Speed, image_cache_bytes
from fedvit.tensors import Tensors, unpack
from profiles.cost import GraphCost, graph_cost
from profiles.predict import Target, predict
from profiles.prediction import Expected
from profiles.program_cost import PricedProgram
from tests.support.codes import has_code
from tests.support.runs import Configure

CLASSES = ("0", "1", "2")
SMALLEST = {"image_size": 8, "patch_size": 8, "width": 4, "depth": 1, "heads": 1}


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> BlobStore:
    return BlobStore(tmp_path_factory.mktemp("blobs"))


@pytest.fixture(scope="module")
def plan(blobs: BlobStore, graph_cache: Path, configure: Configure) -> Callable[..., Plan]:
    """A plan for a configuration; each is made once."""
    made: dict[str, Plan] = {}

    def plan(*, into: BlobStore = blobs, classes: tuple[str, ...] = CLASSES, **values: Any) -> Plan:
        key = repr((str(into.folder), classes, sorted(values.items())))
        if key not in made:
            made[key] = make_plan(configure(**values), classes, into, cache=graph_cache)
        return made[key]

    return plan


@pytest.mark.parametrize("method", ["fedavg", "eftvit"])
def test_the_same_configuration_gives_the_same_program(plan: Callable[..., Plan], method: str, tmp_path: Path) -> None:
    """Byte for byte, in another blob store too: a resumed run finds its program again."""
    first, again = plan(method=method), plan(method=method, into=BlobStore(tmp_path))
    assert first.first.digest == again.first.digest
    assert first.state.tensors.keys() == again.state.tensors.keys()
    for name, value in first.state.tensors.items():
        assert value.tobytes() == again.state.tensors[name].tobytes()


@pytest.mark.parametrize(
    "changed",
    [{"options": {"lr": 0.06}}, {"classes": ("2", "1", "0")}, {"method": "eftvit"}],
)
def test_another_configuration_gives_another_program(plan: Callable[..., Plan], changed: dict[str, Any]) -> None:
    assert plan(method="fedavg").first.digest != plan(**{"method": "fedavg", **changed}).first.digest


def test_the_seed_decides_the_first_values(plan: Callable[..., Plan]) -> None:
    """All of FedAvg's come from the server, so its program is the same; EFTViT's initial blobs are in the program."""
    one, other = plan(method="fedavg"), plan(method="fedavg", seed=2)
    assert one.first.digest == other.first.digest
    assert (one.state.tensors["patch_embed.proj.weight"] != other.state.tensors["patch_embed.proj.weight"]).any()
    assert plan(method="eftvit").first.digest != plan(method="eftvit", seed=2).first.digest


def test_fedavg_in_groups(plan: Callable[..., Plan]) -> None:
    """Everything is shared: one group, from the server each round, with nothing to fetch once but the graphs."""
    made = plan(method="fedavg")
    program = made.first.program
    assert {name: group.role for name, group in program.groups.items()} == {"model": Role.SHARED}
    assert program.common_groups() == list(made.groups) == ["model"]
    assert program.list_fetched_once() == [program.graphs[name].digest for name in ("train", "update", "predict")]
    assert set(made.state.tensors) == set(program.tensors) == set(program.names("model"))


def test_eftvit_in_groups(plan: Callable[..., Plan], blobs: BlobStore) -> None:
    """One local block of three: embedding and block 0 local, blocks 1, 2 and norm global, the head seeded. A block is a
    group of its own."""
    made = plan(method="eftvit")
    program = made.first.program
    assert {name: group.role for name, group in program.groups.items()} == {
        "head": Role.SEEDED,
        "norm": Role.GLOBAL,
        "block.1": Role.GLOBAL,
        "block.2": Role.GLOBAL,
        "local": Role.LOCAL,
    }
    assert program.common_groups() == list(made.groups) == ["head", "norm", "block.1", "block.2"]
    prefixes = {
        group: {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in program.names(group)}
        for group in program.groups
    }
    assert prefixes == {
        "head": {"head"},
        "norm": {"norm"},
        "block.1": {"blocks.1"},
        "block.2": {"blocks.2"},
        "local": {"cls_token", "pos_embed", "patch_embed", "blocks.0"},
    }
    assert set(made.state.tensors) == {name for group in program.common_groups() for name in program.names(group)}
    assert all(made.groups[group] == program.names(group) for group in made.groups)
    local = program.groups["local"].initial
    assert local is not None
    assert program.list_fetched_once()[3:] == [local]
    assert program.groups["head"].initial is None
    first = unpack(blobs.get(local))
    assert set(first) == set(program.names("local"))
    for name, value in made.vit.tensors().items():
        if name in first:
            np.testing.assert_array_equal(first[name], value.numpy())


def test_every_tensor_of_the_model_is_in_the_program(plan: Callable[..., Plan]) -> None:
    for method in ("fedavg", "eftvit"):
        made = plan(method=method)
        model = made.vit.tensors()
        assert list(made.first.program.tensors) == list(made.values) == list(model)
        for name, spec in made.first.program.tensors.items():
            assert (spec.shape, spec.dtype) == (tuple(model[name].shape), "float32")


def test_everything_that_a_device_fetches_is_in_the_blob_store(plan: Callable[..., Plan], blobs: BlobStore) -> None:
    made = plan(method="eftvit").first
    assert decode_program(blobs.get(made.digest)) == made.program
    for digest in (made.digest, *made.program.list_fetched_once()):
        assert digest_of(blobs.get(digest)) == digest


def test_the_program_says_what_was_configured(plan: Callable[..., Plan]) -> None:
    made = plan(
        method="eftvit",
        options={"threshold": 1.5},
        images={"crop_padding": 2, "flip": True, "brightness": 0.25, "views": 4},
    ).first.program
    [phase] = made.train
    batch = made.batch
    assert (made.method, made.model, made.classes) == ("eftvit", "vit_small_images", CLASSES)
    assert (phase.graph, phase.groups, phase.epochs, phase.lr) == ("train", ("local", "head"), 3, 1e-3)
    assert phase.slots == ("exp_avg", "exp_avg_sq")
    assert phase.collect is not None
    assert (phase.collect.output, phase.collect.shape, phase.collect.threshold) == ("features.1", (9, 32), 1.5)
    assert (batch.image_size, batch.patch_size, batch.batch_size, batch.mask_ratio) == (32, 8, 8, 0.5)
    assert (batch.crop_padding, batch.flip, batch.brightness, batch.views) == (2, True, 0.25, 4)
    assert made.upload_form() == {"features.1": ((None, 9, 32), "float32"), "labels": ((None,), "int64")}


def test_older_devices_refuse_a_program_with_dropout(plan: Callable[..., Plan]) -> None:
    """By its version: they would not draw the numbers that its steps read."""
    plain, dropping = (plan(method="fedavg", options=options).first.program for options in ({}, {"dropout": 0.1}))
    assert (plain.v, plain.batch.sample_seeds) == (PROGRAM_VERSION, False)
    assert (dropping.v, dropping.batch.sample_seeds) == (SEEDED_VERSION, True)


def test_older_devices_refuse_a_program_with_assigned_tensors(plan: Callable[..., Plan]) -> None:
    """By its version, which they can name, and not by a role that they cannot read."""
    made = plan(method="scaffold").first.program
    assert made.v == ASSIGNED_VERSION
    assert Role.ASSIGNED in {group.role for group in made.groups.values()}


def test_the_price_of_a_graph_is_counted(plan: Callable[..., Plan]) -> None:
    """The products of one prediction, 2 FLOPs per multiply-add, batch 8, 17 tokens of width 32, 3 blocks.

    Embedding 16*192*32; per block: qkv 17*32*96, scores and values 2*17*17*32, projection 17*32*32, MLP (ratio 2)
    2*17*32*64; head 32*3. In the last block the class token alone is asked for: keys and values of all, the rest of
    one. Training costs at least twice that again for the backward pass.
    """
    block = 17 * 32 * 96 + 2 * 17 * 17 * 32 + 17 * 32 * 32 + 2 * 17 * 32 * 64
    last = 17 * 32 * 64 + 32 * 32 + 2 * 17 * 32 + 32 * 32 + 2 * 32 * 64
    forward = 2 * 8 * (16 * 192 * 32 + 2 * block + last + 32 * 3)
    graphs = plan(method="fedavg").first.program.graphs
    assert graphs["predict"].flops == forward
    assert 2.5 * forward < graphs["train"].flops <= 3 * forward


# --- variants -----------------------------------------------------------------------------------------


class Remembering(WeightedMean):
    """A rule that has two things in mind from the beginning."""

    def begin(self, seed: int) -> Tensors:
        return {"one": np.ones(2, np.float32), "two": np.full(2, 2, np.float32)}


@dataclass(frozen=True, kw_only=True)
class Staged(FedAvg):
    """FedAvg with whatever the tests below want to vary."""

    source: ClassVar[str] = "made for these tests"

    head: Literal["shared", "local", "elsewhere"] = "shared"
    tunes: bool = False
    keeps: bool = False
    remembers: bool = False

    def in_round(self, round_number: int, rounds: int) -> "Staged":
        """The last round of a run trains for longer."""
        return replace(self, epochs=7) if round_number == rounds else self

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        everything = GroupRule("model", Role.SHARED, ("*",))
        match self.head:
            case "shared":
                return (everything,)
            case "local":
                return (GroupRule("own", Role.LOCAL, ("head.*",)), everything)
            case "elsewhere":
                return (GroupRule("head", Role.SHARED, ("head.*",)), everything)

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("model",)),)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return Remembering() if self.remembers else WeightedMean()

    def evaluate(self, vit: PatchViT) -> Evaluate:
        tuning = (self.phase(("model",)),) if self.tunes else ()
        return Evaluate(graph=PREDICT, adapt=tuning, kept=("model",) if self.keeps else ())


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch, configure: Configure, graph_cache: Path, tmp_path: Path) -> Any:
    """A plan for `Staged` on the smallest model, with these options and run settings."""
    monkeypatch.setitem(METHODS, "staged", Staged)

    def make(options: dict[str, Any] | None = None, *, start: ServerState | None = None, **values: Any) -> Plan:
        config = configure("staged", options, model_options=SMALLEST, **values)
        return make_plan(config, CLASSES, BlobStore(tmp_path / "blobs"), start=start, cache=graph_cache)

    return make


SPLITS: dict[str, dict[str, Any]] = {
    "jetson-*": {"local_blocks": 2},
    "jetson-9": {"mask": 0.75},
    "pi-[12]": {"lr": 0.5},
}


def test_devices_have_programs_by_their_names(plan: Callable[..., Plan]) -> None:
    """Patterns are taken in their order, so that a later one adds to an earlier; who is not named has the run's own."""
    made = plan(method="eftvit", variants=SPLITS)
    options = {
        device: (method.local_blocks, method.mask, method.lr)
        for device in ("pi-1", "pi-3", "jetson-1", "jetson-9", "big-jetson-1")
        if (method := made.method_for(device, 1))
    }
    assert options == {
        "pi-1": (1, 0.5, 0.5),
        "pi-3": (1, 0.5, 1e-3),
        "jetson-1": (2, 0.5, 1e-3),
        "jetson-9": (2, 0.75, 1e-3),
        "big-jetson-1": (1, 0.5, 1e-3),
    }
    assert made.variant("pi-3", 1) is made.variant("big-jetson-1", 1) is made.first
    assert made.variant("jetson-1", 1) is made.variant("jetson-2", 1)
    assert made.variant("jetson-1", 1).digest != made.first.digest
    [phase] = made.variant("pi-1", 1).program.train
    assert phase.lr == 0.5


def test_devices_of_two_splits_share_what_both_have(plan: Callable[..., Plan], blobs: BlobStore) -> None:
    """Of three blocks one trains the first, the other the first two. The server has blocks 1 and 2; block 2, norm and
    head are the very same blobs for both, and answers are given by the same graph."""
    made = plan(method="eftvit", variants=SPLITS)
    one, two = made.first.program, made.variant("jetson-1", 1).program
    assert list(made.groups) == ["head", "norm", "block.1", "block.2"]
    assert one.common_groups() == ["head", "norm", "block.1", "block.2"]
    assert two.common_groups() == ["head", "norm", "block.2"]
    assert two.names("block.2") == one.names("block.2") == made.groups["block.2"]
    assert {name.split(".")[1] for name in two.names("local") if name.startswith("blocks.")} == {"0", "1"}
    less, more = (unpack(blobs.get(str(program.groups["local"].initial))) for program in (one, two))
    assert less.keys() < more.keys()
    for name, value in less.items():
        assert value.tobytes() == more[name].tobytes()
    for name in one.names("block.1"):
        assert more[name].tobytes() == made.state.tensors[name].tobytes(), "both sides begin with the same block"
    assert one.graphs["predict"].digest == two.graphs["predict"].digest
    assert one.graphs["train"].digest != two.graphs["train"].digest
    assert set(one.upload_form()) == {"features.1", "labels"}
    assert set(two.upload_form()) == {"features.2", "labels"}


def test_variants_are_the_same_in_every_process(plan: Callable[..., Plan], tmp_path: Path) -> None:
    one = plan(method="eftvit", variants=SPLITS)
    again = plan(method="eftvit", variants=SPLITS, into=BlobStore(tmp_path))
    for device in ("pi-3", "jetson-1"):
        assert one.variant(device, 1).digest == again.variant(device, 1).digest


def test_variants_that_disagree_on_a_group_are_refused(staged: Any) -> None:
    """The model without its head cannot be averaged with the model: two groups of one name are one group."""
    with pytest.raises(ConfigError) as refused:
        staged(variants={"jetson-*": {"head": "local"}})
    assert str(refused.value) == "variants of method 'staged' disagree on what is in group 'model'"
    assert staged({"head": "local"}, variants={"jetson-*": {"head": "local", "lr": 0.5}}).groups.keys() == {"model"}


def test_programs_are_made_when_a_round_needs_them(staged: Any) -> None:
    """The last of five rounds trains for longer. It is the same program for all, made once."""
    made = staged(rounds=5)
    assert not made.variants
    assert made.variant("a", 4) is made.variant("b", 1) is made.first
    assert len(made.variants) == 1
    last = made.variant("a", 5)
    assert [phase.epochs for phase in last.program.train] == [7]
    assert last.digest != made.first.digest
    assert last.program.graphs == made.first.program.graphs
    assert made.variant("b", 5) is last
    assert len(made.variants) == 2


# --- devices with budgets -----------------------------------------------------------------------------


def target_of(device: str, **budget: Any) -> PlannedDevice:
    speed = Speed(
        threads=1,
        products=(ProductRate("weights", 1, 200, 768, 768, 1e9),),
        bytes_per_s={"Add": 1e9},
        node_s=1e-5,
    )
    return PlannedDevice(
        device=device,
        speed=speed,
        source="measured",
        mode=None,
        budget=Budget(**budget),
        images=16,
        test_images=4,
        base_rss_bytes=50_000_000,
    )


def check_expected(made: Plan, variant: Variant, expected: Expected | None, target: PlannedDevice) -> Expected:
    """What is expected is the cost of the very Program and graphs that are shipped."""
    assert expected is not None
    assert decode_program(made.blobs.get(variant.digest)) == variant.program
    graphs = {name: graph_cost(made.blobs.get(spec.digest)) for name, spec in variant.program.graphs.items()}
    cost = PricedProgram(variant.program, {}, graphs).cost(
        images=target.images,
        test_images=target.test_images,
        cache_bytes=image_cache_bytes(target.budget.memory_bytes),
    )
    assert (expected.flops, expected.bytes_down, expected.bytes_up) == (
        cost.flops_round,
        cost.bytes_down,
        cost.bytes_up,
    )
    prediction = predict(
        cost,
        target.speed,
        Target(target.device, target.source, base_rss_bytes=target.base_rss_bytes),
        target.budget,
    )
    assert expected.prediction == prediction
    assert expected.budget == target.budget
    return expected


def test_of_a_device_that_is_not_known_nothing_is_expected(staged: Any) -> None:
    made = staged()
    variant, expected = made.choose_variant("a", 1, None)
    assert variant is made.first
    assert expected is None


def test_a_device_without_a_budget_gets_what_was_asked_for(staged: Any) -> None:
    made, target = staged(), target_of("a")
    variant, expected = made.choose_variant("a", 1, target)
    assert variant is made.first
    told = check_expected(made, variant, expected, target)
    assert (told.changes, told.quality, told.prediction.over) == ({}, 1.0, ())
    assert made.choose_variant("a", 1, target)[1] == expected
    assert len(made.choices) == 1, "it is worked out once"


def test_a_device_gets_what_fits_its_budget(staged: Any) -> None:
    """Half the FLOPs of two epochs are one. Another device, without a budget, has both."""
    made = staged({"epochs": 2}, budget={"flops_budget": "1PFLOP"})
    _, asked = made.choose_variant("b", 1, target_of("b"))
    assert asked is not None
    target = target_of("a", flops_per_round=asked.flops // 2)
    variant, expected = made.choose_variant("a", 1, target)
    told = check_expected(made, variant, expected, target)
    assert (told.changes, told.quality, told.flops) == ({"epochs": 1}, 0.5, asked.flops // 2)
    assert [phase.epochs for phase in variant.program.train] == [1]
    assert variant.digest != made.first.digest
    assert [phase.epochs for phase in made.choose_variant("b", 1, target_of("b"))[0].program.train] == [2]


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "kind"), [("int8", "integers"), ("fp16", "halves")])
def test_rounded_products_are_given_to_devices_that_are_faster_with_them(
    compute: str, kind: ProductKind, configure: Configure, blobs: BlobStore, graph_cache: Path
) -> None:
    """By what the device measured. One that measured nothing, or is not known, gets what was configured; one that is
    slower gets floats, which is said once."""
    said: list[str] = []
    made = make_plan(configure("eftvit", {"compute": compute}), CLASSES, blobs, cache=graph_cache, progress=said.append)
    floats = ProductRate("weights", 1, 200, 768, 768, 1e8)

    def target(device: str, *flops_per_s: float) -> PlannedDevice:
        rounded = (msgspec.structs.replace(floats, kind=kind, flops_per_s=rate) for rate in flops_per_s)
        speed = Speed(threads=1, products=(floats, *rounded), bytes_per_s={"Add": 1e12}, node_s=0.0)
        return target_of(device)._replace(speed=speed)

    given = {
        "faster": made.choose_variant("faster", 1, target("faster", 4e8)),
        "slower": made.choose_variant("slower", 1, target("slower", 5e7)),
        "slower, too": made.choose_variant("slower, too", 1, target("slower, too", 5e7)),
        "no speed": made.choose_variant("no speed", 1, target_of("no speed")._replace(speed=None)),
        "unknown": made.choose_variant("unknown", 1, None),
    }
    assert {device: variant.method.compute for device, (variant, _) in given.items()} == {
        "faster": compute,
        "slower": "fp32",
        "slower, too": "fp32",
        "no speed": compute,
        "unknown": compute,
    }
    changes = {device: expected.changes for device, (_, expected) in given.items() if expected}
    assert changes == {"faster": {}, "slower": {"compute": "fp32"}, "slower, too": {"compute": "fp32"}, "no speed": {}}
    dtypes = {
        device: {spec.dtype for name, spec in variant.program.tensors.items() if name == "blocks.2.mlp.fc1.weight"}
        for device, (variant, _) in given.items()
    }
    assert (dtypes["faster"], dtypes["slower"]) == ({{"int8": "int8", "fp16": "float16"}[compute]}, {"float32"})
    assert given["slower"][0] is given["slower, too"][0]
    assert len([line for line in said if line.startswith(f"slower: a step with compute = {compute} would take")]) == 1
    assert not [line for line in said if line.startswith("slower, too:")]


def test_each_graph_is_priced_once_for_devices_of_all_image_counts(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget, too: there each graph that is looked at is priced, but not again for the next device."""
    priced: list[str] = []

    def counted(content: bytes) -> GraphCost:
        priced.append(digest_of(content))
        return graph_cost(content)

    monkeypatch.setattr(planner, "graph_cost", counted)
    made = staged({"epochs": 2}, budget={"flops_budget": "1PFLOP"})
    for images in range(1, 40, 3):
        target = target_of("a")._replace(images=images)
        check_expected(made, *made.choose_variant("a", 1, target), target)
    assert sorted(priced) == sorted(spec.digest for spec in made.first.program.graphs.values())
    for images in (8, 16, 24):
        _, asked = made.choose_variant("a", 1, target_of("a")._replace(images=images))
        limited = target_of("a", flops_per_round=asked.flops // 2)._replace(images=images)
        assert made.choose_variant("a", 1, limited)[1].changes == {"epochs": 1}
    assert len(priced) == len(set(priced))


def test_what_fits_nobody_is_refused(staged: Any) -> None:
    with pytest.raises(OverBudget, check=has_code("FV1508")):
        staged().choose_variant("a", 1, target_of("a", upload_bytes=10))


def test_another_round_or_budget_is_another_choice(staged: Any) -> None:
    """The last of five rounds trains for 7 epochs; then corrections change what is expected."""
    made, target = staged(rounds=5), target_of("a")
    first, last = made.choose_variant("a", 1, target)[1], made.choose_variant("a", 5, target)[1]
    assert last.flops == 7 * first.flops
    corrected = made.choose_variant("a", 1, target._replace(corrections=(("time", 2.0),)))[1]
    assert corrected.prediction.train_s == pytest.approx(2 * first.prediction.train_s)


def test_the_server_holds_what_smaller_forms_need(configure: Configure, blobs: BlobStore, graph_cache: Path) -> None:
    """Two local blocks; a device whose budget lets it train one gets the other from the server, if budgets are known
    to matter when the run begins."""
    config = configure("eftvit", {"local_blocks": 2})
    plain = make_plan(config, CLASSES, blobs, cache=graph_cache)
    ready = make_plan(config, CLASSES, blobs, cache=graph_cache, budgets=True)
    fewer = replace(plain.method, local_blocks=1)  # type: ignore[call-arg]
    assert list(plain.groups) == ["head", "norm", "block.2"]
    assert set(ready.groups) == {"head", "norm", "block.1", "block.2"}
    assert (plain.serves(plain.method), plain.serves(fewer)) == (True, False)
    assert (ready.serves(ready.method), ready.serves(fewer)) == (True, True)
    assert ready.first.digest == plain.first.digest


def test_a_choice_by_budget_holds_for_all_blocks_that_are_drawn(
    configure: Configure, blobs: BlobStore, graph_cache: Path
) -> None:
    """FedRA: one choice, other Programs of the same graphs, and their cost is what was expected."""
    config = configure("fedra", {"layers": 3, "rank": 2}, model_options={**SMALLEST, "depth": 3}, rounds=9)
    made = make_plan(config, CLASSES, blobs, cache=graph_cache, budgets=True)
    whole = made.choose_variant("a", 1, target_of("a"))[1]
    assert whole is not None
    target = target_of("a", flops_per_round=whole.flops * 2 // 3)
    drawn: dict[int, Variant] = {}
    for number in range(1, 10):
        drawn[number], expected = made.choose_variant("a", number, target)
        assert check_expected(made, drawn[number], expected, target).changes == {"layers": 1}
    assert len(made.choices) == 2
    assert len({variant.digest for variant in drawn.values()}) >= 3
    assert len({variant.program.graphs["train"] for variant in drawn.values()}) == 1
    again = make_plan(config, CLASSES, blobs, cache=graph_cache, budgets=True)
    assert again.choose_variant("a", 7, target)[0].digest == drawn[7].digest


def test_a_device_gets_additions_of_a_rank_that_it_can_send(
    configure: Configure, blobs: BlobStore, graph_cache: Path
) -> None:
    """FlexLoRA: the server holds the factors of every rank from the beginning."""
    config = configure("flexlora", {"rank": 4}, model_options=SMALLEST)
    made = make_plan(config, CLASSES, blobs, cache=graph_cache, budgets=True)
    assert set(made.groups) == {"head", "rank4", "rank2", "rank1"}
    whole = made.choose_variant("a", 1, target_of("a"))[1]
    assert whole is not None
    target = target_of("a", upload_bytes=whole.bytes_up - 1)
    variant, expected = made.choose_variant("a", 1, target)
    assert check_expected(made, variant, expected, target).changes == {"own_rank": 2}
    assert variant.program.common_groups() == ["head", "rank2"]


# --- beginning with what another run ended with -------------------------------------------------------


def ended(made: Plan, memory: Tensors | None = None) -> ServerState:
    """What the rounds of a run made of its state."""
    return ServerState({name: value + 1 for name, value in made.state.tensors.items()}, memory or {}, {"a": "blake3:a"})


def test_a_run_takes_what_an_earlier_one_ended_with(staged: Any) -> None:
    """By name: tensors, wherever they belong now, and what the server's rule remembers. Uploads were another run's."""
    memory: Tensors = {"optimizer/exp_avg/head.bias": np.ones(3, np.float32)}
    earlier = staged()
    made = staged({"head": "local"}, start=ended(earlier, memory))
    assert made.state.tensors.keys() == earlier.state.tensors.keys() - {"head.weight", "head.bias"}
    for name, value in earlier.state.tensors.items():
        assert made.values[name].tobytes() == (value + 1).tobytes(), name
    for name, value in made.state.tensors.items():
        assert value.tobytes() == made.values[name].tobytes()
    assert (made.state.memory, made.state.uploads) == (memory, {})
    own = unpack(made.blobs.get(str(made.first.program.groups["own"].initial)))
    assert own["head.bias"].tobytes() == (earlier.state.tensors["head.bias"] + 1).tobytes()


def test_what_the_earlier_run_did_not_have_begins_as_usual(staged: Any) -> None:
    plain = staged()
    made = staged(start=ServerState({"head.bias": np.full(3, 5, np.float32), "twin.bias": np.ones(3, np.float32)}))
    assert made.values.keys() == plain.values.keys()
    assert made.values["head.bias"].tolist() == [5, 5, 5]
    assert made.values["head.weight"].tobytes() == plain.values["head.weight"].tobytes()


def test_what_a_rule_remembers_is_taken_by_name_too(staged: Any) -> None:
    """What the earlier run's rule did not know begins as in any run."""
    first = staged({"remembers": True}).state.memory
    assert [first[name].tolist() for name in ("one", "two")] == [[1, 1], [2, 2]]
    start = ServerState({}, {"one": np.full(2, 7, np.float32)})
    memory = staged({"remembers": True}, start=start).state.memory
    assert {name: value.tolist() for name, value in memory.items()} == {"one": [7, 7], "two": [2, 2]}


def test_a_tensor_of_another_shape_is_named(staged: Any) -> None:
    """Another number of classes, say."""
    start = ServerState({"head.bias": np.zeros(10, np.float32)})
    with pytest.raises(ConfigError) as refused:
        staged(start=start)
    assert str(refused.value) == ("start_from: tensor 'head.bias' has shape (10,) there, this run's has (3,)")


# --- how accuracy is measured -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "evaluation", "protocol", "kept", "of_this_round"),
    [
        ({}, "newest", "newest", (), False),
        ({"tunes": True}, "newest", "adapted", (), False),
        ({"keeps": True}, "newest", "kept", ("model",), False),
        ({}, "pre_aggregation", "pre_aggregation", ("model",), True),
        ({"head": "elsewhere"}, "pre_aggregation", "pre_aggregation", ("head", "model"), True),
        ({"head": "local"}, "pre_aggregation", "pre_aggregation", ("model",), True),
    ],
)
def test_the_protocol_is_named(
    staged: Any, options: dict[str, Any], evaluation: str, protocol: str, kept: tuple[str, ...], of_this_round: bool
) -> None:
    """Before averaging: what a device sends back is tested as it has it. What is local is its own in any case."""
    made = staged(options, evaluation=evaluation)
    assert made.protocol == PROTOCOLS[protocol]
    evaluate = made.first.program.evaluate
    assert (evaluate.kept, evaluate.kept_of_this_round) == (kept, of_this_round)
    assert bool(evaluate.adapt) == bool(options.get("tunes"))


def test_every_protocol_reads_differently() -> None:
    assert len(set(PROTOCOLS.values())) == len(PROTOCOLS) == 4


@pytest.mark.parametrize(
    ("model", "options", "batch", "wanted"),
    [
        ("vit_tiny_patch16_224", {}, {"batch_size": 16}, 8),  # 40 MB a sample
        ("vit_base_patch16_224", {}, {"batch_size": 16}, 2),  # 161 MB a sample
        ("vit_base_patch16_224", {}, {"batch_size": 16, "mask_ratio": 0.75}, 8),  # a quarter of the tokens
        ("vit_base_patch16_224", {}, {"batch_size": 7}, 2),  # a prime: the last run is padded
        (SMALL, {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2}, {"batch_size": 24}, 24),
    ],
)
def test_a_device_works_on_as_many_images_as_have_room(
    model: str, options: dict[str, Any], batch: dict[str, Any], wanted: int
) -> None:
    """Equal parts of the batch where there are such; a model that is small for any board takes the batch as a whole."""
    with torch.device("meta"):
        vit = build_vit(model, 5, seed=0, options=options)
    whole = Batch(image_size=vit.image_size, patch_size=vit.patch_size, mean=(0.5,) * 3, std=(0.5,) * 3, **batch)
    assert suitable_run_size(vit, whole) == wanted
