"""Experiments: TOML files that describe a grid of methods, partitions and seeds.

A method's table may list values for some options: each partition then has a search, whose cells train and validate on
training images alone, and the method's own cells have the values that the search chose.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from coordinator.config import ImageConfig, TrackersConfig, check_new_names, read_toml
from coordinator.views.trackers.writers import check_writers
from fedvit.blobs import digest_of
from fedvit.choices import did_you_mean, known_are
from fedvit.errors import ConfigError
from fedvit.known_names import check_names
from fedvit.roles import Novel, ProductPrecision
from fedvit.wire.topics import check_name
from fleet.clusters.resources import RayTable
from fleet.datasets import check_dataset
from fleet.partitions import make_partition
from fleet.simulate import DEFAULTS, Engine

SCHEMA = 2
"""Version of what an experiment writes; another one makes every cell run again."""

RUN_KEYS = ("updates", "privacy", "robust", "model", "model_options", "cohort")
"""Keys of a method's table that are those of a run's configuration, in place of the experiment's: codecs, noise, robust
aggregation, the model, and the devices of a round. `model_options` are over the experiment's, one by one."""

NOVEL_RUN_KEYS = ("model", "model_options")
"""Those of them that also hold for novel devices, whose run has no noise, no codecs and no robust aggregation."""

NOVEL_KEYS = ("accelerator", "deadline_s", "server_precision")
"""Likewise keys of the table [run]."""

TUNE = "tune"
"""Key of a method's table: options, each with the values to try. A text is FedBABU's option of the same name."""

Values = dict[str, Any]
"""Some options of a method; of a search, those that are tuned."""

Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ModelTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [model]."""

    name: str = "vit_small_images"
    options: dict[str, Any] = field(default_factory=dict)
    pretrained: bool | str = False


class TuningTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [tuning]: how values are searched for."""

    search: Literal["grid", "halving"] = "grid"
    validation_share: Annotated[float, Meta(gt=0, lt=1)] = 0.2  # of each class of a device's training images
    rounds: Annotated[int, Meta(ge=1)] | None = None  # of the longest runs of a search; None: the experiment's
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1)] | None = None  # None: the first of the experiment's
    keep: Annotated[float, Meta(gt=0, le=0.5)] | None = None  # share of points in the next rung; None: a third


class NovelTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [novel]: devices that join after the training, and learn their own part alone."""

    devices: Annotated[int, Meta(ge=1)]  # of the experiment's, left out of the training
    rounds: Annotated[int, Meta(ge=1)] = 1  # in which all of them learn
    learns: Novel = (
        "own"  # in place of it, a method's own option `novel`; generator: it learns from them, if there is one
    )
    options: dict[str, Any] = field(default_factory=dict)  # in these rounds, of every method that has them


class Experiment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of an experiment's file."""

    dataset: str
    image_size: Annotated[int, Meta(ge=1)] | None = None  # side of the pictures as dealt out, and of the model's input
    context: Annotated[int, Meta(ge=1)] | None = None  # instead, of a text: characters of a sample
    devices: Annotated[int, Meta(ge=1)]
    rounds: Annotated[int, Meta(ge=1)]
    cohort: Annotated[float, Meta(gt=0, le=1)] | Annotated[int, Meta(ge=1)] = 1.0
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1)] = (0, 1, 2)
    evaluate_every: Annotated[int, Meta(ge=1)] = 1
    test_share: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    global_test: Annotated[float, Meta(gt=0, lt=1)] | None = None  # of each class, for the server's model; no device's
    model: ModelTable = field(default_factory=ModelTable)
    images: ImageConfig = field(default_factory=ImageConfig)
    partitions: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]  # name -> partition and its options
    methods: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]  # name -> method, its options, RUN_KEYS, TUNE
    common: dict[str, Any] = field(default_factory=dict)  # options of every method that has them
    tuning: TuningTable | None = None
    novel: NovelTable | None = None
    pictures: Annotated[int, Meta(ge=1)] | None = None  # devices of whose models the report shows the attention
    reference: str | None = None  # method to which differences are given; None: the first
    target_accuracy: Annotated[float, Meta(gt=0, le=1)] | None = None  # rounds until it is reached are reported
    late_rounds: Annotated[int, Meta(ge=1)] | None = None  # last rounds whose evaluations are averaged
    run: dict[str, Any] = field(default_factory=dict)  # other keys of a run's configuration
    engine: Engine = "onnx"  # what computes the devices' part
    precision: ProductPrecision = "fp32"  # of products, in the torch engine
    trackers: TrackersConfig = field(default_factory=TrackersConfig)  # where they are written; no outcome depends on it
    ray: RayTable = field(default_factory=RayTable)  # what a cell needs of a node, with --ray; likewise


