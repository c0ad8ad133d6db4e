"""The table [budget]."""

from collections.abc import Callable
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from fedvit.errors import ConfigError
from fedvit.quantities import parse_bytes, parse_flops, parse_seconds
from fedvit.resources import Budget

Amount = float | str
"""A number, or text with a unit such as "512MB"."""


class BudgetConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of every device, in addition to its own: the table [budget]. Raises ConfigError on construction."""

    memory_budget: Annotated[
        Amount | None,
        Meta(
            description="Resident memory of a device's process, e.g. 512MB; it gets a task that fits.",
            extra={"metavar": "AMOUNT"},
        ),
    ] = None
    flops_budget: Annotated[
        Amount | None, Meta(description="FLOPs of a round's training, e.g. 2TFLOP.", extra={"metavar": "AMOUNT"})
    ] = None
    round_deadline: Annotated[
        Amount | None,
        Meta(
            description="Time of a round's training on a device, without transfers, e.g. 10m.",
            extra={"metavar": "AMOUNT"},
        ),
    ] = None
    upload_budget: Annotated[
        Amount | None, Meta(description="Bytes of one round's result, e.g. 5MB.", extra={"metavar": "AMOUNT"})
    ] = None

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> Budget:
        return Budget(
            memory_bytes=_amount("memory_budget", self.memory_budget, parse_bytes),
            flops_per_round=_amount("flops_budget", self.flops_budget, parse_flops),
            round_deadline_s=_amount("round_deadline", self.round_deadline, parse_seconds),
            upload_bytes=_amount("upload_budget", self.upload_budget, parse_bytes),
        )


Number = TypeVar("Number", int, float)


def _amount(key: str, given: Amount | None, parse: Callable[[str], Number]) -> Number | None:
    try:
        return None if given is None else parse(str(given))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
