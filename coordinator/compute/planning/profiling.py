"""Predicts the cost of a run on boards of the catalogue, without devices.

Programs and graphs are made as a run makes them, so the same graphs are priced that devices would get.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from coordinator.compute.planning.checks import check_run
from coordinator.compute.planning.configuration_search import Choice, make_expected
from coordinator.compute.planning.forecast import BoardForecast, Forecast
from coordinator.compute.planning.planned_device import PlannedDevice
from coordinator.compute.planning.planner import Plan, find_method, make_plan
from coordinator.compute.planning.prediction_request import BoardMode, PredictionRequest
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import ConfigError, OverBudget
from fedvit.methods import METHODS, make_method, method_class
from fedvit.methods.base import Method, check_fits
from fedvit.program import Program
from fedvit.resources import Budget
from profiles.crosscheck import fvcore_check
from profiles.predict import Target, predict
from profiles.prediction import FlopShare, ProgramCost
from profiles.published import find_published
from profiles.report.document import ProfiledDevice, ProfileDocument, ProfiledVariant

SPLIT_OPTION = "local_blocks"
MASK_OPTION = "mask"
BOARD_FEATURE_BYTES = 4 << 30
"""Room for features of frozen layers on a board of the catalogue: a quarter of a card of 16 GB."""


def make_document(
    request: PredictionRequest,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> ProfileDocument:
    """Price all variants, and predict them on all boards. Raises ConfigError as a run's configuration does."""
    plan = _plan(request, progress)
    variants = []
    for options in _list_variants(request):
        cost = _price(request, plan, options, progress)
        variants.append(ProfiledVariant(label=_label(cost), cost=cost))
    devices = [_predict(target, variants, request.budget) for target in request.targets]
    published = {figure.figure: figure for variant in variants for figure in find_published(variant.cost)}
    return ProfileDocument(
        title=f"{request.config.method} on {request.config.model}",
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        software=f"fedvit {version('fedvit')}",
        images=request.images,
        test_images=request.test_images,
        variants=variants,
        devices=devices,
        published=list(published.values()),
        crosscheck=fvcore_check(plan.vit, variants[0].cost),
        warnings=_warnings(devices),
    )


def _plan(request: PredictionRequest, progress: Callable[[str], None], *, budgets: bool = False) -> Plan:
    """A plan of the first round; nothing of it is stored, and no weights are read, on which no cost depends."""
    check_run(request.config, "profile")
    config = msgspec.structs.replace(request.config, pretrained=False)
    classes = config.classes or tuple(f"class {number}" for number in range(request.classes))
    return make_plan(config, classes, BlobStore(Path(os.devnull)), budgets=budgets, progress=progress)


def _list_variants(request: PredictionRequest) -> list[dict[str, Any]]:
    """List the options of every variant. Raises ConfigError when the method has no split to vary."""
    method, options = request.config.method, request.config.options
    if request.splits and SPLIT_OPTION not in method_class(method).__dataclass_fields__:
        able = sorted(name for name, kind in METHODS.items() if SPLIT_OPTION in kind.__dataclass_fields__)
        raise ConfigError(
            "FV1101", f"--split: method {method!r} has no option {SPLIT_OPTION!r}; these have: {', '.join(able)}"
        )
    splits: Sequence[dict[str, Any]] = [{SPLIT_OPTION: split} for split in request.splits] or [{}]
    masks: Sequence[dict[str, Any]] = [{MASK_OPTION: mask} for mask in request.masks] or [{}]
    return [{**options, **split, **mask} for split in splits for mask in masks]


def _price(
    request: PredictionRequest, plan: Plan, options: dict[str, Any], progress: Callable[[str], None]
) -> ProgramCost:
    """The cost of one variant's Program."""
    method = make_method(request.config.method, options).in_round(1, request.config.rounds)
    check_fits(method, plan.vit)
    method.groups(plan.vit)  # says what does not fit the model
    named = ", ".join(f"{name} = {value}" for name, value in options.items())
    progress(f"pricing {named or request.config.method}")
    priced = plan.priced(method)
    cost = priced.cost(images=request.images, test_images=request.test_images, feature_bytes=BOARD_FEATURE_BYTES)
    return msgspec.structs.replace(cost, flops=[_mark(entry, priced.program) for entry in cost.flops])


def _mark(share: FlopShare, program: Program) -> FlopShare:
    """Return whether the device trains any tensor of the block; None if the block's name does not identify tensors."""
    if share.trained is not None:
        return share
    of_block = _BLOCK_TENSORS.get(share.block, re.escape(share.block.replace("block ", "blocks.")) + r"(\.|$)")
    members = [spec.group for name, spec in program.tensors.items() if re.match(of_block, name)]
    roles = [program.groups[group].role for group in members]
    trained = any(role.is_trained_on_device for role in roles) if roles else None
    return msgspec.structs.replace(share, trained=trained)


_BLOCK_TENSORS = {
    "embedding": r"(patch_embed|pos_embed|cls_token|reg_token)",
    "head": r"(head|norm|attn_pool|fc_norm)\b",
}
"""Tensors outside of blocks, by the prefix of their names."""


