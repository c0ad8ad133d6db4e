"""Which form of a method fits a device: the one that keeps the most of what counts, inside the device's budget.

Options that a method may give up (`Method.economies`) span a grid. Its points are priced on their own graphs, the
least harmful first, until one fits. How many images a device works off at a time is chosen for each of them, since it
changes nothing but memory and time.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from coordinator.planning.target import Target
from fedvit.errors import OverBudget
from fedvit.methods.base import Economy, Method
from fedvit.models.vit import PatchViT
from fedvit.program import Batch
from fedvit.quantities import format_bytes, format_flops, format_seconds
from fedvit.resources import Budget, BudgetKind, image_cache_bytes
from profiles.predict import predict
from profiles.prediction import Prediction, ProgramCost
from profiles.program_cost import PricedProgram

MOST_PRICED = 32
"""Forms that are priced for one device before the search ends."""
RUNNERS_UP = 2
HEADROOM = 0.88
"""Part of a memory budget that a prediction may fill: predictions are right within some 15 %."""


class Form(Struct, frozen=True, kw_only=True):
    """One form of the method, and what it would cost."""

    changes: dict[str, Any]  # options other than those that were asked for
    kept: float  # share of what counts for accuracy, 1 as asked for
    prediction: Prediction


class Choice(Struct, frozen=True, kw_only=True):
    """What a device gets, and what else was looked at."""

    device: str
    budget: Budget
    chosen: Form
    cost: ProgramCost
    rejected: list[Form]  # that would keep as much or more, but do not fit
    runners_up: list[Form]  # that fit, too, but keep less or take longer


class Priced(NamedTuple):
    """A form with what it was made of."""

    method: Method
    form: Form
    cost: ProgramCost

    @property
    def over(self) -> tuple[BudgetKind, ...]:
        return self.form.prediction.over


@dataclass(frozen=True)
class Fitter:
    """Fits one run's method to devices; graphs that were priced once are not priced again."""

    vit: PatchViT
    batch_of: Callable[[Method], Batch]
    price: Callable[[Method], PricedProgram]
    progress: Callable[[str], None]
    allowed: Callable[[Method], bool] = lambda method: True
    priced: dict[Method, PricedProgram] = field(default_factory=dict)  # those that were traced, and those alike

    def fit(self, method: Method, target: Target) -> tuple[Method, Choice]:
        """The form that keeps the highest share and fits; of equal ones the fastest.

        Raises OverBudget, with the smallest budget that would do, where none fits.
        """
        economies = self._possible(method)
        asked = self._form(method, {}, 1.0, target)
        looked_at = [asked]
        if asked.over:
            looked_at += self._smallest(method, economies, asked, target)
            looked_at += self._search(method, economies, asked, target)
        fitting = [priced for priced in looked_at if not priced.over]
        if not fitting:
            raise OverBudget(_too_small(target, looked_at))
        fitting.sort(key=lambda priced: (-priced.form.kept, priced.form.prediction.train_s or 0.0))
        chosen = fitting[0]
        rejected = [priced.form for priced in looked_at if priced.over and priced.form.kept >= chosen.form.kept]
        return chosen.method, Choice(
            device=target.device,
            budget=target.budget,
            chosen=chosen.form,
            cost=chosen.cost,
            rejected=rejected,
            runners_up=[priced.form for priced in fitting[1 : 1 + RUNNERS_UP]],
        )

    def _possible(self, method: Method) -> list[Economy]:
        """What may be given up here: not what would need other tensors than the server holds."""
        possible = []
        for economy in method.economies(self.vit):
            values = tuple(
                (value, share)
                for value, share in economy.values
                if self.allowed(replace(method, **{economy.option: value}))
            )
            possible += [economy._replace(values=values)] if values else []
        return possible

    def _search(self, method: Method, economies: Sequence[Economy], asked: Priced, target: Target) -> Iterator[Priced]:
        """Forms that keep less and less, until some fit.

        What several changes save together is estimated from what each saves alone, so that few forms are priced.
        """
        kinds = set(asked.over)
        alone: dict[tuple[str, Any], list[Priced]] = {}
        least = self._least(method, {}, 1.0, target)
        found = count = 0
        best = 0.0
        for changes, kept in grid(economies):
            if not changes or not self._may_help(economies, changes, kinds):
                continue
            if count == MOST_PRICED or found > RUNNERS_UP or (found and kept < best / 2):
                return
            singles = [alone[item] for item in changes.items() if item in alone]
            if len(changes) > 1 and len(singles) == len(changes) and _hopeless(least, singles, target):
                continue
            count += 1
            priced = self._form(method, changes, kept, target)
            if len(changes) == 1:
                [item] = changes.items()
                alone[item] = self._least(method, changes, kept, target)
            kinds.update(priced.over)
            if not priced.over:
                found += 1
                best = max(best, kept)
            yield priced

    def _least(self, method: Method, changes: dict[str, Any], kept: float, target: Target) -> list[Priced]:
        """A form as it may become, one of which needs the least of any kind that a form of these changes can.

        One image at a time needs the least memory, but more time.
        """
        changed = replace(method, **changes)
        budget = target.budget
        if budget.memory_bytes is None or not changed.one_gradient:
            return [self._priced(changed, changes, kept, target)]
        forms = [self._priced(changed, {**changes, "micro_batch": 1}, kept, target)]
        if budget.flops_per_round is not None or budget.round_deadline_s is not None:
            forms.append(self._priced(changed, changes, kept, target))
        return forms

    @staticmethod
    def _may_help(economies: Sequence[Economy], changes: dict[str, Any], kinds: set[BudgetKind]) -> bool:
        """Whether each change saves something that there is too little of."""
        return all(economy.helps & kinds for economy in economies if economy.option in changes)

    def _smallest(
        self, method: Method, economies: Sequence[Economy], asked: Priced, target: Target
    ) -> Iterator[Priced]:
        """For each kind that there is too little of, forms that need about the least of it.

        Raises OverBudget where these need too much, too.
        """
        found: list[Priced] = []
        for kind in asked.over:
            helping = [economy for economy in economies if kind in economy.helps]
            forms = self._extreme(method, helping, target)
            for economy in helping:  # what helps large models may cost a small one more than it saves
                if _needed(kind, forms) <= _limit(kind, target.budget):
                    break
                others = [other for other in helping if other is not economy]
                without = self._extreme(method, others, target)
                if _needed(kind, without) < _needed(kind, forms):
                    helping, forms = others, without
            found += forms
        if any(_needed(kind, found) > _limit(kind, target.budget) for kind in asked.over):
            raise OverBudget(_too_small(target, self._with_room(found, target)))
        yield from found

    def _with_room(self, forms: list[Priced], target: Target) -> list[Priced]:
        """The same forms as they are with a memory budget that is just enough: then more images are kept decoded."""
        if target.budget.memory_bytes is None:
            return forms
        while True:
            needed = _needed("memory", forms)
            enough = target._replace(budget=msgspec.structs.replace(target.budget, memory_bytes=int(needed)))
            again = []
            for method, form, _ in forms:
                cost = cost_on(enough, self.program_of(method))
                again.append(Priced(method, self.form(cost, form.changes, form.kept, target), cost))
            if _needed("memory", again) <= needed:
                return again
            forms = again

    def _extreme(self, method: Method, economies: Sequence[Economy], target: Target) -> list[Priced]:
        """As much given up as can be."""
        changes = {economy.option: economy.values[-1][0] for economy in economies}
        return self._least(method, changes, prod(economy.values[-1][1] for economy in economies), target)

    def _form(self, method: Method, changes: dict[str, Any], kept: float, target: Target) -> Priced:
        """Price one form, with as many images at a time as its memory budget bears."""
        changed = replace(method, **changes)
        usual = self.batch_of(changed).run_size
        limit = target.budget.memory_bytes
        if limit is None or usual == 1 or not changed.one_gradient:
            return self._priced(changed, changes, kept, target)
        least = self._priced(changed, {**changes, "micro_batch": 1}, kept, target)
        if "memory" in least.over:
            return least
        first = self._priced(changed, changes, kept, target)
        if "memory" not in first.over:
            return first
        # memory grows evenly with the images of a run
        one, many = (priced.form.prediction.peak_rss_bytes for priced in (least, first))
        per_image = max(1.0, (many - one) / (usual - 1))
        size = 1 + int((HEADROOM * limit - one) / per_image)
        for run_size in (size, size - 1):
            if 1 < run_size < usual:
                middle = self._priced(changed, {**changes, "micro_batch": run_size}, kept, target)
                if "memory" not in middle.over:
                    return middle
        return least

    def _priced(self, method: Method, changes: dict[str, Any], kept: float, target: Target) -> Priced:
        method = replace(method, **{name: value for name, value in changes.items() if name == "micro_batch"})
        cost = cost_on(target, self.program_of(method))
        return Priced(method, self.form(cost, changes, kept, target), cost)

    def form(self, cost: ProgramCost, changes: dict[str, Any], kept: float, target: Target) -> Form:
        """What a device may expect."""
        limit = target.budget.memory_bytes
        prediction = predict(
            cost,
            target.speed,
            device=target.device,
            source=target.source,
            mode=target.mode,
            budget=msgspec.structs.replace(
                target.budget, memory_bytes=None if limit is None else int(HEADROOM * limit)
            ),
            power_w=target.power_w,
            base_rss_bytes=target.base_rss_bytes,
            corrections=dict(target.corrections),
        )
        return Form(changes=changes, kept=kept, prediction=prediction)

    def program_of(self, method: Method) -> PricedProgram:
        """The method's Program; options that no graph depends on need no other graphs."""
        if method not in self.priced:
            alike = method.as_traced()
            if alike not in self.priced:
                self.progress(f"pricing {_said(alike)}")
                self.priced[alike] = self.price(alike)
            of_alike = self.priced[alike]
            program = msgspec.structs.replace(of_alike.program, train=method.phases(self.vit))
            self.priced[method] = PricedProgram(program, msgspec.to_builtins(method), of_alike.graphs)
        return self.priced[method]


