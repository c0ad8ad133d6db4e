"""Configuration search: the candidate of the highest quality that fits a device's budget.

The trade-offs of a method (`trade_offs`) span a grid. Its points are priced on their own graphs, in the order
of their quality, until one fits. The number of images at a time is chosen for each of them, as it changes memory and
time only.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from coordinator.compute.planning.planned_device import PlannedDevice
from coordinator.compute.planning.trade_offs import TradeOff, trade_offs
from fedvit.errors import OverBudget
from fedvit.methods.base import Method
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Train
from fedvit.quantities import format_bytes, format_flops, format_seconds
from fedvit.resources import Budget, BudgetKind, image_cache_bytes
from profiles.predict import Target, predict
from profiles.prediction import Expected, Prediction, ProgramCost
from profiles.program_cost import PricedProgram

MOST_PRICED = 32
"""Candidates that are priced for one device at most."""
RUNNERS_UP = 2
HEADROOM = 0.88
"""Share of a memory budget that a prediction may fill, as predictions have errors of up to 15 %."""


class Candidate(Struct, frozen=True, kw_only=True):
    """One configuration of the method, and its predicted cost."""

    changes: dict[str, Any]  # options that differ from the run's configuration
    quality: float = msgspec.field(name="kept")  # estimated share of the accuracy; 1 without changes
    prediction: Prediction


class Choice(Struct, frozen=True, kw_only=True):
    """The configuration of a device, and other candidates."""

    device: str
    budget: Budget
    chosen: Candidate
    cost: ProgramCost
    rejected: list[Candidate]  # of the same or higher quality, but over the budget
    runners_up: list[Candidate]  # within the budget, but of lower quality or slower


def make_expected(candidate: Candidate, cost: ProgramCost, budget: Budget) -> Expected:
    """The expected cost of a task of a device that gets this candidate."""
    return Expected(
        prediction=candidate.prediction,
        flops=cost.flops_round,
        bytes_down=cost.bytes_down,
        bytes_up=cost.bytes_up,
        budget=budget,
        changes=candidate.changes,
        quality=candidate.quality,
        later_flops=cost.later_flops_round,
    )


class Priced(NamedTuple):
    """A candidate with its method and cost."""

    method: Method
    candidate: Candidate
    cost: ProgramCost

    @property
    def over(self) -> tuple[BudgetKind, ...]:
        return self.candidate.prediction.over


@dataclass(frozen=True)
class ConfigurationSearch:
    """Finds a configuration of one run's method for each device; graphs are priced once."""

    vit: PatchViT
    batch_of: Callable[[Method], Batch]
    phases_of: Callable[[Method], tuple[Train, ...]]
    price: Callable[[Method], PricedProgram]
    progress: Callable[[str], None]
    allowed: Callable[[Method], bool] = lambda method: True
    priced: dict[Method, PricedProgram] = field(default_factory=dict)  # traced methods, and those with the same graphs

    def find(self, method: Method, planned: PlannedDevice) -> tuple[Method, Choice]:
        """The candidate of the highest quality within the budget; of equal ones the fastest.

        Raises OverBudget, with the smallest sufficient budget, if there is none.
        """
        possible = self._possible(method)
        asked = self._candidate(method, {}, 1.0, planned)
        looked_at = [asked]
        if asked.over:
            looked_at += self._smallest(method, possible, asked, planned)
            looked_at += self._search(method, possible, asked, planned)
        within_budget = [priced for priced in looked_at if not priced.over]
        if not within_budget:
            raise OverBudget("FV1508", _too_small(planned, looked_at))
        within_budget.sort(key=lambda priced: (-priced.candidate.quality, priced.candidate.prediction.train_s or 0.0))
        chosen = within_budget[0]
        rejected = [
            priced.candidate
            for priced in looked_at
            if priced.over and priced.candidate.quality >= chosen.candidate.quality
        ]
        return chosen.method, Choice(
            device=planned.device,
            budget=planned.budget,
            chosen=chosen.candidate,
            cost=chosen.cost,
            rejected=rejected,
            runners_up=[priced.candidate for priced in within_budget[1 : 1 + RUNNERS_UP]],
        )

    def _possible(self, method: Method) -> list[TradeOff]:
        """The method's trade-offs, without values that need tensors which the server does not hold."""
        possible = []
        for trade_off in trade_offs(method, self.vit):
            values = tuple(
                (value, share)
                for value, share in trade_off.values
                if self.allowed(replace(method, **{trade_off.option: value}))
            )
            possible += [trade_off._replace(values=values)] if values else []
        return possible

    def _search(
        self, method: Method, trade_offs: Sequence[TradeOff], asked: Priced, planned: PlannedDevice
    ) -> Iterator[Priced]:
        """Candidates of falling quality, until some fit.

        The savings of several changes are estimated from those of single changes, so that few candidates are priced.
        """
        kinds = set(asked.over)
        alone: dict[tuple[str, Any], list[Priced]] = {}
        least = self._least(method, {}, 1.0, planned)
        found = count = 0
        best = 0.0
        for changes, quality in grid(trade_offs):
            if not changes or not self._may_help(trade_offs, changes, kinds):
                continue
            if count == MOST_PRICED or found > RUNNERS_UP or (found and quality < best / 2):
                return
            singles = [alone[item] for item in changes.items() if item in alone]
            if len(changes) > 1 and len(singles) == len(changes) and _hopeless(least, singles, planned):
                continue
            count += 1
            priced = self._candidate(method, changes, quality, planned)
            if len(changes) == 1:
                [item] = changes.items()
                alone[item] = self._least(method, changes, quality, planned)
            kinds.update(priced.over)
            if not priced.over:
                found += 1
                best = max(best, quality)
            yield priced

    def _least(self, method: Method, changes: dict[str, Any], quality: float, planned: PlannedDevice) -> list[Priced]:
        """Candidates with these changes, of which one needs the least resources of each kind.

        One image at a time needs the least memory, but more time.
        """
        changed = replace(method, **changes)
        budget = planned.budget
        if budget.memory_bytes is None or not changed.one_gradient:
            return [self._price(changed, changes, quality, planned)]
        candidates = [self._price(changed, {**changes, "micro_batch": 1}, quality, planned)]
        if budget.flops_per_round is not None or budget.round_deadline_s is not None:
            candidates.append(self._price(changed, changes, quality, planned))
        return candidates

    @staticmethod
    def _may_help(trade_offs: Sequence[TradeOff], changes: dict[str, Any], kinds: set[BudgetKind]) -> bool:
        """Return whether each change relieves one of the exceeded budgets."""
        return all(trade_off.helps & kinds for trade_off in trade_offs if trade_off.option in changes)

    def _smallest(
        self, method: Method, trade_offs: Sequence[TradeOff], asked: Priced, planned: PlannedDevice
    ) -> Iterator[Priced]:
        """For each exceeded budget, candidates that need about the least of it.

        Raises OverBudget if these exceed it, too.
        """
        found: list[Priced] = []
        for kind in asked.over:
            helping = [trade_off for trade_off in trade_offs if kind in trade_off.helps]
            candidates = self._extreme(method, helping, planned)
            for trade_off in helping:  # a trade-off that helps large models may cost more than it saves for small ones
                if _find_needed(kind, candidates) <= _limit(kind, planned.budget):
                    break
                others = [other for other in helping if other is not trade_off]
                without = self._extreme(method, others, planned)
                if _find_needed(kind, without) < _find_needed(kind, candidates):
                    helping, candidates = others, without
            found += candidates
        if any(_find_needed(kind, found) > _limit(kind, planned.budget) for kind in asked.over):
            raise OverBudget("FV1508", _too_small(planned, self._with_room(found, planned)))
        yield from found

    def _with_room(self, candidates: list[Priced], planned: PlannedDevice) -> list[Priced]:
        """The same candidates with a memory budget that is just enough, with which more decoded images are cached."""
        if planned.budget.memory_bytes is None:
            return candidates
        while True:
            needed = _find_needed("memory", candidates)
            enough = planned._replace(budget=msgspec.structs.replace(planned.budget, memory_bytes=int(needed)))
            again = []
            for method, candidate, _ in candidates:
                cost = cost_on(enough, self.program_of(method))
                again.append(Priced(method, self.candidate(cost, candidate.changes, candidate.quality, planned), cost))
            if _find_needed("memory", again) <= needed:
                return again
            candidates = again

    def _extreme(self, method: Method, trade_offs: Sequence[TradeOff], planned: PlannedDevice) -> list[Priced]:
        """The candidates with the last value of every trade-off."""
        changes = {trade_off.option: trade_off.values[-1][0] for trade_off in trade_offs}
        return self._least(method, changes, prod(trade_off.values[-1][1] for trade_off in trade_offs), planned)

    def _candidate(self, method: Method, changes: dict[str, Any], quality: float, planned: PlannedDevice) -> Priced:
        """Price one candidate, with as many images at a time as its memory budget allows."""
        changed = replace(method, **changes)
        usual = self.batch_of(changed).run_size
        limit = planned.budget.memory_bytes
        if limit is None or usual == 1 or not changed.one_gradient:
            return self._price(changed, changes, quality, planned)
        least = self._price(changed, {**changes, "micro_batch": 1}, quality, planned)
        if "memory" in least.over:
            return least
        first = self._price(changed, changes, quality, planned)
        if "memory" not in first.over:
            return first
        # memory grows evenly with the images of a run
        one, many = (priced.candidate.prediction.peak_rss_bytes for priced in (least, first))
        per_image = max(1.0, (many - one) / (usual - 1))
        size = 1 + int((HEADROOM * limit - one) / per_image)
        for run_size in (size, size - 1):
            if 1 < run_size < usual:
                middle = self._price(changed, {**changes, "micro_batch": run_size}, quality, planned)
                if "memory" not in middle.over:
                    return middle
        return least

    def _price(self, method: Method, changes: dict[str, Any], quality: float, planned: PlannedDevice) -> Priced:
        method = replace(method, **{name: value for name, value in changes.items() if name == "micro_batch"})
        cost = cost_on(planned, self.program_of(method))
        return Priced(method, self.candidate(cost, changes, quality, planned), cost)

    def candidate(
        self, cost: ProgramCost, changes: dict[str, Any], quality: float, planned: PlannedDevice
    ) -> Candidate:
        """The candidate with its prediction for a device."""
        limit = planned.budget.memory_bytes
        prediction = predict(
            cost,
            planned.speed,
            Target(planned.device, planned.source, planned.mode, planned.power_w, planned.base_rss_bytes),
            msgspec.structs.replace(planned.budget, memory_bytes=None if limit is None else int(HEADROOM * limit)),
            dict(planned.corrections),
        )
        return Candidate(changes=changes, quality=quality, prediction=prediction)

    def program_of(self, method: Method) -> PricedProgram:
        """The method's Program; options that do not change graphs share them."""
        if method not in self.priced:
            alike = method.as_traced()
            if alike not in self.priced:
                self.progress(f"pricing {_description(alike)}")
                self.priced[alike] = self.price(alike)
            of_alike = self.priced[alike]
            program = msgspec.structs.replace(of_alike.program, train=self.phases_of(method))
            options = msgspec.to_builtins(method)
            self.priced[method] = PricedProgram(program, options, of_alike.graphs, of_alike.cuts)
        return self.priced[method]


