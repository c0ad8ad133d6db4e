"""Plans a run: Programs of devices, their graphs, and initial values."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from coordinator.compute.planning.batch import choose_batch
from coordinator.compute.planning.configuration_search import ConfigurationSearch, cost_on, make_expected
from coordinator.compute.planning.eager_flops import count_flops
from coordinator.compute.planning.planned_device import PlannedDevice
from coordinator.compute.planning.trade_offs import trade_offs
from coordinator.config import PrivacyConfig, RunConfig
from export.graphs import Exported, default_cache, export_graphs, export_unverified
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import BadPayload, ConfigError
from fedvit.label_forms import ACCURACY
from fedvit.methods import build_model, make_method, set_task
from fedvit.methods.base import Method, ServerRule, ServerState
from fedvit.methods.novel import phases_of, server_rule_of
from fedvit.methods.packed import as_sent
from fedvit.models.vit import PatchViT
from fedvit.precision import Compute, Precision
from fedvit.program import (
    Batch,
    Evaluate,
    GraphSpec,
    Program,
    Role,
    TensorGroup,
    TensorSpec,
    Train,
    decode_program,
    encode_program,
)
from fedvit.program_versions import (
    ASSIGNED_VERSION,
    LABELLED_VERSION,
    PRIVATE_VERSION,
    PROGRAM_VERSION,
    SECURE_VERSION,
    SEEDED_VERSION,
    TEXT_VERSION,
)
from fedvit.quantities import format_seconds
from fedvit.resources import Budget
from fedvit.tensors import Tensors, pack, unpack
from fedvit.updates import NONE
from profiles.cost import GraphCost, graph_cost
from profiles.kept_features import price_cuts
from profiles.prediction import Expected
from profiles.program_cost import PricedProgram

PROTOCOLS = {
    "newest": "newest tensors from the server + own local tensors, each device's own test images",
    "adapted": "newest tensors from the server + own local tensors, tuned on own training images and then restored, "
    "each device's own test images",
    "kept": "tensors as each device itself last trained them, each device's own test images",
    "pre_aggregation": "on devices of the round's cohort their own tensors before averaging, else the newest from the "
    "server; each device's own test images",
}
"""Measures of accuracy, named in every output, because papers differ."""


_NO_DIGEST = "blake3:" + "0" * 64
"""A placeholder for blobs that are only priced; as long as a digest, so that the Program has its final size."""


class Variant(NamedTuple):
    """A Program in the blob store, and its method."""

    digest: str
    priced: PricedProgram
    method: Method

    @property
    def program(self) -> Program:
        return self.priced.program


@dataclass(frozen=True)
class Plan:
    """The common part of all devices and rounds; `variant` makes the Program of one device.

    Raises ConfigError when the configuration's variants do not fit together.
    """

    config: RunConfig
    classes: tuple[str, ...]
    blobs: BlobStore
    vit: PatchViT
    method: Method
    rule: ServerRule
    values: Tensors  # the first value of every tensor that any variant has
    state: ServerState
    groups: dict[str, list[str]]  # groups that are the same for all devices -> their tensors
    cache: Path | None
    progress: Callable[[str], None]
    variants: dict[Method, Variant] = field(default_factory=dict)
    # by method and target without its name
    choices: dict[tuple[Method, bytes], tuple[Variant, Expected]] = field(default_factory=dict)
    costs: dict[str, GraphCost] = field(default_factory=dict)  # by the graph's digest
    flops: dict[Method, dict[str, int]] = field(default_factory=dict)  # of traced methods, by graph
    packed: dict[tuple[str, Precision, Compute], str] = field(default_factory=dict)  # (digest, how it is packed)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def first(self) -> Variant:
        """The variant in round 1 of a device that matches no pattern."""
        return self.variant("", 1)

    @property
    def protocol(self) -> str:
        form = self.vit.label_form
        answer = f"{ACCURACY[form.task]}; " if form else ""
        evaluate = _plan_evaluation(self.method_for("", 1), self.vit, self.config)
        if self.config.evaluation == "pre_aggregation":
            return answer + PROTOCOLS["pre_aggregation"]
        kept, own = [self.method.groups(self.vit)[group] for group in evaluate.kept], self.vit.tensors().keys()
        keeps = any(role is Role.GENERATED or not own.isdisjoint(names) for role, names in kept)
        return answer + PROTOCOLS["adapted" if evaluate.adapt else "kept" if keeps else "newest"]

    def method_for(self, device: str, round_number: int) -> Method:
        return find_method(self.config, device, round_number).for_device(self.vit, device, round_number)

    def variant(self, device: str, round_number: int) -> Variant:
        """The Program for a device in a round that counts from 1; made at the first request, which takes a while."""
        with self.lock:
            return self._variant(self.method_for(device, round_number))

    def _variant(self, method: Method) -> Variant:
        if method not in self.variants:
            self.variants[method] = self._make(method)
        return self.variants[method]

    def choose_variant(
        self, device: str, round_number: int, target: PlannedDevice | None
    ) -> tuple[Variant, Expected | None]:
        """Choose the variant of a device in a round, within its budget; return it with its expected cost.

        It is made at the first request. Without a profile there is no expectation. Raises OverBudget if nothing fits.
        """
        if target is None:
            return self.variant(device, round_number), None
        method = find_method(self.config, device, round_number)
        with self.lock:
            # the choice holds for all devices with the same profile
            key = (method, msgspec.json.encode(target._replace(device="")))
            if key not in self.choices:
                self.choices[key] = self._choose(method, target)
            chosen, expected = self.choices[key]
            variant = self._variant(chosen.method.for_device(self.vit, device, round_number))
            prediction = msgspec.structs.replace(expected.prediction, device=device)
            return variant, msgspec.structs.replace(expected, prediction=prediction)

    def _choose(self, method: Method, target: PlannedDevice) -> tuple[Variant, Expected]:
        method, changed = self._with_faster_products(method, target)
        if target.budget == Budget():
            variant = self._variant(method)
            cost = cost_on(target, variant.priced)
            candidate = self.search.candidate(cost, {}, 1.0, target)
        else:
            method, choice = self.search.find(method, target)
            variant, candidate, cost = self._variant(method), choice.chosen, choice.cost
        expected = make_expected(candidate, cost, target.budget)
        return variant, msgspec.structs.replace(expected, changes=changed | candidate.changes)

    def _with_faster_products(self, method: Method, target: PlannedDevice) -> tuple[Method, dict[str, str]]:
        """The method, with products of floats where the device's own speed says that those of `compute` are slower;
        and what that changed.
        """
        if method.compute == "fp32" or target.speed is None:
            return method, {}
        floats = replace(method, compute="fp32")
        rounded_s, floats_s = (
            self.search.candidate(cost_on(target, self.search.program_of(one)), {}, 1.0, target).prediction.step_s or 0
            for one in (method, floats)
        )
        if rounded_s <= floats_s:
            return method, {}
        self.progress(
            f"{target.device}: a step with compute = {method.compute} would take {format_seconds(rounded_s)}, with "
            f"floats {format_seconds(floats_s)}: it gets compute = fp32"
        )
        return floats, {"compute": "fp32"}

    @cached_property
    def search(self) -> ConfigurationSearch:
        return ConfigurationSearch(self.vit, self.batch_of, self.phases_of, self.priced, self.progress, self.serves)

    def serves(self, method: Method) -> bool:
        """Return whether the server holds every group that a device of this method would get from it."""
        return all(
            self.groups.get(group) == names
            for group, (role, names) in method.groups(self.vit).items()
            if names and role.from_server_each_round and not role.is_made_for_device
        )

    def export(self, method: Method) -> dict[str, Exported]:
        """Return the verified graphs of a method, by name."""
        return export_graphs(method, self.vit, self.batch_of(method), cache=self.cache, progress=self.progress)

    def _make(self, method: Method) -> Variant:
        batch = self.batch_of(method)
        contents = {name: graph.content for name, graph in self.export(method).items()}
        graphs = {
            name: GraphSpec(self.blobs.put(content).digest, self._cost_of_graph(content).flops)
            for name, content in contents.items()
        }
        program = self._program(method, batch, graphs, lambda members: self.blobs.put(pack(members)).digest)
        raw = encode_program(program)
        try:
            decode_program(raw)
        except BadPayload as error:
            raise ConfigError("FV1116", f"devices would refuse the Program of the method's options: {error}") from error
        priced = _price(method, program, contents, self._cost_of_graph)
        return Variant(self.blobs.put(raw).digest, priced, method)

    def _cost_of_graph(self, content: bytes) -> GraphCost:
        digest = digest_of(content)
        if digest not in self.costs:
            self.costs[digest] = graph_cost(content)
        return self.costs[digest]

    def priced(self, method: Method) -> PricedProgram:
        """The Program of a method without its blobs, and its graphs' cost; takes seconds if they are not cached."""
        batch = self.batch_of(method)
        contents = export_unverified(method, self.vit, batch, cache=self.cache or default_cache())
        graphs = {name: GraphSpec(_NO_DIGEST, self._cost_of_graph(content).flops) for name, content in contents.items()}
        program = self._program(method, batch, graphs, lambda members: _NO_DIGEST)
        return _price(method, program, contents, self._cost_of_graph)

    def describe(self, method: Method) -> Program:
        """Return the Program of a method without blobs, for engines that need no graph; nothing is exported."""
        batch, alike = self.batch_of(method), method.as_traced()
        if alike not in self.flops:
            self.flops[alike] = count_flops(alike, self.vit, batch)
        graphs = {name: GraphSpec(_NO_DIGEST, count) for name, count in self.flops[alike].items()}
        return self._program(method, batch, graphs, lambda members: _NO_DIGEST)

    def batch_of(self, method: Method) -> Batch:
        """Return how a device turns images into a method's inputs."""
        return choose_batch(method, self.vit, self.config.images)

    def phases_of(self, method: Method) -> tuple[Train, ...]:
        """Return the training phases of a method, with the codec and the noise of this run's features."""
        codec, privacy = self.config.updates.features, self.config.privacy
        return tuple(_private(_with_codec(phase, codec), privacy) for phase in phases_of(method, self.vit))

    def _program(
        self, method: Method, batch: Batch, graphs: dict[str, GraphSpec], keep: Callable[[Tensors], str]
    ) -> Program:
        """`keep` stores a group's first values and gives their digest."""
        groups: dict[str, TensorGroup] = {}
        tensors: dict[str, TensorSpec] = {}
        for group, (role, names) in method.groups(self.vit).items():
            if not names:
                continue
            members = as_sent(method, self.vit, {name: self.values[name] for name in names})
            groups[group] = self._code_group(group, role, members, keep)
            tensors |= {name: TensorSpec(value.shape, str(value.dtype), group) for name, value in members.items()}
        privacy = self.config.privacy
        needed = {
            PRIVATE_VERSION: privacy.noise_multiplier or privacy.feature_noise,
            TEXT_VERSION: batch.text,
            SEEDED_VERSION: batch.sample_seeds,
            SECURE_VERSION: self.config.secure,
            LABELLED_VERSION: batch.labels,
            ASSIGNED_VERSION: any(group.role is Role.ASSIGNED for group in groups.values()),
        }
        return Program(
            v=max([PROGRAM_VERSION, *(version for version, is_needed in needed.items() if is_needed)]),
            method=self.config.method,
            model=self.config.model,
            classes=self.classes,
            groups=groups,
            tensors={name: tensors[name] for name in as_sent(method, self.vit, self.values) if name in tensors},
            graphs=graphs,
            train=self.phases_of(method),
            evaluate=_plan_evaluation(method, self.vit, self.config),
            batch=batch,
            clip_delta=privacy.clip if privacy.noise_multiplier and not self.config.secure else None,
            secure=self.config.secure,
        )

    def _code_group(self, group: str, role: Role, members: Tensors, keep: Callable[[Tensors], str]) -> TensorGroup:
        """The group with its codecs: packed tensors (`frozen_precision`, `compute`) are not coded again."""
        updates = self.config.updates
        if not role.from_server_each_round:
            return TensorGroup(role, keep(members))
        floats = all(value.dtype == np.float32 for value in members.values())
        return TensorGroup(
            role,
            up=updates.up_of(group) if role.is_sent_back else NONE,
            # what is made for one device is new in every round: there is no earlier value for a delta
            down=updates.down if floats and not role.is_made_for_device else NONE,
            whole=updates.down_whole if floats else NONE,
        )

    def find_sent_blob(self, variant: Variant, group: str, digest: str) -> str:
        """Find the blob that a device of this variant is sent for the blob `digest` of a common group."""
        method = variant.method
        if method.sent_precision == "fp32" or variant.program.groups[group].role.is_trained_on_device:
            return digest
        with self.lock:
            key = (digest, method.sent_precision, method.compute)
            if key not in self.packed or not self.blobs.has(self.packed[key]):  # blobs that no round needed are pruned
                for gone in [known for known, made in self.packed.items() if not self.blobs.has(made)]:
                    del self.packed[gone]
                self.packed[key] = self.blobs.put(
                    pack(as_sent(method, self.vit, unpack(self.blobs.get(digest))))
                ).digest
            return self.packed[key]


