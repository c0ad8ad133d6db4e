"""What an experiment is: a TOML file that spans a grid of methods, partitions and seeds."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from coordinator.config import ImageConfig, MetricsConfig, read_toml
from coordinator.metrics.writers import check_writers
from fedvit.blobs import digest_of
from fedvit.choices import did_you_mean
from fedvit.errors import ConfigError
from fedvit.known_names import check_names
from fedvit.wire.topics import check_name
from fleet.clusters.resources import RayTable
from fleet.datasets import check_dataset
from fleet.partitions import make_partition
from fleet.simulate import DEFAULTS, Engine, Precision

SCHEMA = 2
"""Version of what an experiment writes; another one makes every cell run again."""

RUN_TABLES = ("updates", "privacy", "protection")
"""Keys of a method's table that are tables of a run's configuration: codecs, noise, and what guards the aggregate."""


class ModelTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [model]."""

    name: str = "vit_small_images"
    options: dict[str, Any] = field(default_factory=dict)
    pretrained: bool | str = False


class Experiment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An experiment's file, key by key."""

    dataset: str
    image_size: Annotated[int, Meta(ge=1)]  # side of the pictures as they are dealt out, and of the model's input
    devices: Annotated[int, Meta(ge=1)]
    rounds: Annotated[int, Meta(ge=1)]
    cohort: Annotated[float, Meta(gt=0, le=1)] | Annotated[int, Meta(ge=1)] = 1.0
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(min_length=1)] = (0,)
    evaluate_every: Annotated[int, Meta(ge=1)] = 1
    test_share: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    model: ModelTable = field(default_factory=ModelTable)
    images: ImageConfig = field(default_factory=ImageConfig)
    partitions: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]  # name -> partition and its options
    methods: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]  # name -> method, its options, RUN_TABLES
    common: dict[str, Any] = field(default_factory=dict)  # options of every method that has them
    run: dict[str, Any] = field(default_factory=dict)  # other keys of a run's configuration
    engine: Engine = "onnx"  # what computes the devices' part
    precision: Precision = "fp32"  # of products, in the torch engine
    metrics: MetricsConfig = field(default_factory=MetricsConfig)  # where they are written; no outcome depends on it
    ray: RayTable = field(default_factory=RayTable)  # what a cell needs of a node, with --ray; likewise


class Deal(Struct, frozen=True, kw_only=True):
    """How a data set is dealt out; cells with an equal one share their device folders."""

    dataset: str
    image_size: int
    devices: int
    partition: str
    options: dict[str, Any]  # all of them
    seed: int
    test_share: float

    @property
    def digest(self) -> str:
        return digest_of(msgspec.json.encode(self, order="deterministic"))


class Cell(Struct, frozen=True, kw_only=True):
    """One run of the grid, with everything that its outcome depends on."""

    schema: int
    method: str  # as the file calls it
    partition: str
    seed: int
    deal: Deal
    run: dict[str, Any]  # a run's whole configuration
    engine: Engine = "onnx"
    precision: Precision = "fp32"

    @property
    def digest(self) -> str:
        return digest_of(msgspec.json.encode(self, order="deterministic"))

    @property
    def path(self) -> str:
        return f"{self.method}/{self.partition}/seed-{self.seed}"


class Grid(NamedTuple):
    """An experiment that was checked, and its cells: whole comparisons first, one seed after the other."""

    name: str
    description: str  # the file's leading comment
    experiment: Experiment
    methods: dict[str, dict[str, Any]]  # name -> method and all its options
    cells: tuple[Cell, ...]