def cost_on(target: Target, priced: PricedProgram) -> ProgramCost:
    """What a Program costs on the images of a device."""
    return priced.cost(
        images=target.images,
        test_images=target.test_images,
        cache_bytes=image_cache_bytes(target.budget.memory_bytes if target.budget_is_own else None),
    )


def grid(economies: Sequence[Economy]) -> Iterator[tuple[dict[str, Any], float]]:
    """All combinations of options, those that keep the most first; of equal ones those with fewer changes.

    >>> mask = Economy("mask", frozenset({"time"}), ((0.8, 0.8), (0.9, 0.4)))
    >>> again = Economy("recompute", frozenset({"memory"}), ((True, 1.0),))
    >>> [(changes, kept) for changes, kept in grid([again, mask])][:3]
    [({}, 1.0), ({'recompute': True}, 1.0), ({'mask': 0.8}, 0.8)]
    """
    start = (0,) * len(economies)
    waiting = [(-1.0, 0, start)]
    seen = {start}
    while waiting:
        negative, _, places = heapq.heappop(waiting)
        taken = {e.option: e.values[place - 1][0] for e, place in zip(economies, places, strict=True) if place}
        yield taken, -negative
        for axis, economy in enumerate(economies):
            further = (*places[:axis], places[axis] + 1, *places[axis + 1 :])
            if places[axis] < len(economy.values) and further not in seen:
                seen.add(further)
                kept = 1.0
                for each, place in zip(economies, further, strict=True):
                    kept *= each.values[place - 1][1] if place else 1.0
                heapq.heappush(waiting, (-kept, sum(place > 0 for place in further), further))