def cost_on(planned: PlannedDevice, priced: PricedProgram) -> ProgramCost:
    """The cost of a Program with the images of a device, and with its kernels."""
    own = priced.with_kernels if planned.speed and planned.speed.kernels else priced
    return own.cost(
        images=planned.images,
        test_images=planned.test_images,
        cache_bytes=image_cache_bytes(planned.budget.memory_bytes if planned.budget_is_own else None),
        feature_bytes=planned.feature_bytes,
    )


def grid(trade_offs: Sequence[TradeOff]) -> Iterator[tuple[dict[str, Any], float]]:
    """All combinations of options by falling quality; of equal ones those with fewer changes first.

    >>> mask = TradeOff("mask", frozenset({"time"}), ((0.8, 0.8), (0.9, 0.4)))
    >>> again = TradeOff("recompute", frozenset({"memory"}), ((True, 1.0),))
    >>> [(changes, kept) for changes, kept in grid([again, mask])][:3]
    [({}, 1.0), ({'recompute': True}, 1.0), ({'mask': 0.8}, 0.8)]
    """
    start = (0,) * len(trade_offs)
    waiting = [(-1.0, 0, start)]
    seen = {start}
    while waiting:
        negative, _, places = heapq.heappop(waiting)
        taken = {e.option: e.values[place - 1][0] for e, place in zip(trade_offs, places, strict=True) if place}
        yield taken, -negative
        for axis, trade_off in enumerate(trade_offs):
            further = (*places[:axis], places[axis] + 1, *places[axis + 1 :])
            if places[axis] < len(trade_off.values) and further not in seen:
                seen.add(further)
                quality = 1.0
                for each, place in zip(trade_offs, further, strict=True):
                    quality *= each.values[place - 1][1] if place else 1.0
                heapq.heappush(waiting, (-quality, sum(place > 0 for place in further), further))


