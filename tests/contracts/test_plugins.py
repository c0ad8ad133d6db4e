"""Plugins of every kind are found, refused and left out in the same way."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.compute.planning.checks import check_run
from coordinator.config import check_settings as check_config
from coordinator.config import make_config, robust
from coordinator.config.selection import READ_NO_ANSWERS, SELECTIONS
from coordinator.rounds.cohort import BY_ANSWERS, find_selector
from export import lower as lower  # registers fedvit's own operators
from export.rules import load_operator
from fedvit import plugins
from fedvit.errors import ConfigError, DataError
from fedvit.known_values import check_settings
from fedvit.methods import method_class
from fedvit.methods.aggregators import AGGREGATORS, Delta, make_aggregator
from fedvit.methods.server_optimizers import SERVER_OPTIMIZERS, make_server_optimizer
from fedvit.model_options import RESNET, SMALL
from fedvit.models import build_vit
from fedvit.plugins import PluginKind
from fleet.contracts import LAWS
from fleet.datasets import load_reader, read_samples
from fleet.partitions import make_partition, partition, partition_class, partition_names, partition_options
from tests.support.codes import has_code
from tests.support.packages import install_plugins
from tests.support.waiting import WAIT_S

NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
LOADERS: dict[PluginKind, Callable[[str], Any]] = {
    plugins.METHODS: method_class,
    plugins.MODELS: lambda name: build_vit(name, 3, seed=0),
    plugins.OPERATORS: load_operator,
    plugins.READERS: load_reader,
    plugins.PARTITIONS: partition_class,
    plugins.SELECTORS: find_selector,
    plugins.AGGREGATORS: lambda name: make_aggregator(name, 0.2),
    plugins.SERVER_OPTIMIZERS: lambda name: make_server_optimizer(name, **NUMBERS),
}
OWN = {
    plugins.METHODS: "fedprox",
    plugins.MODELS: RESNET,
    plugins.OPERATORS: "aten.tanh.default",
    plugins.READERS: "npz",
    plugins.PARTITIONS: "iid",
    plugins.SELECTORS: "oort",
    plugins.AGGREGATORS: "median",
    plugins.SERVER_OPTIMIZERS: "adam",
}
"""A name of fedvit itself."""
UNUSABLE = {
    "absent": "acme_nowhere:Thing",
    "unnamed": "acme_plugins:Nothing",
    "raising": "acme_raising:Thing",
    "leaving": "acme_leaving:Thing",
    "other": "pathlib:Path",
}
PARTITION = """
from dataclasses import dataclass

import numpy as np

from fedvit.methods.aggregators import Aggregator
from fedvit.methods.server_optimizers import ServerOptimizer
from fedvit.model_options import PackagedModel
from fleet.datasets import DatasetReader
from fleet.partitions.dealing import Partition


@dataclass(frozen=True, kw_only=True)
class Doubled(Partition):
    first: int = 0

    def __call__(self, samples, devices, rng):
        return [np.arange(self.first, len(samples)) for _ in range(devices)]


class Wide(Aggregator):
    def combine(self, deltas, names, scale=1.0):
        return {name: np.full(self.size, np.inf) for name in names}

    size = 2


class Infinite(Wide):
    size = 3


@dataclass
class Unmade(Wide):
    without_default: int


@dataclass(frozen=True, kw_only=True)
class Longer(ServerOptimizer):
    def step(self, update, moments):
        return update, {"first": np.append(update, 0.0)}


@dataclass(frozen=True, kw_only=True)
class Flat(PackagedModel):
    width: int = 3

    def build(self, name, classes):
        return self.width


def fail(path):
    raise ValueError("no idea")


FAILING = DatasetReader(fail, fail)


def choose_one(devices, wanted, seed, round_number, answers):
    return devices[:1]


