"""Novel devices of an experiment: left out of the training, joined after it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from fedvit.errors import ConfigError
from fedvit.models import SMALL, build_vit
from fleet.experiments.cells import NovelDevices
from fleet.experiments.report import html_report, markdown_report
from tests.support.codes import has_code
from tests.support.experiments import ExperimentRun, read_grid, run_experiment, written_experiment
from tests.support.tiny import TINY_MODEL

FILE = """
# Novel devices.
dataset = "digits"
image_size = 32
devices = 4
rounds = 2
seeds = [0]
evaluate_every = 2
test_share = 0.8
engine = "torch"

[model]
options = {patch_size = 8, width = 32, depth = 2, heads = 2, mlp_ratio = 4.0}

[novel]
devices = 1
rounds = 2
options = { epochs = 2 }

[partitions.skewed]
partition = "dirichlet"
alpha = 0.3

[common]
batch_size = 16
epochs = 1
lr = 0.05

[methods.fedavg]
method = "fedavg"

[methods.fedbabu]
method = "fedbabu"

[methods.fedper]
method = "fedper"

[methods.apfl]
method = "apfl"
form = "code"
momentum = 0.5

[methods.pfedme]
method = "pfedme"

[methods.eftvit]
method = "eftvit"
local_blocks = 1

[methods.fedtp]
method = "fedtp"

[methods.pfedpg]
method = "pfedpg"
novel = "generator"
evaluate_with = "base"
""".lstrip()
METHODS = ("fedavg", "fedbabu", "fedper", "apfl", "pfedme", "eftvit", "fedtp", "pfedpg")


def outputs(out: Path, method: str, run: str) -> Path:
    return out / f"cells/{method}/skewed/seed-0/runs/{run}"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> tuple[Path, ExperimentRun]:
    out = tmp_path_factory.mktemp("novel")
    return out, run_experiment(written_experiment(out, FILE), out, graph_cache=graph_cache)


@pytest.mark.slow
def test_novel_device_is_in_no_training(done: tuple[Path, ExperimentRun]) -> None:
    """The same device for all methods; three others trained."""
    _, (outcome, _, lines) = done
    novel: set[str] = set()
    for cell in outcome.cells:
        assert cell.result is not None, lines
        [device] = cell.result.novel_by_device
        assert cell.result.novel is not None
        assert cell.result.novel.mean == cell.result.novel_by_device[device]
        assert len(cell.result.accuracy_by_device) == 3
        assert device not in cell.result.accuracy_by_device
        novel.add(device)
    assert len(novel) == 1


@pytest.mark.slow
def test_reports_have_a_table_of_novel_devices(done: tuple[Path, ExperimentRun]) -> None:
    _, (outcome, _, _) = done
    table = markdown_report(outcome).partition("novel devices")[2]
    for method in METHODS:
        entry = outcome.comparison(method, "skewed")
        assert entry is not None
        assert entry.novel is not None
        assert f"| {method} | {entry.novel:.3f} |" in table
        first, last = entry.novel_rounds
        assert last == entry.novel
        assert f"| {method} | skewed | {first:.3f} {last:.3f} |" in table
    assert "<h2>Novel devices</h2>" in html_report(outcome)


@pytest.mark.slow
def test_novel_device_without_an_own_part_tests_the_trained_model(done: tuple[Path, ExperimentRun]) -> None:
    """As timm's own model answers with the server's tensors."""
    out, (outcome, _, _) = done
    result = outcome.cells[0].result
    assert result is not None
    [(device, accuracy)] = result.novel_by_device.items()
    model = build_vit(SMALL, 10, seed=0, options={**TINY_MODEL, "depth": 2}).vit
    found = load_file(outputs(out, "fedavg", "run") / "model.safetensors")
    model.load_state_dict({name: torch.from_numpy(value) for name, value in found.items()})
    files = sorted((out / "parts/skewed/seed-0" / device / "test").glob("*/*.png"))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    with torch.no_grad():
        logits = model(torch.from_numpy((pixels / 127.5 - 1).astype(np.float32).transpose(0, 3, 1, 2)))
    right = logits.argmax(dim=1).numpy() == [int(file.parent.name) for file in files]
    assert accuracy == pytest.approx(right.mean(), abs=1 / len(files))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "learns"), [("fedtp", False), ("pfedpg", True)])
def test_generator_gets_an_embedding_and_learns_where_it_is_asked_to(
    method: str, learns: bool, done: tuple[Path, ExperimentRun]
) -> None:
    out, (outcome, _, _) = done
    result = outcome.cells[0].result
    assert result is not None
    [device] = result.novel_by_device
    before, after = (load_file(outputs(out, method, run) / "generator.safetensors") for run in ("run", "novel"))
    moved = {name for name, value in before.items() if not np.array_equal(after[name], value)}
    assert all(name.startswith("generator/") for name in moved)
    assert bool(moved) == learns
    assert {name.split("/")[1] for name in after.keys() - before.keys()} == {device}


@pytest.mark.slow
def test_engine_of_devices_trains_novel_ones_too(tmp_path: Path, graph_cache: Path) -> None:
    """A method with a head of its own, and one whose novel devices train nothing."""
    head, *methods = FILE.partition("[methods.fedbabu]")[0].split("[methods.fedavg]")
    fedper = '\n[methods.fedper]\nmethod = "fedper"\n'
    text = "[methods.fedavg]".join([head.replace('"torch"', '"onnx"').replace("rounds = 2", "rounds = 1"), *methods])
    outcome, _, lines = run_experiment(written_experiment(tmp_path, text + fedper), tmp_path, graph_cache=graph_cache)
    for cell in outcome.cells:
        assert cell.result is not None, lines
        assert cell.result.novel is not None
        assert cell.result.refusals == 0


def test_search_leaves_novel_devices_out(tmp_path: Path) -> None:
    """Their images choose no values; they join the cells that have the chosen ones."""
    tuned = FILE.partition("[methods.fedbabu]")[0] + "tune = { momentum = [0.0, 0.9] }\n"
    [search] = read_grid(written_experiment(tmp_path, tuned)).searches
    for point in search.points:
        for cell in (cell for rung in point.tries for cell in rung):
            assert isinstance(cell.novel, NovelDevices)
            assert (cell.novel.devices, cell.novel.run) == (1, None)
        for cell in point.cells:
            assert isinstance(cell.novel, NovelDevices)
            assert cell.novel.run is not None
            assert cell.novel.run["options"]["novel"] == "own"
            assert cell.novel.run["options"]["epochs"] == 2
            assert cell.novel.run["options"]["momentum"] == point.values["momentum"]


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("[novel]\ndevices = 1", "[novel]\ndevices = 4", "FV2107"),
        (
            FILE[FILE.index("\n[model]") : FILE.index("rounds = 2\noptions")],
            "attacks = 1\n[novel]\ndevices = 3\n",
            "FV2107",
        ),
        ("options = { epochs = 2 }", "options = { epoch = 2 }", "FV2107"),
        ("options = { epochs = 2 }", "options = { epochs = 0 }", "FV1104"),
        ("[novel]\ndevices = 1\nrounds = 2\noptions = { epochs = 2 }", "", "FV2107"),
        ("[novel]\ndevices", "[novel]\ndevicez", "FV1002"),
    ],
)
def test_wrong_table_is_refused(tmp_path: Path, old: str, new: str, code: str) -> None:
    with pytest.raises(ConfigError, check=has_code(code)):
        read_grid(written_experiment(tmp_path, FILE.replace(old, new, 1)))
