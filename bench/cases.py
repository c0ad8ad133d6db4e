"""Cases that `python -m bench` measures; one case is one row of a table.

Imports little, since the measured processes import this file.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedvit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step: the method's own, and torch code that computes the same.

    `options` are the method's; the torch side reads batch size, optimizer and rate from them.
    """

    name: str
    method: str
    options: dict[str, Any]
    model: str
    model_options: dict[str, Any] = field(default_factory=dict)
    classes: int = 10
    torch: str = "plain"  # key of bench.torch_models.MODELS for the equivalent torch code

    @property
    def batch_size(self) -> int:
        return int(self.options["batch_size"])

    @property
    def compute(self) -> str:
        """Precision of products with weights: fp32, fp16 or int8."""
        return str(self.options.get("compute", "fp32"))

    def with_options(self, **options: Any) -> "Case":
        return replace(self, options={**self.options, **options})


_VIT_B, _VIT_S, _VIT_TI = "vit_base_patch16_224", "vit_small_patch16_224", "vit_tiny_patch16_224"
_SGD = {"epochs": 1, "optimizer": "sgd", "lr": 0.01}
_ADAMW = {"epochs": 1, "optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.05}
_EFTVIT = {**_ADAMW, "local_blocks": 2, "mask": 0.75}
_CIFAR_VIT = {"image_size": 32, "patch_size": 4, "width": 128, "depth": 8, "heads": 8, "mlp_ratio": 2.0}

CASES: tuple[Case, ...] = (
    Case(
        name="eftvit-vitb",
        method="eftvit",
        options={**_EFTVIT, "batch_size": 16, "micro_batch": 4},
        model=_VIT_B,
        torch="eftvit",
    ),
    Case(
        name="eftvit-vitb-b8-int8",
        method="eftvit",
        options={**_EFTVIT, "batch_size": 8, "micro_batch": 4, "frozen_precision": "int8", "compute": "int8"},
        model=_VIT_B,
        torch="eftvit",
    ),
    Case(
        name="fedperfix-vits",
        method="fedperfix",
        options={**_SGD, "batch_size": 16, "bottleneck": 256, "scale": 1.5},
        model=_VIT_S,
        torch="fedperfix",
    ),
    Case(
        name="pfedpg-vitb",
        method="pfedpg",
        options={**_SGD, "batch_size": 16, "tokens": 10, "weight_decay": 0.001},
        model=_VIT_B,
        torch="pfedpg",
    ),
    Case(
        name="fedtp-tiny",
        method="fedtp",
        options={**_SGD, "batch_size": 64},
        model="vit_small_images",
        model_options={**_CIFAR_VIT, "qkv_bias": False},
    ),
    Case(name="fedavg-vitt", method="fedavg", options={**_SGD, "batch_size": 16}, model=_VIT_TI),
    Case(name="fedavg-resnet50", method="fedavg", options={**_SGD, "batch_size": 16}, model="resnet50", torch="resnet"),
    Case(
        name="fedavg-lstm",
        method="fedavg",
        options={**_SGD, "batch_size": 16},
        model="lstm_small_text",
        model_options={"context": 80, "embedding": 8, "width": 256, "depth": 2},
        classes=65,  # characters of Shakespeare's plays
        torch="lstm",
    ),
)


def choose(names: Sequence[str], cases: Sequence[Case] = CASES) -> list[Case]:
    """Choose the cases with these names; all without names. Raises ConfigError for an unknown name."""
    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            raise ConfigError("FV0002", f"unknown case {name!r}, known are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] or list(cases)


def encode_case(case: Case) -> str:
    return json.dumps(asdict(case))


def decode_case(text: str) -> Case:
    return Case(**json.loads(text))
