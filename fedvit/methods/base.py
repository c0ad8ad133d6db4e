"""What a federated method is: groups with roles, a loss, the device's phases, and the server's rule.

One file in this folder is one method, both halves in it; the table `METHODS` lists them. Hyperparameters
are fields of a frozen dataclass. What a method keeps between rounds is in the `ServerState` that its rule
returns, never in the method.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods.optimizers import AdamW, MomentumSgd, Optimizer, Sgd
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from fedvit.tensors import Tensors


class GroupRule(NamedTuple):
    """A group of tensors by name: shell patterns over whole names (`blocks.1.*` is not `blocks.11.*`)."""

    group: str
    role: Role
    patterns: tuple[str, ...]


class Images(NamedTuple):
    """A batch as a model sees it; `kept` None means all patches in order."""

    patches: Tensor
    kept: Tensor | None


class Forward(NamedTuple):
    logits: Tensor  # (B, classes)
    collected: dict[str, Tensor]  # per-sample values that a phase may record


class Upload(NamedTuple):
    """One accepted result, as a server rule sees it; `load` reads the tensors from disk when asked."""

    device: str
    samples: int
    digest: str
    load: Callable[[], Tensors]


@dataclass(frozen=True)
class ServerState:
    """All that a server keeps between rounds; the store saves it whole."""

    tensors: Tensors  # the values of every group that comes from the server
    memory: Tensors = field(default_factory=dict)  # what the rule remembers, e.g. optimizer state
    uploads: dict[str, str] = field(default_factory=dict)  # device -> digest of an upload kept for later rounds


class RoundContext(NamedTuple):
    """What a server rule may need of its surroundings."""

    round: int
    seed: int
    lr_scale: float
    vit: PatchViT
    accelerator: str  # torch device: "cpu", "cuda", ...
    load: Callable[[str], Tensors]  # tensors of a kept upload by digest
    progress: Callable[[str], None]  # one line for people, often


class ServerRule(ABC):
    """How a server turns one round's uploads into its next state."""

    @abstractmethod
    def close(
        self, state: ServerState, uploads: Iterable[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Next state, and figures for the report.

        Uploads come sorted by device and are loaded one at a time, so that memory does not grow with
        the cohort and the order of arrival cannot change a bit of the result.
        """


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Base of all methods: the plain client loop, and the hyperparameters that every loop has."""

    source: ClassVar[str]
    """The paper, and where the implementation differs from it."""

    epochs: Annotated[int, Meta(ge=1)] = 1  # passes over the device's images per round (papers: E)
    batch_size: Annotated[int, Meta(ge=1)] = 32
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Meta(gt=0)] = 0.01
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # sgd only
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"  # of the learning rate, over the run's rounds
    warmup_rounds: Annotated[int, Meta(ge=0)] = 0

    @property
    def mask_ratio(self) -> float:
        """Share of patches that training drops."""
        return 0.0

    def optimizer_rule(self) -> Optimizer:
        if self.optimizer == "adamw":
            return AdamW(weight_decay=self.weight_decay)
        if self.momentum:
            return MomentumSgd(momentum=self.momentum, weight_decay=self.weight_decay)
        return Sgd(weight_decay=self.weight_decay)

    def lr_scale(self, round_number: int, rounds: int) -> float:
        """The schedule's factor on `lr` in a round that counts from 1: linear warm-up, then the schedule."""
        if round_number <= self.warmup_rounds:
            return round_number / (self.warmup_rounds + 1)
        if self.schedule == "constant":
            return 1.0
        done = (round_number - 1 - self.warmup_rounds) / max(1, rounds - self.warmup_rounds)
        return 0.5 * (1 + math.cos(math.pi * done))

    # --- the device's half ----------------------------------------------------------------------------

    @abstractmethod
    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        """Which group each tensor is in; the first rule that matches a name takes it."""

    @abstractmethod
    def forward(self, vit: PatchViT, tensors: Mapping[str, Tensor], images: Images) -> Forward:
        """Logits, and what may be collected. Traced: pure tensor arithmetic only."""

    def loss(self, task_loss: Tensor, trained: Mapping[str, Tensor], anchors: Mapping[str, Tensor]) -> Tensor:
        """What a step minimises. Traced."""
        return task_loss

    @abstractmethod
    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        """The round's local work in order."""

    # --- the server's half ----------------------------------------------------------------------------

    @abstractmethod
    def server_rule(self) -> ServerRule: ...

    # --- derived --------------------------------------------------------------------------------------

    def groups(self, vit: PatchViT) -> dict[str, tuple[Role, list[str]]]:
        """Every tensor of the model in exactly one group. Raises ConfigError for a name without a rule."""
        rules = self.rules(vit)
        members: dict[str, tuple[Role, list[str]]] = {rule.group: (rule.role, []) for rule in rules}
        for name in vit.tensors():
            for rule in rules:
                if any(fnmatchcase(name, pattern) for pattern in rule.patterns):
                    members[rule.group][1].append(name)
                    break
            else:
                raise ConfigError(f"{type(self).__name__} has no rule for tensor {name!r} of model {vit.name!r}")
        return members

    def names_in(self, vit: PatchViT, group: str) -> list[str]:
        return self.groups(vit)[group][1]


def trained_names(method: Method, vit: PatchViT, phase: Train) -> list[str]:
    """The tensors that a phase moves, in the model's order."""
    moved = {name for group in phase.groups for name in method.names_in(vit, group)}
    return [name for name in vit.tensors() if name in moved]
