"""The file of an experiment: its tables, and the checks that need no torch."""

from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from coordinator.config import ImageConfig, TrackersConfig, read_toml
from coordinator.views.trackers.following import check_writers
from fedvit.choices import did_you_mean, suggest_names
from fedvit.errors import ConfigError
from fedvit.known_names import check_names
from fedvit.roles import Novel, ProductPrecision
from fedvit.wire.topics import check_name
from fleet.clusters.resources import RayTable
from fleet.datasets import check_dataset
from fleet.datasets.columns import make_columns
from fleet.partition import Official
from fleet.request import Engine
from profiles.report.experiment import HeadFusion, Values

RUN_KEYS = ("updates", "privacy", "robust", "model", "model_options", "cohort")
"""Keys of a method's table that replace the experiment's keys of the run's configuration: codecs, noise, robust
aggregation, the model, and the devices of a round. `model_options` override the experiment's one by one."""

TUNE = "tune"
"""Key of a method's table: options, each with the values to try. A text is FedBABU's option of the same name."""

PARTS = "parts"
"""Key of a partition's table: folders that were dealt out before; `{seed}` stands for the seed."""

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
    beyond: Annotated[int, Meta(ge=0)] = 0  # values beyond an edge that are tried while they are better than all others


class NovelTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [novel]: devices that join after the training, and learn their own part alone."""

    devices: Annotated[int, Meta(ge=1)]  # of the experiment's, left out of the training
    rounds: Annotated[int, Meta(ge=1)] = 1  # in which all of them learn
    learns: Novel = "own"  # unless a method has its own option `novel`; generator: it learns from them, if there is one
    options: dict[str, Any] = field(default_factory=dict)  # in these rounds, of every method that has them


class Experiment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of an experiment's file."""

    dataset: str = ""  # may be missing if all partitions have `parts`
    columns: dict[str, str] = field(default_factory=dict)  # of a table of images: purpose -> name
    image_size: Annotated[int, Meta(ge=1)] | None = None  # side of the pictures as dealt out, and of the model's input
    context: Annotated[int, Meta(ge=1)] | None = None  # instead, of a text: characters of a sample
    samples: Annotated[int, Meta(ge=1)] | None = None  # images that are dealt out, drawn anew for each seed; None: all
    classes: Annotated[int, Meta(ge=1)] | None = None  # the most frequent ones, which alone are dealt out; None: all
    devices: Annotated[int, Meta(ge=1)]
    rounds: Annotated[int, Meta(ge=1)]
    cohort: Annotated[float, Meta(gt=0, le=1)] | Annotated[int, Meta(ge=1)] = 1.0
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1)] = (0, 1, 2)
    evaluate_every: Annotated[int, Meta(ge=1)] = 1
    test_share: Annotated[float, Meta(gt=0, lt=1)] | Official = 0.2  # of each device's images
    validation_share: Annotated[float, Meta(gt=0, lt=1)] | None = None  # of the training images, which test instead
    # of each class, for the server's model; no device's
    global_test: Annotated[float, Meta(gt=0, lt=1)] | Official | None = None
    model: ModelTable = field(default_factory=ModelTable)
    images: ImageConfig = field(default_factory=ImageConfig)
    partitions: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]  # name -> partition and its options
    methods: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]  # name -> method, its options, RUN_KEYS, TUNE
    common: dict[str, Any] = field(default_factory=dict)  # options of every method that has them
    tuning: TuningTable | None = None
    novel: NovelTable | None = None
    pictures: Annotated[int, Meta(ge=1)] | None = None  # devices of whose models the report shows the attention
    attention: HeadFusion = "mean"  # over heads, in these pictures; max: FedTP's, without the lowest weights
    attacks: Annotated[int, Meta(ge=1)] | None = (
        None  # devices whose features are attacked, of methods that upload some
    )
    across: str | None = None  # option of methods or partitions, against whose values the report draws accuracy
    reference: str | None = None  # method from which differences are measured; None: the first
    target_accuracy: Annotated[float, Meta(gt=0, le=1)] | None = None  # rounds until it is reached are reported
    late_rounds: Annotated[int, Meta(ge=1)] | None = None  # last rounds whose evaluations are averaged
    run: dict[str, Any] = field(default_factory=dict)  # other keys of a run's configuration
    engine: Engine = "onnx"  # what computes the devices' part
    precision: ProductPrecision = "fp32"  # of products, in the torch engine
    trackers: TrackersConfig = field(default_factory=TrackersConfig)  # where they are written; no outcome depends on it
    ray: RayTable = field(default_factory=RayTable)  # needs of a cell on a node, with --ray; no outcome depends on it

    @property
    def size(self) -> tuple[str, int]:
        """The model's option for the size of a sample, and its value."""
        if self.context is not None:
            return "context", self.context
        assert self.image_size is not None  # `read_experiment` demands one of them
        return "image_size", self.image_size

    def model_options(self, table: dict[str, Any]) -> Any:
        """Options of the model under a method's table; what is not a table is refused with the whole configuration."""
        general = {} if "model" in table else self.model.options  # these do not fit another model
        own = table.get("model_options", {})
        return dict([self.size]) | {**general, **own} if isinstance(own, dict) else own