def draw(devices, wanted, seed, round_number, answers):
    return np.random.default_rng(seed).choice(devices, wanted, replace=False)
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    groups = {
        kind.group: {**UNUSABLE, "twice": "acme_plugins:Thing", OWN[kind]: "acme_plugins:Thing"}
        for kind in plugins.KINDS
    }
    groups[plugins.PARTITIONS.group]["doubled"] = "acme_plugins:Doubled"
    groups[plugins.READERS.group]["failing"] = "acme_plugins:FAILING"
    groups[plugins.SELECTORS.group]["one"] = "acme_plugins:choose_one"
    groups[plugins.SELECTORS.group]["drawn"] = "acme_plugins:draw"
    aggregators = {"wide": "acme_plugins:Wide", "infinite": "acme_plugins:Infinite", "unmade": "acme_plugins:Unmade"}
    groups[plugins.AGGREGATORS.group] |= aggregators
    groups[plugins.MODELS.group] |= {"flat": "acme_plugins:Flat", "vit_tiny_patch16_224": "acme_plugins:Flat"}
    groups[plugins.SERVER_OPTIMIZERS.group]["longer"] = "acme_plugins:Longer"
    modules = {"acme_plugins": PARTITION, "acme_raising": "1 / 0", "acme_leaving": "raise SystemExit(3)"}
    install_plugins(tmp_path / "site", "acme-plugins", groups, **modules)
    install_plugins(
        tmp_path / "site", "zeta-plugins", {kind.group: {"twice": "acme_plugins:Thing"} for kind in plugins.KINDS}
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    plugins.read_entries.cache_clear()
    yield
    plugins.read_entries.cache_clear()
    sys.modules.pop("acme_plugins", None)


def test_tables_of_plugins_are_complete() -> None:
    assert {*plugins.KINDS} == LAWS.keys() == LOADERS.keys() == OWN.keys()
    assert len({kind.group for kind in plugins.KINDS}) == len(plugins.KINDS)
    assert tuple(AGGREGATORS) == robust.AGGREGATORS
    assert (*READ_NO_ANSWERS, *BY_ANSWERS) == SELECTIONS


@pytest.mark.parametrize("kind", plugins.KINDS, ids=lambda kind: kind.noun)
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_plugin_that_cannot_be_used_names_its_package_and_its_place(kind: PluginKind, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LOADERS[kind](name)
    assert refused.value.code == "FV1102"
    assert str(refused.value).startswith(f"{kind.noun} {name!r} of package acme-plugins: {UNUSABLE[name]} ")


@pytest.mark.parametrize("kind", plugins.KINDS, ids=lambda kind: kind.noun)
def test_a_name_of_two_packages_is_refused_without_importing_them(kind: PluginKind) -> None:
    for name, others in (("twice", "acme-plugins, zeta-plugins"), (OWN[kind], "fedvit, acme-plugins")):
        with pytest.raises(ConfigError, check=has_code("FV1102", others)):
            LOADERS[kind](name)
    assert "acme_plugins" not in sys.modules


def test_names_are_listed_and_configured_without_importing_packages() -> None:
    assert {"doubled", "raising", "iid"} <= {*partition_names()}
    assert "acme_plugins" not in sys.modules
    run = make_config({"method": "fedavg", "selection": "one", "robust": {"aggregator": "raising"}}, "test").run
    check_config(run, "test")
    assert "acme_plugins" not in sys.modules


def test_options_of_a_partition_of_a_package_are_checked() -> None:
    assert partition_options("doubled") == {"first": 0}
    assert make_partition("doubled", first="3").first == 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, check=has_code("FV2002", "'3.5'")):
        make_partition("doubled", first="3.5")
    with pytest.raises(ConfigError, check=has_code("FV2002", "did you mean 'doubled'")):
        make_partition("double")


@pytest.mark.parametrize("values", [{"selection": "two"}, {"robust": {"aggregator": "rising"}}])
def test_a_run_whose_package_is_gone_is_readable_and_does_not_start(values: dict[str, Any]) -> None:
    run = make_config({"method": "fedavg", **values}, "test").run
    for check in (check_config, check_run):
        with pytest.raises(ConfigError, check=has_code("FV1004", "invalid value; allowed are")):
            check(run, "test")
    with pytest.raises(ConfigError, check=has_code("FV1004")):
        find_selector("two")


def test_a_selector_that_chooses_too_few_is_refused() -> None:
    select = find_selector("one")
    assert select is not None
    assert select(["b", "a"], 1, 0, 1, {}) == ["a"]
    with pytest.raises(ConfigError, check=has_code("FV1485", "2 different devices of 3 are wanted, it chose ['a']")):
        select(["a", "b", "c"], 2, 0, 1, {})


def test_names_that_numpy_has_drawn_can_be_stored() -> None:
    select = find_selector("drawn")
    assert select is not None
    chosen = select(["c", "b", "a"], 2, 0, 1, {})
    assert len(chosen) == 2
    assert msgspec.json.decode(msgspec.json.encode(chosen)) == chosen


@pytest.mark.parametrize(("name", "reason"), [("wide", "expected {'w': (3,)}"), ("infinite", "'w' is not finite")])
def test_a_step_of_an_aggregator_that_does_not_fit_is_refused(name: str, reason: str) -> None:
    deltas = [Delta(1.0, lambda: {"w": np.ones(3, np.float32)})]
    with pytest.raises(ConfigError, check=has_code("FV1485", reason)):
        make_aggregator(name, 0.2).combine(deltas, {"w"})
    with pytest.raises(ConfigError, check=has_code("FV1102", "Unmade cannot be made: TypeError")):
        make_aggregator("unmade", 0.2)


def test_an_option_names_a_server_optimizer_of_a_package() -> None:
    for name in (*SERVER_OPTIMIZERS, "longer"):
        check_settings("fedopt", {"server_optimizer": name}, SMALL, {})
    assert "acme_plugins" not in sys.modules
    with pytest.raises(ConfigError, check=has_code("FV1104", "did you mean 'longer'")):
        check_settings("fedopt", {"server_optimizer": "longr"}, SMALL, {})
    with pytest.raises(ConfigError, check=has_code("FV1485", "its first has shape (4,), expected (3,)")):
        make_server_optimizer("longer", **NUMBERS).step(np.ones(3), {})


def test_a_model_of_a_package_is_known_without_importing_it() -> None:
    check_settings("fedavg", {}, "flat", {"anything": 1})
    assert "acme_plugins" not in sys.modules
    with pytest.raises(ConfigError, check=has_code("FV1105", "did you mean 'flat'")):
        check_settings("fedavg", {}, "flatt", {})
    with pytest.raises(ConfigError, check=has_code("FV1105", "has no option 'anything'")):
        build_vit("flat", 3, seed=0, options={"anything": 1})
    with pytest.raises(ConfigError, check=has_code("FV1102", "did not build a fedvit.models.vit.PatchViT with 3")):
        build_vit("flat", 3, seed=0)
    with pytest.raises(ConfigError, check=has_code("FV1113", "pretrained")):
        build_vit("flat", 3, seed=0, pretrained=True)
    with pytest.raises(ConfigError, check=has_code("FV1102", "has the name of a model of timm")):
        build_vit("vit_tiny_patch16_224", 3, seed=0)


def test_parts_of_a_package_that_overlap_are_refused() -> None:
    with pytest.raises(ConfigError, check=has_code("FV1485", "is on two devices")):
        partition("doubled", np.zeros(9, np.int64), 2, seed=0)


def test_an_unusable_reader_leaves_other_data_sets_readable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, check=has_code("FV2001")):
        read_samples(str(tmp_path / "absent"), 8)
    assert len(read_samples("digits", 8)) == 1797
    assert not caplog.records
    with pytest.raises(DataError):  # of the reader of class folders
        read_samples(str(tmp_path / "site"), 8)
    assert sum("left out: reader 'raising' of package acme-plugins" in text for text in caplog.messages) == 1
    assert "left out: reader 'failing': ValueError('no idea')" in caplog.messages


@pytest.mark.parametrize("words", [["fleet.cli", "--help"], ["fleet.cli", "partition", "--help"]])
def test_help_imports_no_package(words: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); sys.argv[1:] = {words[1:]}\n"
        f"from {words[0]} import cli\n"
        "cli(standalone_mode=False)\n"
        "assert not {'acme_plugins', 'acme_raising', 'torch'} & {*sys.modules}, sorted(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