def _label(cost: ProgramCost) -> str:
    """The label of a variant: its mask ratio and its split, where these vary."""
    parts = []
    if cost.mask_ratio or SPLIT_OPTION in cost.options:
        parts.append(f"mask {cost.mask_ratio:g}")
    if SPLIT_OPTION in cost.options:
        parts.append(f"M={cost.options[SPLIT_OPTION]}")
    return ", ".join(parts) or cost.method


def _predict(target: BoardMode, variants: list[ProfiledVariant], wanted: Budget) -> ProfiledDevice:
    board, mode = target
    budget = board.budget().tightest(wanted)
    speed, power_w = board.speed(mode), board.power_w(mode)
    doubts = board.doubts(mode)
    warnings = [f"not verified in a source: {', '.join(doubts)}"] if doubts else []
    if not board.software.installs:
        warnings += list(board.software.notes)
    return ProfiledDevice(
        id=board.id,
        name=board.name,
        source="catalogue",
        mode=mode,
        budget=budget,
        predictions=[
            predict(variant.cost, speed, Target(board.id, "catalogue", mode, power_w), budget) for variant in variants
        ],
        warnings=warnings,
    )


class NothingFits(Struct, frozen=True, kw_only=True):
    """A device for which no configuration fits."""

    device: str
    budget: Budget
    refused: str  # the reason, with the smallest sufficient budget


def choose_configurations(
    request: PredictionRequest,
    *,
    progress: Callable[[str], None] = lambda line: None,
    use_graphs: Callable[[Iterable[str]], None] | None = None,
) -> list[Choice | NothingFits]:
    """The configuration of the method that a run would choose for each board.

    `use_graphs` is called with the digests of all graphs that a run needs for these boards, and for devices without
    budgets; making them takes a while.
    """
    plan = _plan(request, progress, budgets=True)
    method, targets = find_method(plan.config, "", 1), list(_list_targets(request))
    chosen: list[Choice | NothingFits] = []
    for target in targets:
        try:
            chosen.append(plan.search.find(method, target)[1])
        except OverBudget as error:
            chosen.append(NothingFits(device=target.device, budget=target.budget, refused=str(error)))
    if use_graphs:
        methods = dict.fromkeys(each for asked in _list_methods(plan) for each in _find_methods(plan, asked, targets))
        use_graphs({digest_of(graph.content) for each in methods for graph in plan.export(each).values()})
    return chosen


def _list_targets(request: PredictionRequest) -> Iterator[PlannedDevice]:
    wanted = request.budget.tightest(request.config.budget.limits())
    for board, mode in request.targets:
        yield PlannedDevice(
            device=board.id,
            speed=board.speed(mode),
            source="catalogue",
            mode=mode,
            budget=board.budget().tightest(wanted),
            images=request.images,
            test_images=request.test_images,
            power_w=board.power_w(mode),
            feature_bytes=BOARD_FEATURE_BYTES,
        )


def _list_methods(plan: Plan) -> Iterable[Method]:
    """List the methods of all devices and rounds, each once."""
    devices, rounds = ("", *plan.config.variants), range(1, plan.config.rounds + 1)
    return dict.fromkeys(find_method(plan.config, device, number) for device in devices for number in rounds)


def _find_methods(plan: Plan, asked: Method, targets: Iterable[PlannedDevice]) -> Iterator[Method]:
    """Yield the methods that devices get for one that is asked for: by their budgets and their speed."""
    for method in (asked, replace(asked, compute="fp32")):
        yield method
        for target in targets:
            with suppress(OverBudget):  # it is left out
                yield plan.search.find(method, target)[0]


def forecast_of(request: PredictionRequest, chosen: Sequence[Choice | NothingFits]) -> Forecast:
    """Return what `choose_configurations` found for the boards of a request."""
    names = [f"{board.id}@{mode}" if mode else board.id for board, mode in request.targets]
    return Forecast(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        images=request.images,
        test_images=request.test_images,
        boards=[
            BoardForecast(board=name, budget=each.budget, expected=None, refused=each.refused)
            if isinstance(each, NothingFits)
            else BoardForecast(
                board=name,
                budget=each.budget,
                expected=make_expected(each.chosen, each.cost, each.budget),
                refused=None,
            )
            for name, each in zip(names, chosen, strict=True)
        ],
    )


def _warnings(devices: list[ProfiledDevice]) -> list[str]:
    warnings = [
        "Speeds are the catalogue's: shares of the processor's peak that were published for training on a few boards. "
        "Expect errors of tens of percent; a device that joins measures its own."
    ]
    predictions = [prediction for device in devices for prediction in device.predictions]
    if any(prediction.energy_j is not None for prediction in predictions):
        warnings.append("Energy is modelled: training time x power under load.")
    if any(prediction.energy_j is None for prediction in predictions):
        warnings.append("Energy is not known where the catalogue has no power of the board.")
    return warnings
