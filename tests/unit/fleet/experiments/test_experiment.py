"""From a file to a report: what is refused, what runs, what runs again, and that the figures are the record's."""

import io
import json
import os
import re
import signal
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from PIL import Image
from rich.console import Console
from safetensors.numpy import load_file
from sklearn.metrics import balanced_accuracy_score, f1_score

from coordinator.config import TrackersConfig
from fedvit.errors import ConfigError
from fedvit.models import SMALL, build_vit
from fleet.commands.experiment import experiment_command
from fleet.experiments.cells import Grid
from fleet.experiments.command import select_cells, write_results
from fleet.experiments.folder import CellFolder, FinishedCell, read_progress
from fleet.experiments.outcome import find_leader, make_outcome
from fleet.experiments.report import html_report, markdown_report, terminal_report
from fleet.experiments.report_tables import describe_spread
from fleet.experiments.scheduler import Dealer
from fleet.experiments.settings import read_experiment
from fleet.partition import DealSettings, deal
from profiles.report.curves import Accuracy, RoundFigures
from profiles.report.experiment import CellResult, ExperimentOutcome
from tests.support.codes import has_code
from tests.support.event_files import steps
from tests.support.experiments import ExperimentRun, read_closed, read_grid, run_experiment, written_experiment
from tests.support.forked import Forked
from tests.support.reports import experiment_outcome
from tests.support.tiny import TINY_MODEL
from tests.support.waiting import WAIT_S, wait_until

SHIPPED = sorted((Path(__file__).parents[4] / "fleet" / "experiments").rglob("*.toml"))
DOCS = Path(__file__).parents[4] / "docs" / "experiments.md"
FILE = """
# Two methods, two partitions.
# A few seconds.
dataset = "digits"
image_size = 32
devices = 3
rounds = 2
seeds = [0]
evaluate_every = 2
test_share = 0.9
global_test = 0.05

[model]
options = {patch_size = 8, width = 32, depth = 3, heads = 2, mlp_ratio = 4.0}

[partitions.skewed]
partition = "dirichlet"
alpha = 0.3

[partitions.even]
partition = "iid"

[common]
batch_size = 8
epochs = 1
local_blocks = 1

[methods.fedavg]
method = "fedavg"
lr = 0.05

[methods.eftvit]
method = "eftvit"
""".lstrip()


def written(folder: Path, text: str = FILE) -> Path:
    return written_experiment(folder, text)


# --- the file -----------------------------------------------------------------------------------------