NEARLY = 1.03
"""How far an estimate of several changes together may be above a budget for their form to be priced."""


def _hopeless(least: Sequence[Priced], singles: Sequence[Sequence[Priced]], target: Target) -> bool:
    """Whether changes that save so much each will be too little together: bytes add up, work is multiplied."""
    for kind in dict.fromkeys(kind for forms in (least, *singles) for priced in forms for kind in priced.over):
        start = _needed(kind, least)
        needs = [_needed(kind, single) for single in singles]
        if kind in ("memory", "upload"):
            together = start - sum(start - need for need in needs)
        else:
            together = start * prod(need / start for need in needs) if start else 0.0
        if together > NEARLY * _limit(kind, target.budget):
            return True
    return False


def _too_small(target: Target, looked_at: Sequence[Priced]) -> str:
    """What a device lacks, and the smallest budgets that would do."""
    lacking = list(dict.fromkeys(kind for priced in looked_at for kind in priced.over))
    # where each alone would do, it is both at once that nothing fits
    lacking = [kind for kind in lacking if _needed(kind, looked_at) > _limit(kind, target.budget)] or lacking
    said = []
    for kind in lacking:
        needed = _needed(kind, looked_at)
        # shown with three digits, never less than is needed
        said.append(
            f"{_NAMES[kind]} is {_shown(kind, _limit(kind, target.budget))}, at least {_shown(kind, 1.005 * needed)}"
        )
    return f"nothing fits {target.device}: its " + "; its ".join(f"{text} would be needed" for text in said)


_NAMES: dict[BudgetKind, str] = {
    "memory": "memory budget", "flops": "FLOPs budget per round", "time": "round deadline", "upload": "upload budget",
}  # fmt: skip


def _needed(kind: BudgetKind, forms: Sequence[Priced]) -> float:
    """The least budget with which one of them would do."""

    def needed(priced: Priced) -> float:
        prediction, cost = priced.form.prediction, priced.cost
        return {
            "memory": math.ceil(prediction.peak_rss_bytes / HEADROOM),
            "flops": cost.flops_round,
            "time": prediction.train_s or 0.0,
            "upload": cost.bytes_up,
        }[kind]

    return min(needed(priced) for priced in forms)


def _limit(kind: BudgetKind, budget: Budget) -> float:
    limits = {
        "memory": budget.memory_bytes,
        "flops": budget.flops_per_round,
        "time": budget.round_deadline_s,
        "upload": budget.upload_bytes,
    }
    return float(limits[kind] or 0.0)


def _shown(kind: BudgetKind, value: float) -> str:
    if kind == "time":
        return format_seconds(value)
    return format_flops(value) if kind == "flops" else format_bytes(value)


def _said(method: Method) -> str:
    """The options that differ from the method's usual ones."""
    usual = msgspec.to_builtins(type(method)())
    options = {name: value for name, value in msgspec.to_builtins(method).items() if value != usual[name]}
    return ", ".join(f"{name} = {value}" for name, value in options.items()) or "the method as it is"
