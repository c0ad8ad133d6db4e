"""The state of a torch optimizer as named arrays, so that the store can keep it between rounds."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedvit.tensors import Tensors

PREFIX = "optimizer/"


def saved(optimizer: torch.optim.Optimizer, values: Mapping[str, Tensor]) -> Tensors:
    """What the optimizer remembers of each value: `optimizer/SLOT/NAME`."""
    return {
        f"{PREFIX}{slot}/{name}": content.detach().cpu().numpy()
        for name, value in values.items()
        for slot, content in optimizer.state[value].items()
        if content is not None
    }


def restore(optimizer: torch.optim.Optimizer, values: Mapping[str, Tensor], memory: Tensors) -> None:
    """Undo `saved`; what belongs to values that are not here is passed over."""
    for key, content in memory.items():
        slot, _, name = key.removeprefix(PREFIX).partition("/")
        if not key.startswith(PREFIX) or name not in values:
            continue
        value = values[name]
        # Adam counts its steps in a tensor that stays on the CPU
        target = torch.device("cpu") if slot == "step" else value.device
        optimizer.state[value][slot] = torch.tensor(content, device=target)