class TestGrid:
    def test_cells(self, tmp_path: Path) -> None:
        """2 seeds x 2 partitions x 2 methods; a seed's comparison is whole before the next seed begins."""
        grid = read_grid(written(tmp_path, FILE.replace("seeds = [0]", "seeds = [3, 5]")))
        assert grid.name == "tiny"
        assert grid.description == "Two methods, two partitions.\nA few seconds."
        assert [cell.path for cell in grid.cells] == [
            f"{method}/{partition}/seed-{seed}"
            for seed in (3, 5)
            for partition in ("skewed", "even")
            for method in ("fedavg", "eftvit")
        ]
        assert len({cell.digest for cell in grid.cells}) == 8
        assert len({cell.deal.digest for cell in grid.cells}) == 4  # the methods of a comparison share their devices

    def test_options(self, tmp_path: Path) -> None:
        """Common options go to methods that have them (`local_blocks` is EFTViT's alone); a method's own win."""
        text = FILE.replace("lr = 0.05", "lr = 0.05\nbatch_size = 4")
        grid = read_grid(written(tmp_path, text))
        assert grid.methods["fedavg"]["batch_size"] == 4
        assert "local_blocks" not in grid.methods["fedavg"]
        assert (grid.methods["eftvit"]["batch_size"], grid.methods["eftvit"]["local_blocks"]) == (8, 1)
        run = grid.cells[1].run
        assert run["options"] == {key: value for key, value in grid.methods["eftvit"].items() if key != "method"}
        assert run["model_options"] == {"image_size": 32, **{k: v for k, v in TINY_MODEL.items() if k != "image_size"}}
        assert (run["rounds"], run["devices"], run["seed"], run["accelerator"]) == (2, 3, 0, "cpu")

    def test_one_method_under_two_names(self, tmp_path: Path) -> None:
        grid = read_grid(written(tmp_path, FILE + '\n[methods.masked]\nmethod = "eftvit"\nmask = 0.5\n'))
        assert [cell.run["options"]["mask"] for cell in grid.cells] == [0.0, 0.75, 0.5] * 2

    def test_tables_of_a_run_that_one_method_has(self, tmp_path: Path) -> None:
        own = "lr = 0.05\nprivacy = { noise_multiplier = 1.0, clip = 0.5 }\nrobust = { strikes = 0 }\nupdates = {}"
        fedavg, eftvit, *_ = read_grid(written(tmp_path, FILE.replace("lr = 0.05", own))).cells
        assert (fedavg.run["privacy"]["noise_multiplier"], fedavg.run["robust"]["strikes"]) == (1.0, 0)
        assert (eftvit.run["privacy"]["noise_multiplier"], eftvit.run["robust"]["strikes"]) == (0.0, 3)

    def test_model_and_cohort_that_one_method_has(self, tmp_path: Path) -> None:
        """Options of the experiment's model stay, unless the method has another model."""
        deeper = "lr = 0.05\nmodel_options = { depth = 4 }\ncohort = 2"
        other = 'method = "eftvit"\nmodel = "test_vit"\nmodel_options = { patch_size = 8 }'
        text = FILE.replace("lr = 0.05", deeper).replace('method = "eftvit"', other)
        fedavg, eftvit, *_ = read_grid(written(tmp_path, text)).cells
        assert fedavg.run["model_options"] == {**TINY_MODEL, "depth": 4}
        assert (fedavg.run["cohort"], eftvit.run["cohort"]) == (2, 1.0)
        assert (eftvit.run["model"], eftvit.run["model_options"]) == ("test_vit", {"image_size": 32, "patch_size": 8})

    @pytest.mark.parametrize(
        ("old", "new", "code"),
        [
            ("lr = 0.05", "model_options = 5", "FV1004"),
            ("lr = 0.05", "privacy = { noise_multiplier = 1.0 }", "FV1004"),
            ("lr = 0.05", "updates = {}\n[run.updates]\nup = 'int8'", "FV2107"),
            ("rounds = 2", "rouns = 2", "FV1002"),
            ("rounds = 2", "rounds = 0", "FV2107"),
            ("rounds = 2", "", "FV2107"),
            ("devices = 3", "devices = 1\nattacks = 1", "FV2107"),
            ("seeds = [0]", "seeds = [1, 1]", "FV2107"),
            ("[model]", "[model]\nnmae = 1", "FV1002"),
            ("width = 32", "widht = 32", "FV1105"),
            ('"dirichlet"', '"dirichlt"', "FV2002"),
            ('dataset = "digits"', 'dataset = "digitz"', "FV2001"),
            ("alpha = 0.3", "alhpa = 0.3", "FV2002"),
            ('method = "fedavg"', "", "FV2107"),
            ('method = "fedavg"', 'method = "fedagv"', "FV1101"),
            ("lr = 0.05", "mu = 0.5", "FV1101"),
            ("lr = 0.05", "lr = -1", "FV1104"),
            ("local_blocks = 1", "local = 0.5", "FV2107"),
            ("[methods.fedavg]", '[methods."fed avg"]', "FV1006"),
            ("[common]", "[run]\nseed = 1\n[common]", "FV2107"),
            ("[common]", "[run]\nqorum = 1\n[common]", "FV1002"),
            ("[common]", "[common", "FV1001"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, old: str, new: str, code: str) -> None:
        with pytest.raises(ConfigError, check=has_code(code)):
            read_grid(written(tmp_path, FILE.replace(old, new, 1)))

    def test_other_keys_of_a_run(self, tmp_path: Path) -> None:
        grid = read_grid(written(tmp_path, FILE + "\n[run]\nquorum = 0.5\n"))
        assert {cell.run["quorum"] for cell in grid.cells} == {0.5}

    def test_the_example_of_the_docs(self, tmp_path: Path) -> None:
        examples = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
        assert examples
        for text in examples:
            assert read_grid(written(tmp_path, text)).cells

    def test_metrics_are_no_part_of_a_cell(self, tmp_path: Path) -> None:
        """What is finished stays finished when its metrics are to go elsewhere."""
        grid = read_grid(written(tmp_path, FILE + '\n[trackers]\nwriters = ["tensorboard"]\n'))
        assert grid.experiment.trackers == TrackersConfig(writers=("tensorboard",))
        assert grid.cells == read_grid(written(tmp_path)).cells
        with pytest.raises(ConfigError, check=has_code("FV2107")):
            read_grid(written(tmp_path, FILE + '\n[run]\ntrackers = { writers = ["mlflow"] }\n'))

    def test_parts_that_were_dealt_out_before(self, tmp_path: Path) -> None:
        """Each seed has its folder; new parts are a new cell, and no data set is needed."""
        for seed in (3, 5):
            deal("digits", "iid", 3, tmp_path / f"own-{seed}", DealSettings(seed=seed, global_test=0.05))
        text = FILE.replace('dataset = "digits"\n', "").replace("seeds = [0]", "seeds = [3, 5]")
        tables = f'[partitions.own]\nparts = "{tmp_path}/own-{{seed}}"\n\n[common]'
        file = written(tmp_path, re.sub(r"\[partitions.*\[common\]", tables, text, flags=re.DOTALL))
        grid = read_grid(file)
        assert [cell.path for cell in grid.cells][::2] == ["fedavg/own/seed-3", "fedavg/own/seed-5"]
        folders = [CellFolder(cell, tmp_path / "out").parts for cell in grid.cells]
        assert folders == [tmp_path / "own-3"] * 2 + [tmp_path / "own-5"] * 2
        Dealer().deal(CellFolder(grid.cells[0], tmp_path / "out"))
        assert not (tmp_path / "out").exists()
        deal("digits", "iid", 3, tmp_path / "own-3", DealSettings(seed=9, global_test=0.05, overwrite=True))
        again = read_grid(file)
        assert [one.digest == other.digest for one, other in zip(grid.cells, again.cells, strict=True)] == [
            False, False, True, True,
        ]  # fmt: skip
        for old, new, code in (
            ("own-{seed}", "gone-{seed}", "FV2129"),
            ("devices = 3", "devices = 2", "FV2129"),
            ("image_size = 32", "image_size = 16", "FV2129"),
            ("lr = 0.05", "tune = { lr = [0.1, 0.2] }", "FV2129"),
            ("rounds = 2", "rounds = 2\nvalidation_share = 0.5", "FV2129"),
            ("[common]", 'partition = "iid"\n[common]', "FV2107"),
            ("[common]", '[partitions.even]\npartition = "iid"\n[common]', "FV2107"),
        ):
            with pytest.raises(ConfigError, check=has_code(code)):
                read_grid(written(tmp_path / "other", file.read_text().replace(old, new, 1)))

    def test_official_and_validation_images(self, tmp_path: Path) -> None:
        text = FILE.replace("test_share = 0.9", 'test_share = "official"\nvalidation_share = 0.2')
        for cell in read_grid(written(tmp_path, text)).cells:
            assert (cell.deal.test_share, cell.deal.validation_share) == ("official", 0.2)
            assert CellFolder(cell, tmp_path).parts.name == f"validation-{cell.deal.validation_share}-seed-0"
        table = FILE.replace('dataset = "digits"', 'dataset = "digits"\ncolumns = { lable = "x" }')
        with pytest.raises(ConfigError, check=has_code("FV2011", "lable")):
            read_grid(written(tmp_path, table))

    def test_only(self, tmp_path: Path) -> None:
        grid = read_grid(written(tmp_path))
        assert [cell.path for cell in select_cells(grid, ("*/even", "fedavg/*")).cells] == [
            "fedavg/skewed/seed-0", "fedavg/even/seed-0", "eftvit/even/seed-0",
        ]  # fmt: skip
        assert select_cells(grid, ()) == grid
        with pytest.raises(ConfigError, check=has_code("FV2105")):
            select_cells(grid, ("fedavg",))

    def test_dataset_of_the_command_line(self, tmp_path: Path) -> None:
        file = written(tmp_path, FILE.replace('"digits"', '"not-there.zip"'))
        assert read_grid(file, "digits").cells == read_grid(written(tmp_path)).cells
        with pytest.raises(ConfigError, check=has_code("FV2001")):
            read_grid(file, "digitz")

    def test_checkpoint_of_the_command_line(self, tmp_path: Path) -> None:
        file = written(tmp_path)
        assert read_experiment(file).experiment.model.pretrained is False
        assert read_experiment(file, pretrained="w.safetensors").experiment.model.pretrained == "w.safetensors"

    def test_cells_with_other_weights_run_again(self, tmp_path: Path) -> None:
        """The file has the same name, as that of backbone-small.toml after another run."""
        (file,) = (path for path in SHIPPED if path.stem == "pfedpg-table4-small")
        digests = []
        for content in (b"first", b"second", b"first"):
            (tmp_path / "weights").write_bytes(content)
            digests.append({cell.digest for cell in read_grid(file, "digits", str(tmp_path / "weights")).cells})
        assert digests[0] == digests[2]
        assert not digests[0] & digests[1]

    @pytest.mark.parametrize(
        "file",
        [
            path if path.stem.endswith(("-small", "-mid")) else pytest.param(path, marks=pytest.mark.slow)
            for path in SHIPPED
        ],
        ids=lambda path: path.stem,
    )
    def test_shipped_files_are_checked(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its data set is not here, nor are its weights, of which only the path is checked. Its name is that of its
        results."""
        monkeypatch.chdir(tmp_path)
        if isinstance(weights := tomllib.loads(file.read_text()).get("model", {}).get("pretrained"), str):
            Path(weights).parent.mkdir(parents=True)
            Path(weights).touch()
        assert file.stem not in {other.stem for other in SHIPPED if other != file}
        grid = read_grid(file, "digits")
        assert grid.description
        assert grid.cells or grid.searches

    def test_dry_run(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(
            experiment_command, [str(written(tmp_path)), "--out", str(tmp_path / "out"), "--dry-run"],
            catch_exceptions=False,
        )  # fmt: skip
        assert "eftvit/even/seed-0\n4 cells of 2 rounds on 3 devices, 4 to run" in result.stdout
        assert not (tmp_path / "out").exists()


# --- running ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_here(graph_cache: Path) -> Callable[[Path, Path], ExperimentRun]:
    return partial(run_experiment, graph_cache=graph_cache)


@pytest.fixture(scope="module")
def tiny_run(
    tmp_path_factory: pytest.TempPathFactory, run_here: Callable[[Path, Path], ExperimentRun]
) -> tuple[Path, ExperimentRun]:
    out = tmp_path_factory.mktemp("experiment")
    return out, run_here(written(out), out)


class TestRun:
    def test_every_cell_has_its_figures(self, tiny_run: tuple[Path, ExperimentRun]) -> None:
        _, (outcome, ran, lines) = tiny_run
        assert len(ran) == 4
        assert not [cell for cell in outcome.cells if cell.result is None], lines
        for cell in outcome.cells:
            assert cell.result is not None
            assert sorted(cell.result.accuracy_by_device) == ["device-0", "device-1", "device-2"]
            assert [entry.round for entry in cell.result.rounds] == [1, 2]
            assert [entry.accuracy is None for entry in cell.result.rounds] == [True, False]
            assert cell.result.protocol is not None
            assert cell.result.protocol.startswith("newest tensors")
            assert cell.result.refusals == 0
            assert cell.result.wall_s > 0
            assert (cell.result.peak_rss_bytes or 0) > 50e6
            shares = list(cell.result.accuracy_by_device.values())
            assert cell.result.accuracy.mean == pytest.approx(sum(shares) / 3)
        assert all(entry.std_over_seeds is None for entry in outcome.comparisons)
        assert describe_spread(outcome).startswith("single seed")

    def test_generic_model_is_tested_on_images_of_no_device(self, tiny_run: tuple[Path, ExperimentRun]) -> None:
        """As timm's own model answers with the server's tensors; EFTViT's first blocks are on devices alone."""
        out, (outcome, _, _) = tiny_run
        model = build_vit(SMALL, 10, seed=0, options=TINY_MODEL).vit
        found = load_file(out / "cells/fedavg/even/seed-0/runs/run/model.safetensors")
        model.load_state_dict({name: torch.from_numpy(value) for name, value in found.items()})
        files = sorted((out / "parts/even/seed-0/global-test").glob("*/*.png"))
        pixels = np.stack([np.asarray(Image.open(file)) for file in files])
        with torch.no_grad():
            logits = model(torch.from_numpy((pixels / 127.5 - 1).astype(np.float32).transpose(0, 3, 1, 2)))
        right = logits.argmax(dim=1).numpy() == [int(file.parent.name) for file in files]
        assert len(files) == 90
        for method, expected in (("fedavg", right.mean()), ("eftvit", None)):
            entry = outcome.comparison(method, "even")
            assert entry is not None
            assert entry.generic == (None if expected is None else pytest.approx(expected))

    def test_scores_that_weigh_classes_equally(self, tiny_run: tuple[Path, ExperimentRun]) -> None:
        """Scikit-learn scores timm's own model alike; EFTViT's devices do not count their answers by class."""
        out, (outcome, _, _) = tiny_run
        fedavg, eftvit = (outcome.find_cells(method, "even")[0].result for method in ("fedavg", "eftvit"))
        assert fedavg is not None
        assert eftvit is not None
        assert eftvit.balanced_accuracy is eftvit.macro_f1 is None
        model = build_vit(SMALL, 10, seed=0, options=TINY_MODEL).vit
        found = load_file(out / "cells/fedavg/even/seed-0/runs/run/model.safetensors")
        model.load_state_dict({name: torch.from_numpy(value) for name, value in found.items()})
        for device in ("device-0", "device-1", "device-2"):
            files = sorted((out / "parts/even/seed-0" / device / "test").glob("*/*.png"))
            pixels = np.stack([np.asarray(Image.open(file)) for file in files])
            with torch.no_grad():
                logits = model(torch.from_numpy((pixels / 127.5 - 1).astype(np.float32).transpose(0, 3, 1, 2)))
            labels, answers = [int(file.parent.name) for file in files], logits.argmax(dim=1).numpy()
            assert fedavg.balanced_by_device[device] == pytest.approx(balanced_accuracy_score(labels, answers))
            f1 = f1_score(labels, answers, average="macro", zero_division=0)
            assert fedavg.macro_f1_by_device[device] == pytest.approx(f1)
        assert fedavg.balanced_accuracy == pytest.approx(np.mean([*fedavg.balanced_by_device.values()]))
        table = markdown_report(outcome)
        assert "balanced accuracy" in table
        shown = [f"{entry.balanced_accuracy:.3f}" for entry in outcome.comparisons if entry.balanced_accuracy]
        assert len(shown) == 2
        assert f"| fedavg | {' | '.join(shown)} |" in table
        assert "macro F1" in html_report(outcome).replace("Macro f1", "macro F1")

    def test_what_is_sent(self, tiny_run: tuple[Path, ExperimentRun]) -> None:
        """FedAvg sends up the whole model, 48k weights of 4 bytes; EFTViT masks three quarters of the patches."""
        _, (outcome, _, _) = tiny_run
        fedavg, eftvit = (outcome.comparison(method, "even") for method in ("fedavg", "eftvit"))
        assert fedavg is not None
        assert eftvit is not None
        assert 0.1e6 < fedavg.bytes_up < 0.3e6
        assert eftvit.flops is not None
        assert fedavg.flops is not None
        assert eftvit.flops < fedavg.flops

    def test_methods_share_their_devices(self, tiny_run: tuple[Path, ExperimentRun]) -> None:
        out, _ = tiny_run
        assert sorted(path.parent.name for path in (out / "parts").glob("*/seed-0")) == ["even", "skewed"]

    def test_little_is_left_of_a_finished_cell(self, tiny_run: tuple[Path, ExperimentRun]) -> None:
        out, _ = tiny_run
        home = out / "cells/fedavg/even/seed-0/runs/run"
        assert (home / "model.safetensors").is_file()
        assert not (home / "state").exists()
        assert not (home / "blobs").exists()

    def test_a_second_call_runs_nothing(
        self, tiny_run: tuple[Path, ExperimentRun], run_here: Callable[[Path, Path], ExperimentRun]
    ) -> None:
        out, (first, _, _) = tiny_run
        again, ran, lines = run_here(written(out), out)
        assert (ran, lines) == ([], [])
        assert again == first

    @pytest.mark.slow
    def test_a_changed_option_runs_its_cells_alone(
        self, tiny_run: tuple[Path, ExperimentRun], run_here: Callable[[Path, Path], ExperimentRun], tmp_path: Path
    ) -> None:
        """Another learning rate for FedAvg: its two cells run again; a third partition would add cells alone."""
        out, (first, _, _) = tiny_run
        changed, ran, lines = run_here(written(tmp_path, FILE.replace("lr = 0.05", "lr = 0.01")), out)
        assert ran == ["fedavg/skewed/seed-0", "fedavg/even/seed-0"]
        assert lines[0] == "2 of 4 cells are finished already"
        assert changed.comparison("eftvit", "even") == first.comparison("eftvit", "even")
        assert changed.methods["fedavg"]["lr"] == 0.01

    def test_a_cell_that_fails_leaves_the_others(
        self, run_here: Callable[[Path, Path], ExperimentRun], tmp_path: Path
    ) -> None:
        """No device would take such a learning rate; the next call tries that cell again, and only that."""
        text = FILE.replace('[partitions.even]\npartition = "iid"\n', "").replace("rounds = 2", "rounds = 1")
        text = text.replace('method = "eftvit"', 'method = "fedavg"\nlr = 1e30').replace("local_blocks = 1", "")
        file = written(tmp_path, text.replace("[methods.eftvit]", "[methods.wild]"))
        outcome, _, lines = run_here(file, tmp_path)
        assert [entry.method for entry in outcome.comparisons] == ["fedavg"]
        failure = outcome.cells[1].failure
        assert failure is not None
        assert failure.startswith("ConfigError: devices would refuse the Program of the method's options: ")
        assert any(line.startswith("wild/skewed/seed-0: failed: ConfigError") for line in lines)
        assert run_here(file, tmp_path)[1] == ["wild/skewed/seed-0"]


class TestReports:
    def test_the_page_has_the_figures_of_the_json(self, tiny_run: tuple[Path, ExperimentRun], tmp_path: Path) -> None:
        _, (outcome, _, _) = tiny_run
        write_results(outcome, tmp_path)
        record = json.loads((tmp_path / "results.json").read_text())
        assert msgspec.convert(record, ExperimentOutcome) == outcome
        page = (tmp_path / "report.html").read_text()
        table = (tmp_path / "results.md").read_text()
        assert len(record["comparisons"]) == 4
        for entry in record["comparisons"]:
            shown = f"{entry['accuracy']:.3f} ± {entry['std_over_devices']:.3f}"
            assert shown in page
            assert shown in table
            assert f"{entry['bytes_up'] / 1e6:.3f}" in page
        assert page.count("<svg") == 10  # curves by round and against three costs, and spread, of two partitions
        assert page.count("MB down and up, all devices") == page.count("seconds of rounds") == 2
        assert "Two methods, two partitions." in page
        assert "single seed" in page
        assert not re.search(r'(src|href)="(?!#|data:)', page)  # it needs no other file
        assert html_report(outcome) == page


def figures(mean: float) -> CellResult:
    accuracy = Accuracy(mean=mean, std_over_devices=0.1, weighted=mean)
    return CellResult(
        digest="", software="1", protocol="p", accuracy=accuracy, accuracy_by_device={"device-0": mean}, wall_s=10.0,
        bytes_down=2e6, bytes_up=1e6, flops=None, peak_rss_bytes=None, refusals=0,
        rounds=[
            RoundFigures(
                round=1, cohort=1, accepted=1, accuracy=accuracy, train_loss=None, bytes_down=None, bytes_up=None,
                flops=None,
            )
        ],
    )  # fmt: skip


class TestOutcome:
    """Two seeds; FedAvg .2 and .4: mean .3, sample deviation .1 * sqrt 2 = .141. EFTViT .5 in one seed alone."""

    @pytest.fixture
    def grid(self, tmp_path: Path) -> Grid:
        return read_grid(written(tmp_path, FILE.replace("seeds = [0]", "seeds = [0, 1]")))

    def outcome(self, grid: Grid, known: dict[str, float]) -> ExperimentOutcome:
        return make_outcome(
            grid, [FinishedCell(cell, figures(known[cell.path]), None) for cell in grid.cells if cell.path in known]
        )

    def test_over_seeds(self, grid: Grid) -> None:
        outcome = self.outcome(grid, {"fedavg/even/seed-0": 0.2, "fedavg/even/seed-1": 0.4, "eftvit/even/seed-0": 0.5})
        entry = outcome.comparison("fedavg", "even")
        assert entry is not None
        assert entry.seeds == [0, 1]
        assert entry.accuracy == pytest.approx(0.3)
        assert entry.std_over_seeds == pytest.approx(0.02**0.5)
        assert find_leader(outcome, "even") is None  # a seed of the best one is not finished
        assert find_leader(outcome, "skewed") is None
        table = markdown_report(outcome)
        assert "| fedavg | - | 0.300 ± 0.141 [-0.971, 1.571] |" in table
        assert "| eftvit | - | 0.500 (1 of 2 seeds) |" in table
        assert "without, a single seed is finished" in table
        assert outcome.differences == []  # one seed of both
        assert "5 of 8 cells are not finished" in table

    def test_all_seeds(self, grid: Grid) -> None:
        outcome = self.outcome(grid, {cell.path: 0.1 * (1 + cell.seed) for cell in grid.cells})
        assert describe_spread(outcome).startswith(
            "± is the sample standard deviation over 2 seeds of the mean over devices, [ ]"
        )
        assert find_leader(outcome, "even") is None  # all are equal

    @pytest.mark.parametrize(
        ("eftvit", "leader"),
        [
            ((0.5, 0.701), "eftvit"),  # 0.300 and 0.301 above the same seeds of FedAvg: [0.294, 0.307]
            ((0.202, 0.4005), None),  # 0.002 and 0.0005 above: [-0.009, 0.011]
            ((0.4, 0.41), None),  # above in both seeds, but the interval reaches below zero
        ],
    )
    def test_bold_is_what_is_shown_to_be_ahead(
        self, grid: Grid, eftvit: tuple[float, float], leader: str | None
    ) -> None:
        known = {"fedavg/even/seed-0": 0.2, "fedavg/even/seed-1": 0.4}
        known |= {f"eftvit/even/seed-{seed}": value for seed, value in enumerate(eftvit)}
        outcome = self.outcome(grid, known)
        assert find_leader(outcome, "even") == leader
        assert ("| **" in markdown_report(outcome)) == (leader is not None)

    def test_a_terminal_of_80_columns(self, grid: Grid) -> None:
        outcome = self.outcome(grid, {cell.path: 0.25 for cell in grid.cells})
        screen = io.StringIO()
        Console(file=screen, width=80).print(terminal_report(outcome))
        shown = screen.getvalue()
        assert "…" not in shown
        assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
        assert shown.count("0.250 ± 0.000") == 4
        assert shown.count("1.000") == 4  # MB up

    def test_protocols_name_the_methods_that_they_are_of(self, grid: Grid) -> None:
        """Where all rows have one, it is named once."""
        means = {cell.path: 0.25 for cell in grid.cells}
        assert "accuracy: p  \n" in markdown_report(self.outcome(grid, means))
        ended = [
            FinishedCell(cell, replace(figures(0.25), protocol="kept" if cell.method == "eftvit" else "newest"), None)
            for cell in grid.cells
        ]
        outcome = make_outcome(grid, ended)
        for shown in (markdown_report(outcome), html_report(outcome)):
            assert "accuracy of eftvit: kept" in shown
            assert "accuracy of fedavg: newest" in shown

    def test_failure_is_reported(self, grid: Grid) -> None:
        outcome = make_outcome(grid, [FinishedCell(grid.cells[0], None, "disk full")])
        assert outcome.comparisons == []
        assert "8 of 8 cells are not finished; failed: fedavg/skewed/seed-0: disk full" in markdown_report(outcome)


def learning_curve(*means: float) -> CellResult:
    """An evaluation in every second round."""
    last = figures(means[-1])
    [entry] = last.rounds
    rounds = [replace(entry, round=number, accuracy=None, longest_s=2.0) for number in range(1, 2 * len(means) + 1)]
    for number, mean in enumerate(means, start=1):
        rounds[2 * number - 1] = replace(
            entry,
            round=2 * number,
            accuracy=Accuracy(mean=mean, std_over_devices=0.1, weighted=mean),
            longest_s=2.0,
        )
    return replace(last, rounds=rounds)


def test_report_has_late_averages_and_rounds_to_an_accuracy(tmp_path: Path) -> None:
    """Evaluations in rounds 2, 4, 6 and 8, of which the last four rounds have two. FedAvg reaches 0.5 in rounds 4 and
    8, EFTViT with one of two seeds."""
    head = 'reference = "eftvit"\ntarget_accuracy = 0.5\nlate_rounds = 4\n'
    grid = read_grid(written(tmp_path, head + FILE.replace("seeds = [0]", "seeds = [0, 1]")))
    curves = {
        ("fedavg", 0): learning_curve(0.1, 0.5, 0.4, 0.6),
        ("fedavg", 1): learning_curve(0.1, 0.2, 0.4, 0.8),
        ("eftvit", 0): learning_curve(0.1, 0.2, 0.3, 0.5),
        ("eftvit", 1): learning_curve(0.1, 0.2, 0.3, 0.3),
    }
    ended = [
        FinishedCell(cell, curves[cell.method, cell.seed], None) for cell in grid.cells if cell.partition == "even"
    ]
    outcome = make_outcome(grid, ended)
    entry, other = (outcome.comparison(method, "even") for method in ("fedavg", "eftvit"))
    assert entry is not None
    assert other is not None
    assert entry.late == pytest.approx((0.5 + 0.6) / 2)
    assert entry.late_std == pytest.approx((0.1 + 0.2) / 2)
    assert (entry.rounds_to_target, other.rounds_to_target) == (6, None)
    assert (entry.seconds_to_target, other.seconds_to_target) == ((4 + 8) * 2.0 / 2, None)
    [difference] = outcome.differences
    assert (difference.method, difference.reference) == ("fedavg", "eftvit")
    assert difference.mean == pytest.approx((0.1 + 0.5) / 2)
    table = markdown_report(outcome)
    assert "| method | partition | mean of the last 4 rounds | ± evaluations | rounds to 0.5 | s of training |" in table
    assert "| fedavg | even | 0.550 | 0.150 | 6 | 12.000 |" in table
    assert "| eftvit | even | 0.350 | 0.050 | not reached | - |" in table
    assert "difference in accuracy to eftvit" in table
    assert "not reached" in html_report(outcome)
    assert "progress" not in markdown_report(make_outcome(read_grid(written(tmp_path, FILE)), []))


def test_gains_are_of_the_same_device_and_seed(tmp_path: Path) -> None:
    """EFTViT is 0.1 above in seed 0, and 0.3 below in seed 1."""
    grid = read_grid(written(tmp_path, 'reference = "fedavg"\n' + FILE.replace("seeds = [0]", "seeds = [0, 1]")))
    known = {("fedavg", 0): 0.4, ("eftvit", 0): 0.5, ("fedavg", 1): 0.6, ("eftvit", 1): 0.3}
    ended = [FinishedCell(cell, figures(known[cell.method, cell.seed]), None) for cell in grid.cells]
    outcome = make_outcome(grid, ended)
    assert outcome.sort_gains("eftvit", "even") == pytest.approx([-0.3, 0.1])
    assert outcome.sort_gains("fedavg", "even") == []
    assert "| eftvit | even | -0.100 | -0.300 | -0.100 | +0.100 | 50% |" in markdown_report(outcome)
    page = html_report(outcome)
    assert page.count("<svg") == 6  # curves, spread and gains of two partitions
    assert "gain over fedavg" in page
    without = make_outcome(read_grid(written(tmp_path)), ended)
    assert without.gains == []
    assert "gain over" not in html_report(without)


def test_reference_is_a_method_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV2107")):
        read_grid(written(tmp_path, 'reference = "fedavgg"\n' + FILE))


def test_compiled_steps_need_the_engine_of_torch_and_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: str) -> str:
        command = [str(written(tmp_path, text)), "--compile"]
        with pytest.raises(ConfigError, check=has_code("FV2102")) as caught:
            CliRunner().invoke(experiment_command, command, catch_exceptions=False, standalone_mode=False)
        return str(caught.value)

    assert "--compile is for an experiment with engine = 'torch', not 'onnx'" in fail(FILE)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no 'no-such-compiler'" in fail('engine = "torch"\n' + FILE)


@pytest.mark.slow
def test_experiment_that_was_interrupted_is_resumed(
    tmp_path: Path, cache: Path, run_here: Callable[[Path, Path], ExperimentRun]
) -> None:
    """Ctrl-C after the second of 12 rounds: no process is left, and the run resumes after it, with its metrics."""
    only = FILE.replace('[partitions.even]\npartition = "iid"\n', "").partition("[methods.eftvit]")[0]
    text = only.replace("local_blocks = 1", "").replace("rounds = 2", "rounds = 12").replace("every = 2", "every = 12")
    file, out = written(tmp_path, text + '\n[trackers]\nwriters = ["tensorboard"]\n'), tmp_path / "out"
    home = out / "cells/fedavg/skewed/seed-0"
    environment: dict[str, Any] = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = Forked("fleet.cli", ["experiment", str(file), "--out", str(out)], tmp_path / "log", environment)
    try:
        wait_until(lambda: read_progress(home).round >= 2 or process.poll() is not None, "round 2")
        assert process.poll() is None, (tmp_path / "log").read_text()
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert not alive
    finally:
        process.kill()
    assert "0 of 1 cells are finished; the same command resumes" in (tmp_path / "log").read_text()
    before = read_closed(home)
    assert 2 <= len(before) < 12
    outcome, ran, _ = run_here(file, out)
    assert ran == ["fedavg/skewed/seed-0"]
    assert read_closed(home)[: len(before)] == before
    result = outcome.cells[0].result
    assert result is not None
    assert len(result.rounds) == 12
    assert steps(home / "runs" / "run", "loss/train") == list(range(1, 13))


def test_what_noise_spent_stands_below_the_accuracies() -> None:
    outcome = experiment_outcome()
    first, *rest = outcome.comparisons
    private = replace(outcome, comparisons=[replace(first, epsilon=4.25, feature_epsilon=900.0), *rest])
    line = "fedavg on even: epsilon of updates 4.25, epsilon of one device's features 900, over all rounds"
    assert line in markdown_report(private)
    assert line.replace("'", "&#39;") in html_report(private)
    assert "epsilon" not in markdown_report(outcome) + html_report(outcome)
