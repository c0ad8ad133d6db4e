"""Plans the grid of an experiment: complete configurations of every cell. It imports torch, which knows all options."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from coordinator.compute.planning.checks import checked_config
from fedvit.blobs import digest_of, digest_of_file
from fedvit.data.layout import PARTITION_FILE
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import name_failure
from fedvit.methods import make_method, method_class
from fedvit.wire.topics import check_name
from fleet.experiments.cells import SCHEMA, Deal, Grid, GridCell, NovelDevices, Rung, Search, SearchPoint
from fleet.experiments.settings import (
    PARTS,
    Experiment,
    ExperimentFile,
    TuningTable,
    divide_method,
    divide_named,
    list_points,
    read_tune,
)
from fleet.partition import GLOBAL_TEST, PartitionSummary
from fleet.partitions import make_partition
from fleet.request import SIMULATION_DEFAULTS
from profiles.report.experiment import Values

NOVEL_RUN_KEYS = ("model", "model_options")
"""Keys of a method's table that also hold for novel devices, whose run has no noise, codecs or robust aggregation."""

NOVEL_KEYS = ("accelerator", "deadline_s", "server_precision")
"""Keys of the table [run] that also hold for novel devices."""


class CellConfigs(NamedTuple):
    """Configurations of a cell's runs, without the seed."""

    training: dict[str, Any]
    novel: dict[str, Any] | None  # of novel devices, after it


class MethodPoint(NamedTuple):
    """A method with one combination of values to try; a method that is not tuned has one point, without values."""

    values: Values
    options: dict[str, Any]  # all of them, and the method's own name under "method"


class _Comparison(NamedTuple):
    """Cells of one method on one partition."""

    experiment: Experiment
    method: str
    partition: str
    rule: tuple[str, dict[str, Any]]  # the partition's kind and all its options
    weights_digest: str | UnsetType  # of the file of pretrained weights


def plan_grid(file: ExperimentFile) -> Grid:
    """Plan all cells of an experiment. Raises ConfigError naming file, key and what is allowed, and StorageFailed."""
    experiment, where = file.experiment, str(file.path)
    methods = _complete_methods(experiment, where)

    def plan_runs(name: str, point: MethodPoint) -> CellConfigs:
        return _plan_runs(experiment, name, point.options, f"{where}: [methods.{name}]")

    def make_runs(name: str, values: Values) -> CellConfigs:
        return plan_runs(name, _complete_method(experiment, name, values, f"{where}: [methods.{name}]"))

    runs = {name: [(point.values, plan_runs(name, point)) for point in points] for name, points in methods.items()}
    _check_novel_options(experiment, methods, where)
    rules = {name: _complete_partition(name, table, where) for name, table in experiment.partitions.items()}
    tuned = {name: read_tune(table) for name, table in experiment.methods.items()}
    pretrained = experiment.model.pretrained
    with name_failure(f"cannot read {pretrained}", StorageFailed, "FV1701"):
        weights = digest_of_file(Path(pretrained)) if isinstance(pretrained, str) else UNSET
    return Grid(
        name=file.path.stem,
        description=file.description,
        experiment=experiment,
        methods={name: {**points[0].options, **tuned[name]} for name, points in methods.items()},
        partitions={name: {**experiment.partitions[name], **options} for name, (_, options) in rules.items()},
        cells=tuple(
            _make_cell(_Comparison(experiment, method, partition, rule, weights), seed, points[0][1])
            for seed in experiment.seeds
            for partition, rule in rules.items()
            for method, points in runs.items()
            if not tuned[method]
        ),
        searches=tuple(
            _make_search(_Comparison(experiment, method, partition, rule, weights), points, partial(make_runs, method))
            for partition, rule in rules.items()
            for method, points in runs.items()
            if tuned[method]
        ),
    )


def plan_rungs(points: int, tuning: TuningTable, rounds: int) -> tuple[Rung, ...]:
    """Plan the steps of a search among `points` points in an experiment of `rounds` rounds; none for a single point.

    >>> plan_rungs(9, TuningTable(search="halving"), 30)
    (Rung(points=9, rounds=10), Rung(points=3, rounds=30))
    """
    keep = tuning.keep or 1 / 3
    counts = [points]
    while tuning.search == "halving" and (fewer := math.ceil(round(counts[-1] * keep, 9))) > 1:
        counts.append(fewer)
    longest = tuning.rounds or rounds
    return tuple(
        Rung(count, max(1, round(longest * keep**before)))
        for before, count in zip(reversed(range(len(counts))), counts, strict=True)
        if points > 1
    )