NEARLY = 1.03
"""Factor by which an estimate of several changes may exceed a budget and still be priced."""


def _hopeless(least: Sequence[Priced], singles: Sequence[Sequence[Priced]], planned: PlannedDevice) -> bool:
    """Return whether all savings together are too small: saved bytes add up, factors of work multiply."""
    for kind in dict.fromkeys(
        kind for candidates in (least, *singles) for priced in candidates for kind in priced.over
    ):
        start = _find_needed(kind, least)
        needs = [_find_needed(kind, single) for single in singles]
        if kind in ("memory", "upload"):
            together = start - sum(start - need for need in needs)
        else:
            together = start * prod(need / start for need in needs) if start else 0.0
        if together > NEARLY * _limit(kind, planned.budget):
            return True
    return False


def _too_small(planned: PlannedDevice, looked_at: Sequence[Priced]) -> str:
    """The message with the exceeded budgets, and the smallest sufficient ones."""
    lacking = list(dict.fromkeys(kind for priced in looked_at for kind in priced.over))
    # if each alone is sufficient, only both together do not fit
    lacking = [kind for kind in lacking if _find_needed(kind, looked_at) > _limit(kind, planned.budget)] or lacking
    parts = []
    for kind in lacking:
        needed = _find_needed(kind, looked_at)
        # rounded up for three digits
        parts.append(
            f"{_NAMES[kind]} is {_show(kind, _limit(kind, planned.budget))}, at least {_show(kind, 1.005 * needed)}"
        )
    return f"nothing fits {planned.device}: its " + "; its ".join(f"{text} would be needed" for text in parts)


