"""The resources that a cell of an experiment needs of a node: the table [ray]."""

from collections.abc import Collection
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from fedvit.choices import did_you_mean
from fedvit.errors import ConfigError
from fedvit.quantities import format_bytes, parse_bytes


class NodeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resources of cells; None: those of the more general table."""

    num_cpus: Annotated[float, Meta(gt=0)] | None = None  # cores; fractions are allowed
    num_gpus: Annotated[float, Meta(ge=0)] | None = None  # a fraction shares a GPU with other cells
    memory: Annotated[int, Meta(gt=0)] | str | None = None  # bytes, or "2GB"


class RayTable(NodeRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [ray] of an experiment: for all cells, for those of one method, for those of one partition."""

    methods: dict[str, NodeRequest] = field(default_factory=dict)
    partitions: dict[str, NodeRequest] = field(default_factory=dict)

    def check(self, methods: Collection[str], partitions: Collection[str], where: str) -> None:
        """Raises ConfigError for a method or partition that the experiment does not have, and for bad amounts."""
        for kind, requests, names in (("methods", self.methods, methods), ("partitions", self.partitions, partitions)):
            for name in requests:
                if name not in names:
                    hint = did_you_mean(name, names, most=1) or f"; there are: {', '.join(names)}"
                    raise ConfigError("FV2119", f"{where} [ray.{kind}.{name}]: the experiment has no such table{hint}")
        for method in methods:
            for partition in partitions:
                try:
                    self.resources(method, partition)
                except ConfigError as error:
                    raise ConfigError("FV2119", f"{where} [ray], for {method}/{partition}: {error}") from None

    def resources(self, method: str, partition: str) -> "Resources":
        """Return the needs of a cell: its partition's table wins over its method's, and that over the general one."""
        tables = (self.partitions.get(partition), self.methods.get(method), self)
        requests = [request for request in tables if request is not None]
        num_cpus = next((one.num_cpus for one in requests if one.num_cpus is not None), 1.0)
        num_gpus = next((one.num_gpus for one in requests if one.num_gpus is not None), 0.0)
        memory = next((one.memory for one in requests if one.memory is not None), 0)
        if num_gpus > 1 and num_gpus % 1:
            raise ConfigError("FV2119", f"num_gpus = {num_gpus:g}: expected a fraction of one GPU, or whole GPUs")
        return Resources(num_cpus, num_gpus, parse_bytes(memory) if isinstance(memory, str) else memory)


class Resources(NamedTuple):
    """Resources that a node has, or that a program on it needs."""

    num_cpus: float
    num_gpus: float
    memory_bytes: int

    def fits(self, node: "Resources") -> bool:
        return all(need <= share for need, share in zip(self, node, strict=True))

    def __str__(self) -> str:
        """
        >>> print(Resources(2, 0.5, 10**9), Resources(1, 0, 0), sep="; ")
        2 CPUs, 0.5 GPUs, 1 GB; 1 CPU
        """
        parts = [f"{self.num_cpus:g} CPU{'' if self.num_cpus == 1 else 's'}"]
        if self.num_gpus:
            parts.append(f"{self.num_gpus:g} GPU{'' if self.num_gpus == 1 else 's'}")
        if self.memory_bytes:
            parts.append(format_bytes(self.memory_bytes))
        return ", ".join(parts)


def capacity(node: Resources, needs: Resources) -> int:
    """Count the programs with these `needs` that fit on a node at the same time.

    >>> quarter = Resources(1, 0.25, 0)
    >>> capacity(Resources(8, 1, 16 * 10**9), quarter), capacity(Resources(8, 0, 10**9), quarter)
    (4, 0)
    """
    return int(min((share / need for share, need in zip(node, needs, strict=True) if need), default=1))