def _make_cell(
    comparison: _Comparison,
    seed: int,
    runs: CellConfigs,
    *,
    tried: Values | UnsetType = UNSET,
    validation_share: float | None = None,
) -> GridCell:
    experiment = comparison.experiment
    novel: NovelDevices | UnsetType = UNSET
    if experiment.novel:
        later = runs.novel if tried is UNSET else None
        novel = NovelDevices(devices=experiment.novel.devices, run=later)
    is_shown = tried is UNSET and seed == experiment.seeds[0]
    pictures = experiment.pictures if is_shown else None
    return GridCell(
        schema=SCHEMA,
        method=comparison.method,
        partition=comparison.partition,
        seed=seed,
        deal=_make_deal(comparison, seed, experiment.validation_share if tried is UNSET else validation_share),
        run={**runs.training, "seed": seed},
        engine=experiment.engine,
        precision=experiment.precision,
        weights_digest=comparison.weights_digest,
        tried=tried,
        novel=novel,
        attention=experiment.attention if pictures and experiment.attention != "mean" else UNSET,
        attacks=(experiment.attacks if is_shown else None) or UNSET,
        pictures=pictures or UNSET,
    )


def _make_deal(comparison: _Comparison, seed: int, validation_share: float | None) -> Deal:
    experiment, (kind, options) = comparison.experiment, comparison.rule
    deal = Deal(
        dataset=experiment.dataset,
        image_size=experiment.size[1],
        devices=experiment.devices,
        partition=kind,
        options=options,
        seed=seed,
        test_share=experiment.test_share,
        validation_share=validation_share,
        global_test=experiment.global_test,
        samples=experiment.samples,
        classes=experiment.classes,
        columns=experiment.columns,
    )
    return _use_parts(deal, str(options[PARTS])) if kind == PARTS else deal