class Deal(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a data set is dealt out; cells with an equal one share their device folders."""

    dataset: str
    image_size: int  # of a text its context
    devices: int
    partition: str
    options: dict[str, Any]  # all of them
    seed: int
    test_share: float
    validation_share: float | None = None  # of a search: devices test with this share of their training images
    global_test: float | None = None

    @property
    def digest(self) -> str:
        return digest_of(msgspec.json.encode(self, order="deterministic"))


class NovelDevices(Struct, frozen=True, kw_only=True):
    """The devices that a cell leaves out of its run, and the run in which they learn their own part after it."""

    devices: int
    run: dict[str, Any] | None  # its whole configuration but for what the first run's end gives; None: of a search


class Cell(Struct, frozen=True, kw_only=True):
    """One run of the grid, with all settings that its outcome depends on."""

    schema: int
    method: str  # as the file calls it
    partition: str
    seed: int
    deal: Deal
    run: dict[str, Any]  # a run's whole configuration
    engine: Engine = "onnx"
    precision: ProductPrecision = "fp32"
    tried: Values | UnsetType = UNSET  # of a search: the values that this cell tries
    novel: NovelDevices | UnsetType = UNSET
    pictures: int | UnsetType = UNSET  # devices of whose models the attention is drawn; embeddings are drawn, too

    @property
    def digest(self) -> str:
        return digest_of(msgspec.json.encode(self, order="deterministic"))

    @property
    def path(self) -> str:
        place = f"{self.method}/{self.partition}"
        if self.tried is not UNSET:
            place = f"{place}/search/{as_text(self.tried)}/rounds-{self.rounds}"
        return f"{place}/seed-{self.seed}"

    @property
    def rounds(self) -> int:
        return int(self.run["rounds"])


class Runs(NamedTuple):
    """Configurations of a cell's runs, without the seed."""

    training: dict[str, Any]
    novel: dict[str, Any] | None  # of novel devices, after it


class Point(NamedTuple):
    """Values that a search may choose."""

    values: Values
    tries: tuple[tuple[Cell, ...], ...]  # by rung, a cell for each seed of the search
    cells: tuple[Cell, ...]  # the method's own, for each seed of the experiment, when these values are chosen


class Rung(NamedTuple):
    """One step of a search: the number of points that are still tried, and rounds of each."""

    points: int
    rounds: int


class Search(NamedTuple):
    """The search for one method's values on one partition."""

    method: str
    partition: str
    points: tuple[Point, ...]
    rungs: tuple[Rung, ...]


class Grid(NamedTuple):
    """A checked experiment and its cells, seed by seed, so that whole comparisons are complete early."""

    name: str
    description: str  # the file's leading comment
    experiment: Experiment
    methods: dict[str, dict[str, Any]]  # name -> method and all its options; of one that is tuned, all its values
    cells: tuple[Cell, ...]  # of methods that are not tuned
    searches: tuple[Search, ...]


def read_grid(file: Path, dataset: str | None = None) -> Grid:
    """Read and check an experiment; `dataset` is in place of the file's.

    Raises ConfigError naming the file, the key and what is allowed.
    """
    experiment = _experiment({**read_toml(file), **({"dataset": dataset} if dataset else {})}, str(file))
    check_name(file.stem, f"{file}: the experiment's name")
    tuning = _tuning(experiment, str(file))
    if (experiment.image_size is None) == (experiment.context is None):
        raise ConfigError(
            f"{file}: expected image_size, the side of images, or context, the characters of a sample of text"
        )
    for key, seeds in (("seeds", experiment.seeds), ("[tuning]: seeds", tuning.seeds or ())):
        if len(set(seeds)) != len(seeds):
            raise ConfigError(f"{file}: {key} = {list(seeds)}: a seed is listed more than once")
    try:
        check_dataset(experiment.dataset)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    check_writers(experiment.trackers, f"{file}: [trackers]")
    if experiment.reference is not None and experiment.reference not in experiment.methods:
        hint = known_are(experiment.reference, list(experiment.methods), "methods are")
        raise ConfigError(f"{file}: reference = {experiment.reference!r} is no method of the file{hint}")
    if experiment.novel and experiment.novel.devices >= experiment.devices:
        raise ConfigError(
            f"{file}: [novel]: devices = {experiment.novel.devices} leaves none of the experiment's"
            f" {experiment.devices} devices for the training"
        )
    experiment.ray.check(list(experiment.methods), list(experiment.partitions), str(file))
    methods = _methods(experiment, str(file))
    runs = {
        name: [
            (values, _runs(experiment, method, _run_keys(experiment.methods[name]), f"{file}: [methods.{name}]"))
            for values, method in points
        ]
        for name, points in methods.items()
    }
    _check_novel_options(experiment, methods, str(file))
    rules = {name: _partition(name, table, str(file)) for name, table in experiment.partitions.items()}
    searched = {name for name, table in experiment.methods.items() if _tune(table)}
    return Grid(
        name=file.stem,
        description=_leading_comment(file),
        experiment=experiment,
        methods={name: {**points[0][1], **_tune(experiment.methods[name])} for name, points in methods.items()},
        cells=tuple(
            _cell(experiment, method, partition, rule, seed, points[0][1])
            for seed in experiment.seeds
            for partition, rule in rules.items()
            for method, points in runs.items()
            if method not in searched
        ),
        searches=tuple(
            _search(experiment, tuning, method, partition, rule, points)
            for partition, rule in rules.items()
            for method, points in runs.items()
            if method in searched
        ),
    )


def _cell(
    experiment: Experiment, method: str, partition: str, rule: tuple[str, dict[str, Any]], seed: int,
    runs: Runs, *, tried: Values | UnsetType = UNSET, validation_share: float | None = None,
) -> Cell:  # fmt: skip
    kind, options = rule
    novel: NovelDevices | UnsetType = UNSET
    if experiment.novel:
        later = runs.novel if tried is UNSET else None
        novel = NovelDevices(devices=experiment.novel.devices, run=later)
    pictures = experiment.pictures if tried is UNSET and seed == experiment.seeds[0] else None
    return Cell(
        schema=SCHEMA,
        method=method,
        partition=partition,
        seed=seed,
        deal=Deal(
            dataset=experiment.dataset,
            image_size=_size(experiment)[1],
            devices=experiment.devices,
            partition=kind,
            options=options,
            seed=seed,
            test_share=experiment.test_share,
            validation_share=validation_share,
            global_test=experiment.global_test,
        ),
        run={**runs.training, "seed": seed},
        engine=experiment.engine,
        precision=experiment.precision,
        tried=tried,
        novel=novel,
        pictures=pictures or UNSET,
    )


def _search(
    experiment: Experiment,
    tuning: TuningTable,
    method: str,
    partition: str,
    rule: tuple[str, dict[str, Any]],
    points: list[tuple[Values, Runs]],
) -> Search:
    rungs = search_rungs(len(points), tuning, experiment.rounds)

    def tries(values: Values, runs: Runs, rounds: int) -> tuple[Cell, ...]:
        # only the last accuracy is used
        once = runs._replace(training={**runs.training, "rounds": rounds, "evaluate_every": rounds})
        share = tuning.validation_share
        return tuple(
            _cell(experiment, method, partition, rule, seed, once, tried=values, validation_share=share)
            for seed in tuning.seeds or experiment.seeds[:1]
        )

    return Search(
        method,
        partition,
        tuple(
            Point(
                values,
                tuple(tries(values, runs, rung.rounds) for rung in rungs),
                tuple(_cell(experiment, method, partition, rule, seed, runs) for seed in experiment.seeds),
            )
            for values, runs in points
        ),
        rungs,
    )


def search_rungs(points: int, tuning: TuningTable, rounds: int) -> tuple[Rung, ...]:
    """The steps of a search among `points` points in an experiment of `rounds` rounds; none for a single point.

    >>> search_rungs(9, TuningTable(search="halving"), 30)
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


def as_text(values: Values) -> str:
    """
    >>> as_text({"lr": 1e-06, "optimizer": "sgd", "adaptive": True})
    'lr=1e-06,optimizer=sgd,adaptive=true'
    """
    return ",".join(
        f"{option}={str(value).lower() if isinstance(value, bool) else value}" for option, value in values.items()
    )


def _experiment(values: dict[str, Any], where: str) -> Experiment:
    tables = (
        (values, Experiment, ""),
        (values.get("model"), ModelTable, " [model]"),
        (values.get("tuning"), TuningTable, " [tuning]"),
        (values.get("novel"), NovelTable, " [novel]"),
        (values.get("ray"), RayTable, " [ray]"),
    )
    for table, kind, at in tables:
        known = kind.__struct_fields__
        for key in table if isinstance(table, dict) else ():
            if key not in known:
                hint = did_you_mean(key, known, most=1) or f"; known keys are {', '.join(known)}"
                raise ConfigError(f"{where}{at}: unknown key {key!r}{hint}")
    try:
        return msgspec.convert(values, Experiment)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).rpartition(" - at `$")
        if not reason:
            raise ConfigError(f"{where}: {error}") from None
        key = path.strip(".`")
        value = values.get(key)
        given = f" = {value!r}" if value is not None and not isinstance(value, dict) else ""
        raise ConfigError(f"{where}: {key}{given}: {reason.lower().replace('`object`', 'a table')}") from None


def _tuning(experiment: Experiment, where: str) -> TuningTable:
    tuned = any(map(_tune, experiment.methods.values()))
    if experiment.tuning and not tuned:
        raise ConfigError(f"{where}: [tuning]: none of the methods has a table {TUNE!r} of values to search among")
    tuning = experiment.tuning or TuningTable()
    if tuning.keep is not None and tuning.search != "halving":
        raise ConfigError(f"{where}: [tuning]: keep = {tuning.keep} is for search = 'halving', not {tuning.search!r}")
    return tuning


def _methods(experiment: Experiment, where: str) -> dict[str, list[tuple[Values, dict[str, Any]]]]:
    """Of each method, for all values to search among: the method's own name, under "method", and all of its
    options. A method that is not tuned has one entry, without values."""
    for name, table in experiment.methods.items():
        _check_names(experiment, table, f"{where}: [methods.{name}]")
    from fedvit.methods import make_method, method_class  # imports torch, which takes seconds: after the check of names

    used: set[str] = set()
    complete: dict[str, list[tuple[Values, dict[str, Any]]]] = {}
    for name, table in experiment.methods.items():
        check_name(name, f"{where}: the method")
        at = f"{where}: [methods.{name}]"
        kind, own, _ = _parts(table, at)
        try:
            has = {option.name for option in fields(method_class(kind))}
            common = {option: value for option, value in experiment.common.items() if option in has}
            used |= common.keys()
            complete[name] = [
                (values, {"method": kind, **asdict(make_method(kind, {**common, **own, **values}))})
                for values in _points(table)
            ]
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from None
    if unused := sorted(experiment.common.keys() - used):
        raise ConfigError(f"{where}: [common]: none of the methods has an option {unused[0]!r}")
    return complete


def _points(table: dict[str, Any]) -> list[Values]:
    """All combinations of the values to try, in which the last option changes first; one empty one without values.

    >>> _points({"tune": {"lr": [0.1, 0.2], "mu": [1, 2]}})[:3]
    [{'lr': 0.1, 'mu': 1}, {'lr': 0.1, 'mu': 2}, {'lr': 0.2, 'mu': 1}]
    """
    tune = _tune(table)
    return [dict(zip(tune, values, strict=True)) for values in product(*tune.values())]


def _tune(table: dict[str, Any]) -> dict[str, list[Any]]:
    found = table.get(TUNE)
    return found if isinstance(found, dict) else {}


def _parts(table: dict[str, Any], where: str) -> tuple[str, dict[str, Any], dict[str, list[Any]]]:
    """Of a method's table: the method, the options that are set, and those that are tuned."""
    kind, own = _named(table, "method", where)
    check_new_names(own, where)
    tune = _tune(table)
    excluded = {*RUN_KEYS, *([TUNE] if tune else ())}
    return kind, {key: value for key, value in own.items() if key not in excluded}, tune


def _check_names(experiment: Experiment, table: dict[str, Any], where: str) -> None:
    kind, own, tune = _parts(table, where)
    model, options = table.get("model", experiment.model.name), _model_options(experiment, table)
    try:
        _check_tune(tune, own)
        check_names(kind, own.keys() | tune.keys(), str(model), options if isinstance(options, dict) else ())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_tune(tune: dict[str, Any], own: dict[str, Any]) -> None:
    if isinstance(given := own.get(TUNE), list | dict):
        raise ConfigError(f"{TUNE} = {given!r}: expected a table of options, each with a list of values")
    for option, values in tune.items():
        at = f"{TUNE}: {option} = {values!r}"
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{at}: expected a list of values to search among")
        for value in values:
            if not isinstance(value, int | float | str):
                raise ConfigError(f"{at}: {value!r} is neither a number nor a name")
            if isinstance(value, str):
                check_name(value, at)  # it becomes part of a folder's name
            if values.count(value) > 1:
                raise ConfigError(f"{at}: {value!r} is listed more than once")
        if option in own:
            raise ConfigError(f"option {option} = {own[option]!r} is set and also to be tuned; keep one of the two")


def _size(experiment: Experiment) -> tuple[str, int]:
    """The model's option for the size of a sample, and its value."""
    if experiment.context is not None:
        return "context", experiment.context
    assert experiment.image_size is not None  # `read_grid` wants one of them
    return "image_size", experiment.image_size


def _run_keys(table: dict[str, Any]) -> dict[str, Any]:
    """A method may be listed several times, with other codecs, another noise or another model."""
    return {key: table[key] for key in RUN_KEYS if key in table}


def _model_options(experiment: Experiment, keys: dict[str, Any]) -> Any:
    """Those of the experiment do not fit another model. What is no table is refused with the whole configuration."""
    general = {} if "model" in keys else experiment.model.options
    own = keys.get("model_options", {})
    return dict([_size(experiment)]) | {**general, **own} if isinstance(own, dict) else own


def _runs(experiment: Experiment, method: Mapping[str, Any], keys: dict[str, Any], where: str) -> Runs:
    """Whole configurations of a cell's runs, but for the seed."""
    options = {option: value for option, value in method.items() if option not in ("method", "novel")}
    if method["novel"] and not experiment.novel:
        raise ConfigError(f"{where}: novel = {method['novel']!r} needs a table [novel] with novel devices")
    every = {
        "method": method["method"],
        "model": experiment.model.name,
        "pretrained": experiment.model.pretrained,
        "images": msgspec.to_builtins(experiment.images),
    }
    novel = experiment.novel
    own = {
        **every,
        "options": {**options, "novel": None},
        "rounds": experiment.rounds,
        "cohort": experiment.cohort,
        "devices": experiment.devices - (novel.devices if novel else 0),
        "evaluate_every": experiment.evaluate_every,
        **keys,
        "model_options": _model_options(experiment, keys),
    }
    if twice := sorted(experiment.run.keys() & {*own, "seed", "broker", "trackers"}):
        raise ConfigError(f"{where}: [run]: {twice[0]!r} is not set here, but by the experiment")
    training = _checked({**experiment.run, **own}, where)
    if novel is None:
        return Runs(training, None)
    later = {
        **{key: experiment.run[key] for key in NOVEL_KEYS if key in experiment.run},
        **every,
        "options": {**options, **{key: value for key, value in novel.options.items() if key in options}}
        | {"novel": method["novel"] or novel.learns},
        "rounds": novel.rounds,
        "devices": novel.devices,
        "evaluate_every": novel.rounds,
        **{key: keys[key] for key in NOVEL_RUN_KEYS if key in keys},
        "model_options": own["model_options"],
    }
    return Runs(training, _checked(later, f"{where}: [novel]"))


def _checked(values: dict[str, Any], where: str) -> dict[str, Any]:
    from coordinator.compute.planning.checks import (
        checked_config,  # imports torch, which takes seconds: after the check of keys
    )

    config = checked_config({**DEFAULTS, **values}, where).run
    return {key: value for key, value in msgspec.to_builtins(config).items() if key not in ("seed", "trackers")}


def _check_novel_options(experiment: Experiment, methods: Mapping[str, list[tuple[Values, Any]]], where: str) -> None:
    known = {option for points in methods.values() for _, method in points for option in method}
    unused = sorted(experiment.novel.options.keys() - known) if experiment.novel else []
    if unused:
        raise ConfigError(f"{where}: [novel]: options: none of the methods has an option {unused[0]!r}")


def _partition(name: str, table: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    check_name(name, f"{where}: the partition")
    at = f"{where}: [partitions.{name}]"
    kind, options = _named(table, "partition", at)
    try:
        return kind, asdict(make_partition(kind, **options))
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from None


def _named(table: dict[str, Any], key: str, where: str) -> tuple[str, dict[str, Any]]:
    kind = table.get(key)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: {key} = {kind!r}: expected the name of a {key}")
    return kind, {option: value for option, value in table.items() if option != key}


def _leading_comment(file: Path) -> str:
    lines: list[str] = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return "\n".join(lines)