class ExperimentFile(NamedTuple):
    """A file that was read, and whose names are all known."""

    path: Path
    description: str  # the leading comment
    experiment: Experiment


class MethodTable(NamedTuple):
    """A method's table, divided by purpose."""

    kind: str  # the method
    options: dict[str, Any]  # with one value each
    tune: dict[str, list[Any]]  # with values to search among
    run_keys: dict[str, Any]  # those in RUN_KEYS


def read_experiment(file: Path, dataset: str | None = None, pretrained: str | None = None) -> ExperimentFile:
    """Read an experiment, and check what needs no torch; `dataset` and `pretrained` replace the file's.

    Raises ConfigError naming the file, the key and what is allowed.
    """
    values = read_toml(file)
    if dataset:
        values["dataset"] = dataset
    if pretrained and isinstance(model := values.setdefault("model", {}), dict):
        model["pretrained"] = pretrained
    experiment = _convert(values, str(file))
    check_name(file.stem, f"{file}: the experiment's name")
    _check_tuning(experiment, str(file))
    _check_settings(experiment, str(file))
    for name, table in experiment.methods.items():
        _check_method(experiment, table, f"{file}: [methods.{name}]")
    return ExperimentFile(file, _leading_comment(file), experiment)


def divide_method(table: dict[str, Any], where: str) -> MethodTable:
    """Divide a method's table. Raises ConfigError for one without a method's name."""
    kind, own = divide_named(table, "method", where)
    tune = read_tune(table)
    excluded = {*RUN_KEYS, *([TUNE] if tune else ())}
    options = {key: value for key, value in own.items() if key not in excluded}
    return MethodTable(kind, options, tune, {key: table[key] for key in RUN_KEYS if key in table})


def divide_named(table: dict[str, Any], key: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return the name under `key`, and the rest of the table."""
    kind = table.get(key)
    if not isinstance(kind, str):
        raise ConfigError("FV2107", f"{where}: {key} = {kind!r}: expected the name of a {key}")
    return kind, {option: value for option, value in table.items() if option != key}


def read_tune(table: dict[str, Any]) -> dict[str, list[Any]]:
    """Options of a method's table with values to search among."""
    tune = table.get(TUNE)
    return tune if isinstance(tune, dict) else {}


def list_points(tune: dict[str, list[Any]]) -> list[Values]:
    """Return all combinations of the values to try, the last option changing first; one empty one without values.

    >>> list_points({"lr": [0.1, 0.2], "mu": [1, 2]})[:3]
    [{'lr': 0.1, 'mu': 1}, {'lr': 0.1, 'mu': 2}, {'lr': 0.2, 'mu': 1}]
    """
    return [dict(zip(tune, values, strict=True)) for values in product(*tune.values())]


def _convert(values: dict[str, Any], where: str) -> Experiment:
    tables: tuple[tuple[Any, Collection[str], str], ...] = (
        (values, Experiment.__struct_fields__, ""),
        (values.get("model"), ModelTable.__struct_fields__, " [model]"),
        (values.get("tuning"), TuningTable.__struct_fields__, " [tuning]"),
        (values.get("novel"), NovelTable.__struct_fields__, " [novel]"),
        (values.get("ray"), RayTable.__struct_fields__, " [ray]"),
    )
    for table, keys, at in tables:
        for key in table if isinstance(table, dict) else ():
            if key not in keys:
                hint = did_you_mean(key, keys, most=1) or f"; known keys are {', '.join(keys)}"
                raise ConfigError("FV1002", f"{where}{at}: unknown key {key!r}{hint}")
    try:
        return msgspec.convert(values, Experiment)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).rpartition(" - at `$")
        if not reason:
            raise ConfigError("FV2107", f"{where}: {error}") from None
        key = path.strip(".`")
        value = values.get(key)
        text = f" = {value!r}" if value is not None and not isinstance(value, dict) else ""
        raise ConfigError("FV2107", f"{where}: {key}{text}: {reason.lower().replace('`object`', 'a table')}") from None


