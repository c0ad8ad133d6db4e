"""Fixtures of the end-to-end tests: data, a graph cache, the undisturbed run, a stage for each test, and a browser."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.chromium import Browser, Tab, browsing
from tests.support.federation import deal_digits
from tests.support.once import make_once
from tests.support.programs import CONFIG, DEVICES, SUMMED, Stage
from tests.support.wheels import build_own_wheel

if TYPE_CHECKING:
    from tests.support.hosts import Hosts
    from tests.support.postgresql import Postgresql

collect_ignore = [] if os.environ.get("FEDVIT_TEST_BROKERS") else ["test_other_brokers.py"]


@pytest.fixture(scope="session")
def parts(shared: Path) -> Path:
    """Three devices with 150 digits in all."""
    return make_once(shared / "e2e" / "data", lambda folder: deal_digits(folder / "parts", DEVICES)) / "parts"


@pytest.fixture(scope="session")
def own_wheel(shared: Path) -> Path:
    """The wheel of this source, built once."""
    [wheel] = make_once(shared / "e2e" / "wheel", build_own_wheel).glob("fedvit-*.whl")
    return wheel


CalmRun = Callable[[str, Mapping[str, Any]], bytes]


@pytest.fixture(scope="session")
def calm_run(shared: Path, parts: Path, graph_cache: Path) -> CalmRun:
    """Return a function that makes a run without a fault, once for each name, and returns its final tensors."""

    def make(name: str, values: Mapping[str, Any]) -> bytes:
        folders = [parts / device for device in DEVICES]
        out = make_once(
            shared / "e2e" / name,
            lambda out: simulate(RunRequest(folders, dict(values), out=out, run="calm", graph_cache=graph_cache)),
        )
        return (out / "calm" / "model.safetensors").read_bytes()

    return make


@pytest.fixture(scope="session")
def undisturbed(calm_run: CalmRun) -> bytes:
    """The final tensors of the usual run without a fault."""
    return calm_run("undisturbed", CONFIG)


@pytest.fixture(scope="session")
def calm_sums(calm_run: CalmRun) -> bytes:
    """The final tensors of a run with secure sums without a fault."""
    return calm_run("sums", {**SUMMED, "secure": True})


@pytest.fixture
def stage(tmp_path: Path, parts: Path, cache: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, parts, cache)
    yield stage
    stage.close()


@pytest.fixture
def hosts(stage: Stage, postgresql: "Postgresql") -> "Iterator[Hosts]":
    from tests.support.hosts import make_hosts

    with make_hosts(stage, postgresql) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium") / "profile") as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as tab:
        yield tab
        assert tab.complaints == []
