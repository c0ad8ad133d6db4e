"""A second model on a device, beside the shared one: its tensors have the same names behind a prefix."""

from torch import Tensor

from fedvit.methods.calculus import Named

TWIN = "twin."


def name_twins(model: Named) -> dict[str, Tensor]:
    """Return values by the names of the second model's tensors."""
    return {f"{TWIN}{name}": value for name, value in model.items()}


def select_twins(tensors: Named) -> dict[str, Tensor]:
    """Return the second model's tensors by the names of the first one's."""
    return {name.removeprefix(TWIN): value for name, value in tensors.items() if name.startswith(TWIN)}