_NAMES: dict[BudgetKind, str] = {
    "memory": "memory budget", "flops": "FLOPs budget per round", "time": "round deadline", "upload": "upload budget",
}  # fmt: skip


def _find_needed(kind: BudgetKind, candidates: Sequence[Priced]) -> float:
    """The smallest budget that is sufficient for one of them."""

    def amount_of(priced: Priced) -> float:
        prediction, cost = priced.candidate.prediction, priced.cost
        return {
            "memory": math.ceil(prediction.peak_rss_bytes / HEADROOM),
            "flops": cost.flops_round,
            "time": prediction.train_s or 0.0,
            "upload": cost.bytes_up,
        }[kind]

    return min(amount_of(priced) for priced in candidates)


def _limit(kind: BudgetKind, budget: Budget) -> float:
    limits = {
        "memory": budget.memory_bytes,
        "flops": budget.flops_per_round,
        "time": budget.round_deadline_s,
        "upload": budget.upload_bytes,
    }
    return float(limits[kind] or 0.0)


def _show(kind: BudgetKind, value: float) -> str:
    if kind == "time":
        return format_seconds(value)
    return format_flops(value) if kind == "flops" else format_bytes(value)


def _description(method: Method) -> str:
    """The options that differ from the method's usual ones."""
    usual = msgspec.to_builtins(type(method)())
    options = {name: value for name, value in msgspec.to_builtins(method).items() if value != usual[name]}
    return ", ".join(f"{name} = {value}" for name, value in options.items()) or "the default options"