def _price(
    method: Method, program: Program, contents: Mapping[str, bytes], price: Callable[[bytes], GraphCost]
) -> PricedProgram:
    costs = {name: price(content) for name, content in contents.items()}
    return PricedProgram(program, msgspec.to_builtins(method), costs, price_cuts(program, contents, price))


def _plan_evaluation(method: Method, vit: PatchViT, config: RunConfig) -> Evaluate:
    evaluate = method.evaluate(vit)
    if config.auc:
        evaluate = msgspec.structs.replace(evaluate, counts_scores=True)
    if config.evaluation == "newest":
        return evaluate
    sent_back = [group for group, (role, names) in method.groups(vit).items() if role.is_sent_back and names]
    return msgspec.structs.replace(evaluate, kept=tuple(sent_back), kept_of_this_round=True)


def make_plan(
    config: RunConfig,
    classes: tuple[str, ...],
    blobs: BlobStore,
    *,
    start: ServerState | None = None,
    budgets: bool = False,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Build the model and the parts of Programs; blobs that devices fetch are stored in `blobs`.

    `start` is the state that an earlier run ended with; with `budgets`, tensors for smaller configurations are
    included. The same arguments always give the same Program, byte for byte.
    """
    progress(f"building {config.model}")
    base = make_method(config.method, config.options)
    vit = build_model(
        base,
        config.model,
        len(classes),
        seed=config.seed,
        options=config.model_options,
        pretrained=config.pretrained,
    )
    set_task(base, vit, config.label_form)
    if start is not None:
        _begin_at(vit, start)  # also twins of the model begin there
    values, groups = _collect_tensors(config, vit, _list_methods(config, vit, budgets=budgets))
    if start is not None:
        values = _start(values, start)
    rule = server_rule_of(base, vit)
    common = {name for names in groups.values() for name in names}
    tensors = {name: value for name, value in values.items() if name in common}
    memory = rule.begin(config.seed) | dict(start.memory if start is not None else {})
    return Plan(
        config=config,
        classes=classes,
        blobs=blobs,
        vit=vit,
        method=base,
        rule=rule,
        values=values,
        state=ServerState(tensors, memory),
        groups=groups,
        cache=cache,
        progress=progress,
    )


def _list_methods(config: RunConfig, vit: PatchViT, *, budgets: bool) -> list[Method]:
    """Return the method of every kind of device, with `budgets` also those of smaller configurations."""
    methods = [find_method(config, pattern, 1) for pattern in ("", *config.variants)]
    if not budgets and config.budget.limits() == Budget():
        return methods
    return methods + [
        replace(method, **{trade_off.option: value})
        for method in methods
        for trade_off in trade_offs(method, vit)
        for value, _ in trade_off.values
    ]


def _collect_tensors(config: RunConfig, vit: PatchViT, methods: list[Method]) -> tuple[Tensors, dict[str, list[str]]]:
    """Return the values of all tensors, and the names of those in each group that the server sends.

    Raises ConfigError if methods disagree on a group.
    """
    values: Tensors = {}
    groups: dict[str, list[str]] = {}
    for method in methods:
        values |= {name: np.ascontiguousarray(value.numpy()) for name, value in method.tensors(vit).items()}
        for group, (role, names) in method.groups(vit).items():
            if not names or not role.from_server_each_round or role.is_made_for_device:
                continue
            if groups.setdefault(group, names) != names:
                raise ConfigError(
                    "FV1116", f"variants of method {config.method!r} disagree on what is in group {group!r}"
                )
    return values, groups


def _with_codec(phase: Train, codec: str) -> Train:
    """Return a phase whose collected features are sent with a codec."""
    if phase.collect is None or codec == NONE:
        return phase
    return msgspec.structs.replace(phase, collect=msgspec.structs.replace(phase.collect, codec=codec))


def _private(phase: Train, privacy: PrivacyConfig) -> Train:
    if not (privacy.feature_noise and phase.collect):
        return phase
    collect = msgspec.structs.replace(
        phase.collect, clip=privacy.feature_clip, noise=privacy.feature_noise, rehearsal=privacy.deterministic_noise
    )
    return msgspec.structs.replace(phase, collect=collect)


def find_method(config: RunConfig, device: str, round_number: int) -> Method:
    """Return a device's method in a round, without what is drawn for this device alone: costs are the same."""
    options = dict(config.options)
    for pattern, others in config.variants.items():
        if fnmatchcase(device, pattern) or device == pattern:
            options |= others
    return make_method(config.method, options).in_round(round_number, config.rounds)


def _begin_at(vit: PatchViT, start: ServerState) -> None:
    with torch.no_grad():
        for name, value in vit.vit.named_parameters():
            if name in start.tensors and start.tensors[name].shape == value.shape:
                value.copy_(torch.from_numpy(start.tensors[name]))


def check_start_fits(shapes: Mapping[str, tuple[int, ...]], start: ServerState) -> None:
    """Raise ConfigError where tensors of these shapes cannot begin with those of an earlier run's end."""
    common = [name for name in start.tensors if name in shapes]
    if start.tensors and not common:
        raise ConfigError("FV1115", "start_from: that run and this one have no tensor in common")
    for name in common:
        if (there := start.tensors[name].shape) != shapes[name]:
            raise ConfigError(
                "FV1115", f"start_from: tensor {name!r} has shape {there} there, this run's has {shapes[name]}"
            )


def _start(values: Tensors, start: ServerState) -> Tensors:
    """The values with those of an earlier run's end. Raises ConfigError where they do not fit."""
    check_start_fits({name: value.shape for name, value in values.items()}, start)
    return values | {name: value for name, value in start.tensors.items() if name in values}
