"""`fleet contracts` prints each law with its result, and ends with an error if one is broken."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fedvit import plugins
from fedvit.errors import ConfigError
from fleet.cli import cli
from tests.support.codes import has_code
from tests.support.packages import install_plugins

MODULE = """
from dataclasses import dataclass

import numpy as np

from fleet.partitions.dealing import Partition


@dataclass(frozen=True, kw_only=True)
class Halves(Partition):
    def __call__(self, samples, devices, rng):
        return [np.sort(part) for part in np.array_split(rng.permutation(len(samples)), devices)]


@dataclass(frozen=True, kw_only=True)
class Same(Partition):
    def __call__(self, samples, devices, rng):
        return [np.arange(len(samples))] * devices


@dataclass(frozen=True, kw_only=True)
class Leaves(Partition):
    def __call__(self, samples, devices, rng):
        raise SystemExit(0)
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = tmp_path / "site"
    install_plugins(site, "acme-halves", {"fedvit.partitions": {"halves": "acme_deals:Halves"}}, acme_deals=MODULE)
    install_plugins(site, "acme-same", {"fedvit.partitions": {"same": "acme_deals:Same"}})
    install_plugins(site, "acme-leaves", {"fedvit.partitions": {"leaves": "acme_deals:Leaves"}})
    install_plugins(site, "acme-tools", {"console_scripts": {"same": "acme_deals:Same"}})
    monkeypatch.syspath_prepend(site)
    plugins.read_entries.cache_clear()
    yield
    plugins.read_entries.cache_clear()
    sys.modules.pop("acme_deals", None)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, ["contracts", *words])


def test_laws_that_hold_are_listed() -> None:
    result = invoke("acme-halves")
    assert result.exit_code == 0, result.output
    first, *others = result.stdout.splitlines()
    assert first == "partition halves"
    assert "  ok      Every sample goes to one device, in ascending order" in others
    assert {line[:10] for line in others} == {"  ok      "}


def test_a_broken_law_is_an_error_with_its_reason() -> None:
    result = invoke("acme-same")
    assert isinstance(result.exception, ConfigError)
    assert result.exception.code == "FV2486"
    lines = result.stdout.splitlines()
    place = lines.index("  BROKEN  Every sample goes to one device, in ascending order")
    assert "sample 0 is on two devices" in lines[place + 1]
    shown = json.loads(invoke("acme-same", "--json").stdout)
    assert {(each["kind"], each["name"]) for each in shown} == {("partition", "same")}
    assert [each["law"] for each in shown if each["broken"]]


def test_a_plugin_that_ends_the_process_breaks_its_laws() -> None:
    """With exit code 0 it would look as if all held."""
    result = invoke("acme-leaves")
    assert isinstance(result.exception, ConfigError)
    assert "          SystemExit: 0" in result.stdout.splitlines()


@pytest.mark.parametrize("package", ["acme-nowhere", "acme-tools", ""])
def test_a_package_without_plugins_is_refused(package: str) -> None:
    result = invoke(package)
    assert result.exception is not None
    assert has_code("FV2485", repr(package))(result.exception)  # type: ignore[arg-type]
