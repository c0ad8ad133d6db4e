"""The state of a server rule between rounds: arrays, or tensors that stay on an accelerator until they are read."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedvit.tensors import Array


class OnAccelerator(Mapping[str, Array]):
    """Arrays by name; those of `tensors` are copied to the processor's memory each time they are read.

    A generator of 60 million weights would otherwise travel there and back in every round.
    """

    def __init__(self, tensors: Mapping[str, Tensor], arrays: Mapping[str, Array]) -> None:
        self.tensors = tensors
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name].cpu().numpy() if name in self.tensors else self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self._arrays

    def __len__(self) -> int:
        return len(self.tensors) + len(self._arrays)


def with_tensors(memory: Mapping[str, Array], tensors: Mapping[str, Tensor]) -> Mapping[str, Array]:
    """The memory with other values of some names, which are kept where they are."""
    if all(value.device.type == "cpu" for value in tensors.values()):
        return {**memory, **{name: value.detach().numpy() for name, value in tensors.items()}}
    here = {name: tensor_of(memory, name) for name in memory if name not in tensors}
    here |= {name: value.detach() for name, value in tensors.items()}
    on_processor = {name: value.numpy() for name, value in here.items() if value.device.type == "cpu"}
    return OnAccelerator({name: here[name] for name in here if name not in on_processor}, on_processor)


def tensor_of(memory: Mapping[str, Array], name: str) -> Tensor:
    """One value, where it is; not to be written to."""
    if isinstance(memory, OnAccelerator) and name in memory.tensors:
        return memory.tensors[name]
    value: Tensor = torch.from_numpy(memory[name])
    return value