def read_grid(file: Path) -> Grid:
    """Read and check an experiment. Raises ConfigError naming the file, the key and what is allowed."""
    experiment = _experiment(read_toml(file), str(file))
    check_name(file.stem, f"{file}: the experiment's name")
    if len(set(experiment.seeds)) != len(experiment.seeds):
        raise ConfigError(f"{file}: seeds = {list(experiment.seeds)}: a seed is listed more than once")
    try:
        check_dataset(experiment.dataset)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    check_writers(experiment.metrics, f"{file}: [metrics]")
    experiment.ray.check(list(experiment.methods), list(experiment.partitions), str(file))
    methods = _methods(experiment, str(file))
    runs = {
        name: _run(experiment, method, _run_tables(experiment.methods[name]), f"{file}: [methods.{name}]")
        for name, method in methods.items()
    }
    rules = {name: _partition(name, table, str(file)) for name, table in experiment.partitions.items()}
    cells = [
        Cell(
            schema=SCHEMA,
            method=method,
            partition=partition,
            seed=seed,
            deal=Deal(
                dataset=experiment.dataset,
                image_size=experiment.image_size,
                devices=experiment.devices,
                partition=rule,
                options=options,
                seed=seed,
                test_share=experiment.test_share,
            ),
            run={**run, "seed": seed},
            engine=experiment.engine,
            precision=experiment.precision,
        )
        for seed in experiment.seeds
        for partition, (rule, options) in rules.items()
        for method, run in runs.items()
    ]
    return Grid(file.stem, _leading_comment(file), experiment, methods, tuple(cells))


def _experiment(values: dict[str, Any], where: str) -> Experiment:
    tables = (
        (values, Experiment, ""),
        (values.get("model"), ModelTable, " [model]"),
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


def _methods(experiment: Experiment, where: str) -> dict[str, dict[str, Any]]:
    """Each method's name in the table METHODS, under "method", and all of its options."""
    for name, table in experiment.methods.items():
        _check_names(experiment, table, f"{where}: [methods.{name}]")
    from fedvit.methods import METHODS, make_method  # torch: seconds that a mistyped name need not wait

    used: set[str] = set()
    complete: dict[str, dict[str, Any]] = {}
    for name, table in experiment.methods.items():
        check_name(name, f"{where}: the method")
        at = f"{where}: [methods.{name}]"
        kind, own = _named(table, "method", at)
        for key in RUN_TABLES:
            own.pop(key, None)
        has = {option.name for option in fields(METHODS[kind])} if kind in METHODS else set()
        common = {option: value for option, value in experiment.common.items() if option in has}
        used |= common.keys()
        try:
            complete[name] = {"method": kind, **asdict(make_method(kind, {**common, **own}))}
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from None
    if unused := sorted(experiment.common.keys() - used):
        raise ConfigError(f"{where}: [common]: none of the methods has an option {unused[0]!r}")
    return complete


def _check_names(experiment: Experiment, table: dict[str, Any], where: str) -> None:
    kind, own = _named(table, "method", where)
    try:
        check_names(kind, own.keys() - set(RUN_TABLES), experiment.model.name, experiment.model.options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _run_tables(table: dict[str, Any]) -> dict[str, Any]:
    """A method may be listed several times, with other codecs or noise."""
    return {key: table[key] for key in RUN_TABLES if key in table}


def _run(experiment: Experiment, method: Mapping[str, Any], tables: dict[str, Any], where: str) -> dict[str, Any]:
    """A run's whole configuration, but for the seed."""
    own = {
        "method": method["method"],
        "options": {option: value for option, value in method.items() if option != "method"},
        "model": experiment.model.name,
        "model_options": {"image_size": experiment.image_size, **experiment.model.options},
        "pretrained": experiment.model.pretrained,
        "rounds": experiment.rounds,
        "cohort": experiment.cohort,
        "devices": experiment.devices,
        "evaluate_every": experiment.evaluate_every,
        "images": msgspec.to_builtins(experiment.images),
    }
    if twice := sorted(experiment.run.keys() & {*own, *tables, "seed", "broker", "metrics"}):
        raise ConfigError(f"{where}: [run]: {twice[0]!r} is not set here, but by the experiment")
    from coordinator.planning.checks import checked_config  # torch: seconds that a mistyped key need not wait

    config = checked_config({**DEFAULTS, **experiment.run, **own, **tables}, where).run
    return {key: value for key, value in msgspec.to_builtins(config).items() if key not in ("seed", "metrics")}


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
