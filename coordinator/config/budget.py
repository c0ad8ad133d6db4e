"""The table [budget]."""

from collections.abc import Callable
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from fedvit.errors import ConfigError
from fedvit.quantities import format_bytes, parse_bytes, parse_flops, parse_seconds
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


def check_memory_budget(budget: BudgetConfig) -> None:
    """Raise ConfigError if a device's program and its engine alone take more memory than the budget."""
    limit_bytes = budget.limits().memory_bytes
    if limit_bytes is None:
        return
    from profiles.predict import BASE_RSS_BYTES, LOADED_BYTES  # numpy, which other runs do not need here

    least_bytes = BASE_RSS_BYTES + LOADED_BYTES
    if limit_bytes < least_bytes:
        raise ConfigError(
            "FV1108",
            f"[budget] memory_budget = {budget.memory_budget!r}: a device's program and its engine alone take about "
            f"{format_bytes(least_bytes)} before any work; set it above that, plus what training takes",
        )


Number = TypeVar("Number", int, float)


def _amount(key: str, given: Amount | None, parse: Callable[[str], Number]) -> Number | None:
    try:
        return None if given is None else parse(str(given))
    except ConfigError as error:
        raise ConfigError(error.code, f"{key}: {error}") from None