def _use_parts(deal: Deal, template: str) -> Deal:
    """Use a folder that was dealt out before. Raises ConfigError for one that does not fit."""
    folder = Path(template.replace("{seed}", str(deal.seed)))
    note = folder / PARTITION_FILE
    try:
        content = note.read_bytes()
        summary = msgspec.json.decode(content, type=PartitionSummary)
    except OSError as error:
        raise ConfigError("FV2129", f"{PARTS} = {template!r}: cannot read {note}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError("FV2129", f"{PARTS} = {template!r}: {note} is not of this version: {error}") from None
    reason = None
    if len(summary.devices) != deal.devices:
        reason = f"has {len(summary.devices)} devices, the experiment {deal.devices}"
    elif summary.size != deal.image_size:
        reason = f"has samples of size {summary.size}, the experiment {deal.image_size}"
    elif deal.samples is not None or deal.classes is not None:
        reason = "was dealt out before, so samples and classes have no effect; leave them out"
    elif deal.validation_share is not None:
        reason = "cannot be divided for validation; remove validation_share and tune"
    elif deal.global_test is not None and not any((folder / GLOBAL_TEST).glob("*/*")):
        reason = f"has no images in {GLOBAL_TEST}; remove global_test"
    if reason:
        raise ConfigError("FV2129", f"{PARTS} = {template!r}: {folder} {reason}")
    return replace(deal, parts=str(folder), parts_digest=digest_of(content))


def _make_search(
    comparison: _Comparison, points: list[tuple[Values, CellConfigs]], make_runs: Callable[[Values], CellConfigs]
) -> Search:
    experiment = comparison.experiment
    tuning = experiment.tuning or TuningTable()
    rungs = plan_rungs(len(points), tuning, experiment.rounds)

    def tries(values: Values, runs: CellConfigs, rounds: int) -> tuple[GridCell, ...]:
        # only the last accuracy is used
        once = runs._replace(training={**runs.training, "rounds": rounds, "evaluate_every": rounds})
        share = tuning.validation_share
        return tuple(
            _make_cell(comparison, seed, once, tried=values, validation_share=share)
            for seed in tuning.seeds or experiment.seeds[:1]
        )

    def make(values: Values, runs: CellConfigs) -> SearchPoint:
        return SearchPoint(
            values,
            tuple(tries(values, runs, rung.rounds) for rung in rungs),
            tuple(_make_cell(comparison, seed, runs) for seed in experiment.seeds),
        )

    def make_point(values: Values) -> SearchPoint | None:
        try:
            return make(values, make_runs(values))
        except ConfigError:
            return None

    made = tuple(make(values, runs) for values, runs in points)
    return Search(comparison.method, comparison.partition, made, rungs, tuning.beyond, make_point)


def _complete_methods(experiment: Experiment, where: str) -> dict[str, list[MethodPoint]]:
    """Complete the options of every method, for all values to search among."""
    complete: dict[str, list[MethodPoint]] = {}
    for name, table in experiment.methods.items():
        check_name(name, f"{where}: the method")
        at = f"{where}: [methods.{name}]"
        points = list_points(divide_method(table, at).tune)
        complete[name] = [_complete_method(experiment, name, values, at) for values in points]
    used = {option for points in complete.values() for option in points[0].options}
    if unused := sorted(experiment.common.keys() - used):
        raise ConfigError("FV2107", f"{where}: [common]: none of the methods has an option {unused[0]!r}")
    return complete


def _complete_method(experiment: Experiment, name: str, values: Values, where: str) -> MethodPoint:
    """Complete a method's options for some values. Raises ConfigError."""
    method = divide_method(experiment.methods[name], where)
    try:
        own_options = {option.name for option in fields(method_class(method.kind))}
        common = {option: value for option, value in experiment.common.items() if option in own_options}
        made = make_method(method.kind, {**common, **method.options, **values})
    except ConfigError as error:
        raise ConfigError(error.code, f"{where}: {error}") from None
    return MethodPoint(values, {"method": method.kind, **asdict(made)})


def _plan_runs(experiment: Experiment, name: str, method: Mapping[str, Any], where: str) -> CellConfigs:
    """Plan complete configurations of a cell's runs, without the seed."""
    table = experiment.methods[name]
    keys = divide_method(table, where).run_keys
    options = {option: value for option, value in method.items() if option not in ("method", "novel")}
    novel = experiment.novel
    if method["novel"] and not novel:
        raise ConfigError("FV2107", f"{where}: novel = {method['novel']!r} needs a table [novel] with novel devices")
    every = {
        "method": method["method"],
        "model": experiment.model.name,
        "pretrained": experiment.model.pretrained,
        "images": msgspec.to_builtins(experiment.images),
    }
    own = {
        **every,
        "options": {**options, "novel": None},
        "rounds": experiment.rounds,
        "cohort": experiment.cohort,
        "devices": experiment.devices - (novel.devices if novel else 0),
        "evaluate_every": experiment.evaluate_every,
        **keys,
        "model_options": experiment.model_options(table),
    }
    if twice := sorted(experiment.run.keys() & {*own, "seed", "broker", "trackers"}):
        raise ConfigError("FV2107", f"{where}: [run]: {twice[0]!r} is not set here, but by the experiment")
    training = _complete_run({**experiment.run, **own}, where)
    if novel is None:
        return CellConfigs(training, None)
    later = {
        **{key: experiment.run[key] for key in NOVEL_KEYS if key in experiment.run},
        **every,
        "options": {**options, **{key: value for key, value in novel.options.items() if key in options}}
        | {"novel": method["novel"] or novel.learns},
        "rounds": novel.rounds,
        "devices": novel.devices,
        "evaluate_every": 1,
        **{key: keys[key] for key in NOVEL_RUN_KEYS if key in keys},
        "model_options": own["model_options"],
    }
    return CellConfigs(training, _complete_run(later, f"{where}: [novel]"))


def _complete_run(values: dict[str, Any], where: str) -> dict[str, Any]:
    config = checked_config({**SIMULATION_DEFAULTS, **values}, where).run
    return {key: value for key, value in msgspec.to_builtins(config).items() if key not in ("seed", "trackers")}


def _check_novel_options(experiment: Experiment, methods: Mapping[str, list[MethodPoint]], where: str) -> None:
    options = {option for points in methods.values() for point in points for option in point.options}
    unused = sorted(experiment.novel.options.keys() - options) if experiment.novel else []
    if unused:
        raise ConfigError("FV2107", f"{where}: [novel]: options: none of the methods has an option {unused[0]!r}")


def _complete_partition(name: str, table: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    check_name(name, f"{where}: the partition")
    at = f"{where}: [partitions.{name}]"
    if PARTS in table:
        if len(table) > 1 or not isinstance(table[PARTS], str):
            raise ConfigError("FV2107", f"{at}: {PARTS} = {table[PARTS]!r}: expected a folder's name, and no other key")
        return PARTS, table
    kind, options = divide_named(table, "partition", at)
    try:
        return kind, asdict(make_partition(kind, **options))
    except ConfigError as error:
        raise ConfigError(error.code, f"{at}: {error}") from None
