"""What the tests of several rooms share: a model as small as they come, and its graphs, exported once."""

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:  # the device's tests run without torch
    from export.graphs import Exported
    from fedvit.methods.base import Method
    from fedvit.models.vit import PatchViT
    from fedvit.program import Batch

# with more threads torch takes many times as long for models as small as these, when something else runs, too
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a shell that runs the tests in its background lets them ignore Ctrl-C, and with them every program that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# no test reaches the network, and none finds what an earlier process downloaded
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = os.path.join(tempfile.gettempdir(), "fedvit-no-such-cache")


TESTS = Path(__file__).parent
LONGEST = (
    "e2e/test_faults.py",
    "e2e/test_run.py",
    "unit/fleet/test_experiment.py",
    "unit/coordinator/test_rounds.py",
    "unit/export/test_lower.py",
    "contracts/test_blob_exchange.py",
    "unit/coordinator/test_planner.py",
    "unit/edge_client/test_agent.py",
    "contracts/test_methods.py",
)
"""Files that come first, so that at the end no process waits for another that has just begun with one of them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file share fixtures that take seconds: where several processes test, a file goes to one of them.

    Tests of processes mostly wait: each goes to whoever is free. `make test` keeps the order that is made here.
    """
    rank = {TESTS / name: number for number, name in enumerate(LONGEST)}
    for item in items:
        alone = item.path in (TESTS / "e2e/test_faults.py", TESTS / "e2e/test_run.py")
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid if alone else str(item.path)))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: rank.get(item.path, len(rank)))


TINY_MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2, "mlp_ratio": 4.0}
TINY_OPTIONS = {"batch_size": 8}
TINY_CLASSES = 10


class Tiny(NamedTuple):
    """A method on the tiny model, and its verified graphs."""

    method: "Method"
    vit: "PatchViT"
    batch: "Batch"
    graphs: "dict[str, Exported]"


def make_tiny(method: "Method", cache: Path, **model: int) -> Tiny:
    """A method on the tiny model: 16 patches and 3 blocks of width 32, unless `model` says otherwise."""
    from export.graphs import export_graphs
    from fedvit.methods import build_model
    from fedvit.models import SMALL
    from fedvit.program import Batch

    vit = build_model(method, SMALL, TINY_CLASSES, seed=0, options={**TINY_MODEL, **model})
    mean, std = vit.mean_std
    batch = Batch(
        image_size=vit.image_size,
        patch_size=vit.patch_size,
        batch_size=method.samples_per_step,
        mean=mean,
        std=std,
        mask_ratio=method.mask_ratio,
        micro_batch=method.micro_batch,
    )
    return Tiny(method, vit, batch, export_graphs(method, vit, batch, cache=cache))


@pytest.fixture(scope="session")
def graph_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs of this session: an export takes seconds, so tests with equal graphs share them here, in whatever
    process they run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder / "graphs"


@pytest.fixture(scope="session")
def tiny(graph_cache: Path) -> "Callable[[str], Tiny]":
    """A method by name on the tiny model; its graphs are exported when first asked for."""
    from fedvit.methods import make_method

    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            made[name] = make_tiny(make_method(name, TINY_OPTIONS), graph_cache)
        return made[name]

    return make
