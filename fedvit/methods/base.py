"""The base of federated methods: groups with roles, an objective, the device's phases, and the server's rule.

One file in this folder is one method, both halves in it; the table `METHODS` lists them. Hyperparameters
are fields of a frozen dataclass. State between rounds is in the `ServerState` that its rule
returns, never in the method.
"""

import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fedvit.data.server_images import ServerImages
from fedvit.errors import ConfigError
from fedvit.known_values import check_blocks
from fedvit.methods.aggregators import Aggregator, Mean
from fedvit.methods.calculus import Calculus, Named, Objective
from fedvit.methods.hyperparameters import Hyperparameters
from fedvit.methods.losses import cross_entropy as cross_entropy
from fedvit.methods.losses import sample_losses
from fedvit.models.dropout import Dropout
from fedvit.models.extra_head import ExtraHead
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import ModelPart, PatchViT
from fedvit.program import Evaluate, Role, Train
from fedvit.roles import Novel, ProductPrecision
from fedvit.tensors import Array, Tensors

PREDICT = "predict"
"""The graph that answers; every method has one."""
PART_NAMES: Mapping[ModelPart, str] = {
    "attention": "self-attention",
    "mlp": "MLPs",
    "norms": "norms",
    "positions": "positions",
    "patches": "patches",
    "blocks": "the blocks of a Transformer",
}
"""Error texts for model features that a method may need."""
UPDATE = "update"
"""The graph of the optimizer, if a phase sums gradients before it updates."""


class GroupRule(NamedTuple):
    """A group of tensors by name: shell patterns over whole names (`blocks.1.*` is not `blocks.11.*`)."""

    group: str
    role: Role
    patterns: tuple[str, ...]


class Images(NamedTuple):
    """A batch as a model reads it; `kept` None means all patches in order. A model of text reads characters instead."""

    patches: Tensor
    kept: Tensor | None
    seeds: Tensor | None = None  # (B,) whole numbers from which dropout follows; None: nothing is dropped

    def rows(self, rows: slice) -> "Images":
        kept, seeds = (None if value is None else value[rows] for value in (self.kept, self.seeds))
        return Images(self.patches[rows], kept, seeds)


class StepInputs(NamedTuple):
    """The inputs of a training step beside the tensors. Letters: B samples of the batch, C classes."""

    images: Images
    labels: Tensor  # (B,) int64; of text (B, positions); of other tasks see fedvit.label_forms
    weight: Tensor  # (B,) 1 for a sample, 0 for padding
    anchors: Named  # values at the start of the round
    facts: Named  # "class_counts": (C,) training images of each class on this device
    draws: Named  # whole numbers drawn on the device
    lr: Tensor | None  # (): in a whole step
    last: Tensor | None  # (): 1 in the last repeat of a batch, where a phase repeats

    def mean(self, per_sample: Tensor) -> Tensor:
        """Over the batch's samples without padding; 0 where there is only padding."""
        return (per_sample * self.weight).sum() / self.weight.sum().clamp(min=1)

    def rows(self, rows: slice) -> Self:
        """A part of the batch."""
        return self._replace(images=self.images.rows(rows), labels=self.labels[rows], weight=self.weight[rows])


class Forward(NamedTuple):
    logits: Tensor  # (B, classes)
    collected: dict[str, Tensor]  # per-sample values that a phase may record


class StepResult(NamedTuple):
    """Results of one step on a device; the optimizer's state belongs to the calculus."""

    loss: Tensor
    updated: dict[str, Tensor]  # new value of every tensor that the phase moves
    collected: dict[str, Tensor]


class Gathered(NamedTuple):
    """Features that an evaluation gathered from the device's training images. S is its capacity."""

    values: Named  # (S, ...)
    labels: Tensor  # (S,) int64
    weight: Tensor  # (S,) 0 where empty


