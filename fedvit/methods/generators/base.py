"""Generators: parameters that all devices share, an embedding for each device, and a function of both."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from fedvit.methods.calculus import Named


class Generator(ABC):
    """Makes the values of a method's generated tensors. Pure: everything it knows is passed in.

    Every value follows from the seed, the device's name and what training made of it, so a device that
    was never asked has an embedding, too.
    """

    @property
    def relative_rates(self) -> Mapping[str, float]:
        """Factors of the server's learning rate by the name of a shared parameter; 1 for all others."""
        return {}

    @abstractmethod
    def shared(self, draw: torch.Generator) -> dict[str, Tensor]:
        """First values of the parameters that all devices share."""

    @abstractmethod
    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        """First values of one device's own: its embedding."""

    @abstractmethod
    def generate(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        """Tensor name -> value for the device with this embedding."""

    def describe(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        """Figure name -> number of one device, for the record of each round."""
        return {}


def drawing(seed: int, *of: str) -> torch.Generator:
    """A random generator that depends on all of its arguments."""
    digest = hashlib.blake2b("/".join([str(seed), *of]).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
