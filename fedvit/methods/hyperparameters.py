"""The hyperparameters that every method has, and what follows from them alone."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from msgspec import Meta

from fedvit.methods.optimizers import AdamW, MomentumSgd, Optimizer, Sgd
from fedvit.roles import Compute, Novel, Precision


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Options of the loop over a device's samples; methods add their own."""

    loop_options: ClassVar[tuple[str, ...]] = ("epochs", "optimizer_bits")
    """Options on which no graph depends."""

    epochs: Annotated[int, Meta(ge=1)] = 1  # passes over the device's images per round (papers: E)
    batch_size: Annotated[int, Meta(ge=1)] = 32
    micro_batch: Annotated[int, Meta(ge=1)] | None = None  # images at a time on a device; None: chosen for the model
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Meta(gt=0)] = 0.01
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # sgd only
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    mask: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # share of patches that a training step drops, anew for each image
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # share of values that a training step drops, anew for each image
    optimizer_bits: Literal[8, 32] = 32  # on devices: of each number that the optimizer remembers
    recompute: bool = False  # on devices: less memory, a third more FLOPs
    frozen_precision: Precision = (
        "fp32"  # of tensors that a device does not train: saves half or three quarters of their bytes
    )
    compute: Compute = "fp32"  # products with weights in training; untrained ones are also sent in it
    clip_norm: Annotated[float, Meta(gt=0)] | None = None  # a step's gradient is scaled down to this norm
    schedule: Literal["constant", "cosine"] = "constant"  # of the learning rate, over the run's rounds
    warmup_rounds: Annotated[int, Meta(ge=0)] = 0
    novel: Novel | None = None  # a run for devices that join after the training: what all share stands still

    @property
    def sent_precision(self) -> Precision:
        """In which weights that a device does not train are sent, and held there."""
        return self.frozen_precision if self.compute == "fp32" else self.compute

    @property
    def samples_per_step(self) -> int:
        """Images that one optimizer step takes."""
        return self.batch_size

    @property
    def why_one_class(self) -> str | None:
        """Reason why the method, with these values, needs one class for each sample; None if it trains every task."""
        return None

    def optimizer_rule(self) -> Optimizer:
        if self.optimizer == "adamw":
            return AdamW(weight_decay=self.weight_decay)
        if self.momentum:
            return MomentumSgd(momentum=self.momentum, weight_decay=self.weight_decay)
        return Sgd(weight_decay=self.weight_decay)

    def lr_scale(self, round_number: int, rounds: int) -> float:
        """The schedule's factor on `lr` in a round that counts from 1: linear warm-up, then the schedule.

        It is that of the training: novel devices, which join after it, learn with the rate itself.
        """
        if self.novel:
            return 1.0
        if round_number <= self.warmup_rounds:
            return round_number / (self.warmup_rounds + 1)
        if self.schedule == "constant":
            return 1.0
        done = (round_number - 1 - self.warmup_rounds) / max(1, rounds - self.warmup_rounds)
        return 0.5 * (1 + math.cos(math.pi * done))

    def as_traced(self) -> Self:
        """The method with default values of `loop_options`: methods for which this is equal have the same graphs."""
        usual = type(self)()
        return replace(self, **{option: getattr(usual, option) for option in self.loop_options})