class Upload(NamedTuple):
    """One accepted result, as a server rule sees it; `load` maps the tensors, read-only, when asked."""

    device: str
    samples: int
    digest: str
    load: Callable[[], Mapping[str, Array]]
    discount: float = 1.0  # factor for an update of an older state; the device's weight does not change
    steps: int | None = None  # of the optimizer, as the device counted them; None: nobody did
    lr: float | None = None  # of the device's variant, without the schedule's factor; None: that of the method

    def count_steps(self, epochs: int, batch_size: int) -> int:
        """Return the steps behind the update: those that were counted, else those that its samples take."""
        return self.steps or epochs * -(-self.samples // batch_size)


@dataclass(frozen=True)
class ServerState:
    """The state of a server between rounds; the store saves all of it."""

    tensors: Tensors  # the values of every group that is the same for all devices
    memory: Mapping[str, Array] = field(default_factory=dict)  # the rule's own state: optimizer, generators
    # device -> digest of an upload kept for later rounds; those of the oldest round come first
    uploads: dict[str, str] = field(default_factory=dict)

    @cached_property
    def memory_names(self) -> Mapping[str, list[str]]:
        """The names in `memory` by all before their last "/", sorted: a generator asks for one device's after another,
        and must not search those of all devices each time."""
        names: dict[str, list[str]] = {}
        for name in sorted(self.memory):
            names.setdefault(name.rpartition("/")[0], []).append(name)
        return names


class RoundContext(NamedTuple):
    """The inputs of a server rule beside state and uploads."""

    round: int
    seed: int
    lr_scale: float
    vit: PatchViT
    accelerator: str  # torch device: "cpu", "cuda", ...
    load: Callable[[str], Mapping[str, Array]]  # tensors of a kept upload by digest
    progress: Callable[[str], None]  # shows one line to the operator; called often
    aggregator: Aggregator = Mean()  # how shared tensors' deltas become one
    precision: ProductPrecision = "fp32"  # of products in training
    rank: int = 0  # of this process among those that close the round together, each with an accelerator of its own
    world_size: int = 1  # how many they are
    images: ServerImages | None = None  # of the run's `server_data`


class ServerRule(ABC):
    """The server's computation of its next state from one round's uploads."""

    @property
    def why_never_late(self) -> str | None:
        """Reason why the rule cannot use an upload for an older state; None if it can."""
        return "its server needs updates of its newest tensors"

    @property
    def discounts(self) -> bool:
        """Return whether the rule uses an upload's `discount`."""
        return False

    @property
    def why_no_regions(self) -> str | None:
        """Reason why a region may not send the weighted mean of its devices' updates; None if it may."""
        return "its server needs the update of each single device"

    why_not_measured: ClassVar[str | None] = None
    """Reason why the length of an upload says nothing, so that `clip_norm` and `reject_scale` are refused."""

    @property
    def averages(self) -> bool:
        """Return whether the run's aggregator is all that combines updates; else noise and robust rules are refused."""
        return True

    @property
    def is_divided(self) -> bool:
        """Return whether several processes share the work (`RoundContext.world_size`); each computes the same state."""
        return False

    @property
    def needs_images(self) -> bool:
        """Return whether the rule trains on images of the server (`RoundContext.images`)."""
        return False

    def begin(self, seed: int) -> Tensors:
        """The rule's own state before the first round."""
        return {}

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        """The values of the generated groups for one device: for the next round, or an evaluation."""
        return {}

    def generate_for(
        self, state: ServerState, devices: Sequence[str], seed: int, place: torch.device
    ) -> dict[str, Tensor]:
        """Generate, like `generate`, for D devices at once: (D, ...) on `place`."""
        made = [self.generate(state, device, seed) for device in devices]
        return {name: torch.from_numpy(np.stack([one[name] for one in made])).to(place) for name in made[0]}

    def for_novel(self, learns: Novel) -> "ServerRule | None":
        """The rule that is left when what devices share stands still; None if there is nothing left to learn."""
        return None

    @abstractmethod
    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Next state, and figures for the report.

        Uploads come sorted by device and are loaded one at a time, so that memory does not grow with
        the cohort and the order of arrival cannot change a bit of the result.
        """


@dataclass(frozen=True, kw_only=True)
class Method(Hyperparameters, ABC):
    """Base of all methods: the plain client loop."""

    source: ClassVar[str]
    """The paper, and where the implementation differs from it."""
    one_gradient: ClassVar[bool] = True
    """True if a step is one gradient and one update: a batch can then be processed in parts."""
    is_probe: ClassVar[bool] = False
    """True if it reads a frozen backbone by `embed`, `run_to_class` and `features` alone: a simulation keeps these."""
    why_no_patches: ClassVar[str | None] = None
    """Reason why patches of an image cannot have classes of their own; None if they can."""

    def needs(self) -> frozenset[ModelPart]:
        """The parts of a model without which the method would be another one; not every model has them."""
        needed: set[ModelPart] = {"patches"} if self.mask else set()
        if any(not isinstance(patch, ExtraHead) for patch in list_patches(self)):
            needed.add("blocks")
        return frozenset(needed)

    @property
    def reads_text(self) -> bool:
        """Return whether the method can train a model of text: it runs the model without changes."""
        return type(self).forward is Method.forward and not list_patches(self) and not self.mask

    def in_round(self, round_number: int, rounds: int) -> "Method":
        """The method in a round, which counts from 1; for methods whose roles change during the run.

        Groups that come from the server hold the same tensors in every round.
        """
        return self

    def for_device(self, vit: PatchViT, device: str, round_number: int) -> "Method":
        """The method of one device in a round, for methods that draw what a device trains.

        It has the same graphs, and the same tensors in every group; roles may differ, and the ranges of draws. A draw
        follows from `vit.seed`, device and round, so that a resumed run repeats it. It is one of few: each of them is
        a Program that the coordinator keeps.
        """
        return self

    # --- tensors --------------------------------------------------------------------------------------

    def model_patches(self) -> tuple[ModelPatch, ...]:
        """Additions to the model, in this order."""
        return ()

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        """Tensors beside the model's: twins, scalars."""
        return {}

    def tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        """All tensors of the Program by name, with their first values."""
        return {**vit.tensors(), **self.extra_tensors(vit)}

    @abstractmethod
    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        """Rules that put each tensor into a group; the first that matches a name applies."""

    # --- the device's half, traced into graphs: pure tensor arithmetic only -----------------------------

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        """Logits, and values that may be collected."""

        def body(vit: PatchViT) -> Tensor:
            return vit.classify(vit.run_to_class(vit.embed(*images), 0))

        return Forward(run_model(vit, tensors, body), {})

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        """Return the loss that a step minimises: the mean over samples of what the run's task minimises."""
        logits, collected = self.forward(vit, tensors, inputs.images)
        return Objective(inputs.mean(sample_losses(vit, logits, inputs.labels)), collected)

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        """One step of a phase, which updates the tensors `updated`: by default one gradient and one update."""
        grads, (loss, collected, _) = calculus.gradients(
            lambda at: self.objective(vit, phase, {**fixed, **at}, inputs), updated
        )
        if self.clip_norm is not None:
            grads = clip_grads(grads, self.clip_norm)
        return StepResult(loss, calculus.update(updated, grads), collected)

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        """(B, classes) logits, or other scores whose largest value names the class."""
        return self.forward(vit, tensors, images).logits

    def generic_logits(self, vit: PatchViT, tensors: Named, images: Images) -> Tensor | None:
        """(B, classes) logits of the one model that the server has for everybody, whatever devices answer with.

        None where a part of the model is kept on each device, or made for it.
        """
        own = self.names_with(vit, Role.LOCAL, Role.GENERATED)
        return None if vit.tensors().keys() & set(own) else self.forward(vit, tensors, images).logits

    # --- the device's work ------------------------------------------------------------------------------

    def phase(self, groups: tuple[str, ...], **settings: Any) -> Train:
        """A training phase with the method's own epochs, rate and optimizer, unless `settings` say otherwise."""
        plain = {"graph": "train", "slots": self.optimizer_rule().slots, "epochs": self.epochs, "lr": self.lr}
        if self.one_gradient:
            plain |= {"update": UPDATE, "clip_norm": self.clip_norm, "slot_bits": self.optimizer_bits}
        return Train(groups=groups, **{**plain, **settings})

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        """The round's local work in order: by default one phase, all groups that the device trains."""
        groups = tuple(
            group for group, (role, names) in self.groups(vit).items() if role.is_trained_on_device and names
        )
        return (self.phase(groups),)

    def evaluate(self, vit: PatchViT) -> Evaluate:
        return Evaluate(graph=PREDICT)

    # --- the server's half ----------------------------------------------------------------------------

    @abstractmethod
    def server_rule(self, vit: PatchViT) -> ServerRule: ...

    # --- derived --------------------------------------------------------------------------------------

    def groups(self, vit: PatchViT) -> dict[str, tuple[Role, list[str]]]:
        """The groups: every tensor is in exactly one. Raises ConfigError for a name without a rule."""
        rules = self.rules(vit)
        members: dict[str, tuple[Role, list[str]]] = {}
        for rule in rules:
            stands_still = self.novel and rule.role not in (Role.LOCAL, Role.GENERATED)
            members[rule.group] = Role.FROZEN if stands_still else rule.role, []
        for name in self.tensors(vit):
            for rule in rules:
                if any(fnmatchcase(name, pattern) for pattern in rule.patterns):
                    members[rule.group][1].append(name)
                    break
            else:
                raise ConfigError(
                    "FV1114", f"{type(self).__name__} has no rule for tensor {name!r} of model {vit.name!r}"
                )
        return members

    def names_in(self, vit: PatchViT, *groups: str) -> list[str]:
        """The tensors of some groups, in the model's order."""
        members = self.groups(vit)
        held = {name for group in groups for name in members[group][1]}
        return [name for name in self.tensors(vit) if name in held]

    def names_with(self, vit: PatchViT, *roles: Role) -> list[str]:
        """The tensors of the groups that have one of `roles`, in the model's order."""
        return self.names_in(vit, *(group for group, (role, _) in self.groups(vit).items() if role in roles))


def run_model(vit: PatchViT, tensors: Named, body: Callable[[PatchViT], Any]) -> Any:
    """`body(vit)` with the model's own among `tensors`."""
    return vit.call({name: tensors[name] for name, _ in vit.vit.named_parameters()}, body)


def list_patches(method: Method) -> tuple[ModelPatch, ...]:
    """Additions to the model, with what an option of every method adds."""
    return (*((Dropout(rate=method.dropout),) if method.dropout else ()), *method.model_patches())


def list_trained(method: Method, vit: PatchViT, phase: Train) -> list[str]:
    """The tensors that a phase moves, in the model's order."""
    return method.names_in(vit, *phase.groups)


def list_untrained(method: Method, vit: PatchViT) -> list[str]:
    """The tensors, the same for all, that a device moves neither in training nor when it tunes a copy before a test."""
    tuned = {group for phase in method.evaluate(vit).adapt for group in phase.groups}
    still = (
        group
        for group, (role, _) in method.groups(vit).items()
        if not role.is_trained_on_device and not role.is_made_for_device
    )
    return method.names_in(vit, *(group for group in still if group not in tuned))


def _find_reason_against_patches(method: Method, vit: PatchViT) -> str | None:
    """Return the reason why a method, with these options, cannot train classes of patches; None if it can."""
    if "patches" not in vit.has:
        return f"model {vit.name!r} is {vit.kind}, whose head reads no patches"
    if method.mask:
        return f"mask = {method.mask:g} leaves patches out, each of which has a label"
    return method.why_no_patches


def check_fits(method: Method, vit: PatchViT) -> None:
    """Raises ConfigError for a model that lacks what the method needs, has too few blocks for an option, or reads
    text where the method cannot."""
    missing = method.needs() - vit.has
    name = type(method).__name__
    if vit.reads_text and missing <= {"patches"} and (missing or not method.reads_text):
        raise ConfigError(
            "FV1110",
            f"{name} with these options trains on images, and model {vit.name!r} reads text; "
            "text can be trained with fedavg, fedper, fedtp, local and other methods that leave the model as it is",
        )
    if vit.labels_patches and (why := _find_reason_against_patches(method, vit)):
        raise ConfigError("FV2490", f"{name} cannot train task segmentation: {why}; choose another method or option")
    if vit.label_form and (why := method.why_one_class):
        raise ConfigError(
            "FV2490",
            f"{name} needs one class for each image, and the run's task is {vit.label_form.task}:"
            f" {why}; choose another method, such as fedavg, fedper or eftvit",
        )
    if missing:
        raise ConfigError(
            "FV1111",
            f"{name} with these options needs {PART_NAMES[min(missing)]}, and model {vit.name!r} is {vit.kind},"
            " which has none: choose a Transformer, or a method that needs no special part, such as fedavg, fedper"
            " or local",
        )
    if "blocks" in vit.has:
        options = {option.name: getattr(method, option.name) for option in fields(method)}
        check_blocks(options, typing.get_type_hints(type(method), include_extras=True), vit.name, vit.depth)


def clip_grads(grads: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Scaled down so that all together have at most this Euclidean norm."""
    length = torch.sqrt(torch.stack([grad.square().sum() for grad in grads.values()]).sum())
    scale = norm / length.clamp(min=norm)
    return {name: grad * scale for name, grad in grads.items()}
