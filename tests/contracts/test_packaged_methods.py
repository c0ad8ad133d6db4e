"""Methods that installed packages declare by entry points are known wherever fedvit's own are."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from fedvit import known_names, plugins
from fedvit.errors import ConfigError
from fedvit.methods import METHODS, make_method, method_class, method_names
from tests.support.codes import has_code
from tests.support.packages import NORMS, STILL, install

BROKEN = {
    "fedavg": "method 'fedavg' is in more than one package: fedvit, acme-norms; uninstall all but one, or rename",
    "twice": "method 'twice' is in more than one package: acme-norms, zeta-norms; uninstall all but one, or rename",
    "absent": "method 'absent' of package acme-norms: acme_nowhere:Norms cannot be imported: ModuleNotFoundError: ",
    "unnamed": "method 'unnamed' of package acme-norms: acme_norms:Nothing cannot be imported: AttributeError: ",
    "raising": "method 'raising' of package acme-norms: acme_raising:Norms cannot be imported: ZeroDivisionError: ",
    "function": "method 'function' of package acme-norms: os.path:join is not a method: expected a class derived from",
    "other_class": "method 'other_class' of package acme-norms: pathlib:Path is not a method: expected a class derived",
    "half": "method 'half' of package acme-norms: fedvit.methods.base:Method is not complete: it must define rules, ",
    "still": "method 'still' of package acme-norms: acme_still:Still has a `local_step` of its own, which ",
}
"""Methods that cannot be used, and how each error begins."""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    declared = {
        "norms_alone": "acme_norms:Norms",
        "fedavg": "acme_norms:Norms",
        "twice": "acme_norms:Norms",
        "absent": "acme_nowhere:Norms",
        "unnamed": "acme_norms:Nothing",
        "raising": "acme_raising:Norms",
        "function": "os.path:join",
        "other_class": "pathlib:Path",
        "half": "fedvit.methods.base:Method",
        "still": "acme_still:Still",
    }
    install(tmp_path / "site", "acme-norms", declared, acme_norms=NORMS, acme_raising="1 / 0", acme_still=STILL)
    install(tmp_path / "site", "zeta-norms", {"twice": "zeta_norms:Norms"}, zeta_norms=NORMS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    plugins.read_entries.cache_clear()
    yield
    plugins.read_entries.cache_clear()
    for module in ("acme_norms", "zeta_norms", "acme_still"):
        sys.modules.pop(module, None)


def test_a_method_of_a_package_is_made_as_others_are_and_its_options_checked() -> None:
    method = make_method("norms_alone", {"lr": 0.5, "strength": 2.0})
    assert type(method).__module__ == "acme_norms"
    assert method.lr == 0.5
    assert method_names() == sorted({*METHODS, *BROKEN, "norms_alone"})
    with pytest.raises(ConfigError, check=has_code("FV1101", "'strength'")):
        make_method("norms_alone", {"strenght": 2.0})


def test_names_of_a_package_are_known_without_importing_it() -> None:
    known_names.check_names("norms_alone", ["strength"])
    with pytest.raises(ConfigError, check=has_code("FV1101", "'norms_alone'")):
        known_names.check_names("norms_alon")
    assert "acme_norms" not in sys.modules


@pytest.mark.parametrize("name", BROKEN)
def test_a_method_that_cannot_be_used_names_its_package(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        method_class(name)
    assert str(refused.value).startswith(BROKEN[name])


@pytest.mark.parametrize("name", ["fedavg", "twice"])
def test_a_name_that_two_packages_have_is_refused_without_importing_them(name: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1102", repr(name))):
        known_names.check_names(name, ["lr"])
    assert "acme_norms" not in sys.modules


def test_list_of_methods_has_all_that_can_be_used_and_says_why_others_cannot() -> None:
    listed = CliRunner().invoke(cli, ["methods", "--json"])
    assert listed.exit_code == 0
    entries = {entry["name"]: entry for entry in json.loads(listed.stdout)}
    assert set(entries) == {*METHODS, "norms_alone"} - {"fedavg"}
    assert entries["norms_alone"]["source"] == "made for these tests"
    assert "strength" in {option["option"] for option in entries["norms_alone"]["options"]}
    said = dict(zip(sorted(BROKEN), listed.stderr.splitlines(), strict=True))
    assert [name for name, line in said.items() if not line.startswith(f"left out: {BROKEN[name]}")] == []
