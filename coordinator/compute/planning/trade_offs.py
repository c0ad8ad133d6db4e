"""Trade-offs of methods for devices with too little memory or time, and their price in accuracy.

The table `TRADE_OFFS` lists options with smaller values, and the estimated share of the accuracy that each of them
leaves (its quality). `micro_batch` is chosen separately: it changes no result. Qualities are an order of preference,
not a prediction; beside each stands its evidence.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fedvit.methods.base import Method, list_untrained
from fedvit.methods.caff import CAFF
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fedra import FedRA
from fedvit.methods.flexlora import FlexLora
from fedvit.models.vit import PatchViT
from fedvit.resources import BudgetKind

Values = Iterable[tuple[Any, float]]
"""(value, quality: estimated share of the accuracy, at most 1), the closest to the configured value first."""


class TradeOff(NamedTuple):
    """Values of an option that reduce a device's work, the closest to the configured value first."""

    option: str
    helps: frozenset[BudgetKind]  # the budgets that it relieves
    values: tuple[tuple[Any, float], ...]  # (value, quality)


class Rule(NamedTuple):
    """Steps in which an option of one kind of method, and of those derived from it, can be reduced."""

    of: type[Any]  # Method, or one derived from it
    option: str
    helps: frozenset[BudgetKind]
    values: Callable[[Any, PatchViT], Values]  # for a method of that kind; none where nothing can be reduced


def trade_offs(method: Method, vit: PatchViT) -> tuple[TradeOff, ...]:
    """The options of a method that may be reduced, each with at least one value."""
    return tuple(
        TradeOff(rule.option, rule.helps, values)
        for rule in TRADE_OFFS
        if isinstance(method, rule.of) and (values := tuple(rule.values(method, vit)))
    )


def _recompute(method: Method, vit: PatchViT) -> Values:
    """Blocks are computed a second time from the same numbers, so that nothing is lost."""
    return () if method.recompute else ((True, 1.0),)


def _frozen_precision(method: Method, vit: PatchViT) -> Values:
    """Assumed to be a little less: what was measured (docs/measurements.md) cannot be told from chance."""
    if method.compute != "fp32" or not list_untrained(method, vit):
        return ()
    fewer_bits: dict[str, Values] = {"fp32": (("fp16", 0.99), ("int8", 0.98)), "fp16": (("int8", 0.99),), "int8": ()}
    return fewer_bits[method.sent_precision]


def _optimizer_bits(method: Method, vit: PatchViT) -> Values:
    """Measured on digits (docs/measurements.md): what it costs cannot be told from chance."""
    return ((8, 0.99),) if method.one_gradient and method.optimizer_rule().slots and method.optimizer_bits > 8 else ()


def _batch_size(method: Method, vit: PatchViT) -> Values:
    """Halve batches that are in memory at once. Not measured: 5 % for each halving."""
    return () if method.one_gradient else halves(method.batch_size, 0.95)


def _epochs(method: Method, vit: PatchViT) -> Values:
    """Not measured: the remaining share of epochs."""
    return ((epochs, epochs / method.epochs) for epochs in range(method.epochs - 1, 0, -1))


def _mask(method: EFTViT, vit: PatchViT) -> Values:
    """By the paper's Figure 5 accuracy holds up to 0.75: each step keeps 99 %. Beyond it, the share of patches left."""
    higher = [mask for mask in (0.5, 0.75, 0.85, 0.9, 0.95) if mask > method.mask]
    return (
        (mask, 0.99**steps * (1 - max(mask, 0.75)) / (1 - max(method.mask, 0.75)))
        for steps, mask in enumerate(higher, start=1)
    )


def _local_blocks(method: EFTViT, vit: PatchViT) -> Values:
    """By the paper's Table 5 two blocks are as good as six: each less keeps 99 %. One was not tried: it keeps half."""
    fewer = range(method.local_blocks - 1, 0, -1)
    return ((count, 0.99 ** (method.local_blocks - count) * (0.5 if count == 1 else 1)) for count in fewer)


def _threshold(method: EFTViT, vit: PatchViT) -> Values:
    """Not measured: the remaining share of features."""
    return ((method.threshold * share, share) for share in (0.5, 0.25, 0.125))


def _layers(method: CAFF | FedRA, vit: PatchViT) -> Values:
    """Not measured: each layer less keeps 95 %."""
    most = method.count_layers(vit) if isinstance(method, FedRA) else method.layers
    return ((layers, 0.95 ** (most - layers)) for layers in range(most - 1, 0, -1))


def _own_rank(method: FlexLora, vit: PatchViT) -> Values:
    """Halve the rank of additions. Not measured: 5 % for each halving."""
    return halves(method.own_rank or method.rank, 0.95)


def halves(number: int, share: float) -> Values:
    """
    >>> halves(12, 0.5)
    ((6, 0.5), (3, 0.25), (1, 0.125))
    """
    halves: list[tuple[int, float]] = []
    while number > 1:
        number //= 2
        halves.append((number, share ** (len(halves) + 1)))
    return tuple(halves)


TRADE_OFFS = (
    Rule(Method, "recompute", frozenset({"memory"}), _recompute),
    Rule(Method, "frozen_precision", frozenset({"memory"}), _frozen_precision),
    Rule(Method, "optimizer_bits", frozenset({"memory"}), _optimizer_bits),
    Rule(Method, "batch_size", frozenset({"memory"}), _batch_size),
    Rule(Method, "epochs", frozenset({"flops", "time"}), _epochs),
    Rule(CAFF, "layers", frozenset({"memory", "flops", "time", "upload"}), _layers),
    Rule(FedRA, "layers", frozenset({"memory", "flops", "time", "upload"}), _layers),
    Rule(FlexLora, "own_rank", frozenset({"memory", "flops", "time", "upload"}), _own_rank),
    Rule(EFTViT, "mask", frozenset({"memory", "flops", "time", "upload"}), _mask),
    Rule(EFTViT, "local_blocks", frozenset({"memory", "flops", "time"}), _local_blocks),
    Rule(EFTViT, "threshold", frozenset({"memory", "upload"}), _threshold),
)
"""A method without a row of its own gives up what every method can."""