def _check_tuning(experiment: Experiment, where: str) -> None:
    is_tuned = any(map(read_tune, experiment.methods.values()))
    if is_tuned and experiment.validation_share is not None:
        raise ConfigError(
            "FV2111",
            f"{where}: validation_share = {experiment.validation_share}: the search for options sees validation images,"
            f" too; leave it out, or {TUNE!r}",
        )
    if experiment.tuning and not is_tuned:
        raise ConfigError(
            "FV2111", f"{where}: [tuning]: none of the methods has a table {TUNE!r} of values to search among"
        )
    tuning = experiment.tuning or TuningTable()
    if tuning.keep is not None and tuning.search != "halving":
        raise ConfigError(
            "FV2111", f"{where}: [tuning]: keep = {tuning.keep} is for search = 'halving', not {tuning.search!r}"
        )


def _check_settings(experiment: Experiment, where: str) -> None:
    if (experiment.image_size is None) == (experiment.context is None):
        raise ConfigError(
            "FV2006",
            f"{where}: expected image_size, the side of images, or context, the characters of a sample of text",
        )
    tuning_seeds = (experiment.tuning and experiment.tuning.seeds) or ()
    for key, seeds in (("seeds", experiment.seeds), ("[tuning]: seeds", tuning_seeds)):
        if len(set(seeds)) != len(seeds):
            raise ConfigError("FV2107", f"{where}: {key} = {list(seeds)}: a seed is listed more than once")
    if not experiment.dataset and not all(PARTS in table for table in experiment.partitions.values()):
        raise ConfigError("FV2107", f"{where}: dataset is missing, and a partition has no {PARTS}")
    try:
        make_columns(experiment.columns)
        if experiment.dataset:
            check_dataset(experiment.dataset)
    except ConfigError as error:
        raise ConfigError(error.code, f"{where}: {error}") from None
    check_writers(experiment.trackers, f"{where}: [trackers]")
    if experiment.reference is not None and experiment.reference not in experiment.methods:
        hint = suggest_names(experiment.reference, list(experiment.methods), "methods are")
        raise ConfigError("FV2107", f"{where}: reference = {experiment.reference!r} is no method of the file{hint}")
    _check_across(experiment, where)
    if experiment.novel and experiment.novel.devices >= experiment.devices:
        raise ConfigError(
            "FV2107",
            f"{where}: [novel]: devices = {experiment.novel.devices} leaves none of the experiment's"
            f" {experiment.devices} devices for the training",
        )
    if experiment.attacks and experiment.devices - (experiment.novel.devices if experiment.novel else 0) < 2:
        raise ConfigError(
            "FV2107",
            f"{where}: attacks = {experiment.attacks}: the attacker needs images of a second device that trains",
        )
    experiment.ray.check(list(experiment.methods), list(experiment.partitions), where)


def _check_across(experiment: Experiment, where: str) -> None:
    """Raises ConfigError for an option that no two tables give a value."""
    option = experiment.across
    if option is None:
        return
    methods = [{**table, **experiment.model_options(table)} for table in experiment.methods.values()
               if isinstance(table.get("model_options", {}), dict)]  # fmt: skip
    given = {str(table[option]) for table in [*experiment.partitions.values(), *methods] if option in table}
    if len(given) < 2:
        raise ConfigError(
            "FV2107", f"{where}: across = {option!r}: expected an option to which methods or partitions give two values"
        )


def _check_method(experiment: Experiment, table: dict[str, Any], where: str) -> None:
    method = divide_method(table, where)
    model, options = table.get("model", experiment.model.name), experiment.model_options(table)
    try:
        _check_tune(method.tune, method.options)
        names = method.options.keys() | method.tune.keys()
        check_names(method.kind, names, str(model), options if isinstance(options, dict) else ())
    except ConfigError as error:
        raise ConfigError(error.code, f"{where}: {error}") from None


def _check_tune(tune: dict[str, Any], own: dict[str, Any]) -> None:
    if isinstance(value := own.get(TUNE), list | dict):
        raise ConfigError("FV2111", f"{TUNE} = {value!r}: expected a table of options, each with a list of values")
    for option, values in tune.items():
        at = f"{TUNE}: {option} = {values!r}"
        if not isinstance(values, list) or not values:
            raise ConfigError("FV2111", f"{at}: expected a list of values to search among")
        for value in values:
            if not isinstance(value, int | float | str):
                raise ConfigError("FV2111", f"{at}: {value!r} is neither a number nor a name")
            if isinstance(value, str):
                check_name(value, at)  # it becomes part of a folder's name
            if values.count(value) > 1:
                raise ConfigError("FV2111", f"{at}: {value!r} is listed more than once")
        if option in own:
            raise ConfigError(
                "FV2111", f"option {option} = {own[option]!r} is set and also to be tuned; keep one of the two"
            )


def _leading_comment(file: Path) -> str:
    lines: list[str] = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return "\n".join(lines)
