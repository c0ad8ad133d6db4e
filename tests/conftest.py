"""What the tests of several rooms share: a model as small as they come, and its graphs, exported once."""

import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.postgresql import Postgresql
    from tests.support.tiny import Tiny

pytest.register_assert_rewrite("tests.support")  # before any of it is imported
from tests.support.slow import mark_other_methods  # noqa: E402

# with more threads torch takes many times as long for models as small as these, when something else runs, too
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a shell that runs the tests in its background lets them ignore Ctrl-C, and with them every program that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
SIGNALS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
# what tests write is synced thousands of times, for which a disk takes milliseconds each; TMPDIR names another folder
MEMORY, ROOM_BYTES = Path("/dev/shm"), 2 << 30
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)
# every process that a test starts would compile torch and timm again, which takes longer than to run them
if sys.dont_write_bytecode:
    compiled = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvit" / "bytecode"
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(compiled)
    os.environ["PYTHONPYCACHEPREFIX"] = str(compiled)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# how long an example takes says how busy the machine is
settings.register_profile("fedvit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedvit")
# no test reaches the network, and none finds what an earlier process downloaded
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = os.path.join(tempfile.gettempdir(), "fedvit-no-such-cache")


def pytest_collection(session: pytest.Session) -> None:
    if not session.config.pluginmanager.has_plugin("dsession"):  # a process of pytest-xdist that collects nothing
        gc.disable()


def pytest_collection_finish() -> None:
    """A million objects were made that stay to the end. To look through them takes 0.3 s, for every device of a
    simulation that ends, and whenever a test makes many objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # pytest listens to every logger that hands nothing on, for which torch's tracer describes each tensor and stack
    logging.getLogger("torch.__trace").propagate = True


def pytest_unconfigure() -> None:
    gc.unfreeze()  # triton complains of what is there when the process ends


def pytest_sessionfinish(session: pytest.Session) -> None:
    """pytest-xdist sends Ctrl-C to a worker that tidies up for more than 5 s, as on a busy machine: it is not heard."""
    if hasattr(session.config, "workerinput"):
        with contextlib.suppress(ValueError):  # not the main thread, which alone hears signals
            signal.signal(signal.SIGINT, signal.SIG_IGN)


TESTS = Path(__file__).parent
FIRST = ("e2e", "unit/fleet", "unit/export", "unit/coordinator", "contracts")
"""Folders whose files take long: they come first, so that at the end no process waits for another."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if contracts := [item for item in items if item.path.is_relative_to(TESTS / "contracts")]:
        from fedvit.methods import METHODS  # imports torch, which tests of devices do without

        mark_other_methods(contracts, frozenset(METHODS))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: [not item.path.is_relative_to(TESTS / folder) for folder in FIRST])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Our own groups: those of xdist 3.8 by marks are lost with pytest 9.2, without a word."""
    from tests.support.scheduling import Groups

    config.option.loadscopereorder = False  # the order of collection is kept
    return Groups(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests were not begun, as FEDVIT_TESTS_UNTIL was over."""
    session = config.pluginmanager.get_plugin("dsession")
    if left_out := getattr(getattr(session, "sched", None), "left_out", ()):
        terminalreporter.section(f"out of time: {len(left_out)} groups of tests did not run")
        terminalreporter.line("\n".join(left_out))


@pytest.fixture(autouse=True)
def signals() -> None:
    """A command that an earlier test ran in this process has left its handlers of Ctrl-C and SIGTERM."""
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session, the same in whatever process a test runs; see `tests.support.once`."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def postgresql() -> "Iterator[Postgresql]":
    from tests.support.postgresql import Postgresql

    server = Postgresql()
    yield server
    server.close()


@pytest.fixture(scope="session")
def graph_cache(shared: Path) -> Path:
    """Graphs of this session: an export takes seconds, so tests with equal graphs share them."""
    folder = shared / "graphs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cache(shared: Path, graph_cache: Path) -> Path:
    """XDG_CACHE_HOME of programs under test: their graphs are those of this session, too."""
    folder = shared / "cache"
    (folder / "fedvit").mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "fedvit" / "graphs").symlink_to(graph_cache)
    return folder


@pytest.fixture(scope="session")
def tiny(graph_cache: Path) -> "Callable[[str], Tiny]":
    """A method by name on the tiny model; its graphs are exported when first asked for."""
    from fedvit.methods import make_method
    from tests.support.tiny import TINY_OPTIONS, make_tiny

    made: dict[str, Tiny] = {}

    def make(name: str) -> "Tiny":
        if name not in made:
            made[name] = make_tiny(make_method(name, TINY_OPTIONS), graph_cache)
        return made[name]

    return make
