"""The state of a torch optimizer by name, so that a rule can keep it between rounds."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedvit.methods.rules.memory import tensor_of
from fedvit.tensors import Array

PREFIX = "optimizer/"


def save_state(optimizer: torch.optim.Optimizer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state for each value: `optimizer/SLOT/NAME`."""
    return {
        f"{PREFIX}{slot}/{name}": content.detach()
        for name, value in values.items()
        for slot, content in optimizer.state[value].items()
        if content is not None
    }


def restore(optimizer: torch.optim.Optimizer, values: Mapping[str, Tensor], memory: Mapping[str, Array]) -> None:
    """Undo `saved`; the state of unknown values is ignored."""
    for key in memory:
        slot, _, name = key.removeprefix(PREFIX).partition("/")
        if not key.startswith(PREFIX) or name not in values:
            continue
        value = values[name]
        # Adam counts its steps in a tensor that stays on the CPU
        target = torch.device("cpu") if slot == "step" else value.device
        optimizer.state[value][slot] = tensor_of(memory, key).to(target, copy=True)
