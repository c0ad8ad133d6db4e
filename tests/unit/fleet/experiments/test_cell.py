"""What an experiment keeps of a cell's run: the figures of the read model, by device and round."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.record.tables import SavedState
from coordinator.run_view import RunView, read_run
from fedvit.errors import ConfigError, DiskFull
from fedvit.models import SMALL, build_vit
from fedvit.tensors import pack
from fleet.datasets.digits import read_digits
from fleet.experiments.cell import generic_accuracy, make_result, run_cell
from fleet.experiments.cells import SCHEMA, CellOptions, Deal, GridCell
from fleet.experiments.folder import CELL_FILE
from fleet.partition import DealSettings, deal
from tests.support.codes import has_code
from tests.support.experiments import read_grid, write_file, written_experiment
from tests.support.records import RUN, begin_run, evaluated, trained
from tests.support.tiny import TINY_MODEL

CELL = GridCell(
    schema=SCHEMA,
    method="eftvit",
    partition="even",
    seed=0,
    deal=Deal(dataset="digits", image_size=8, devices=4, partition="even", options={}, seed=0, test_share=0.2),
    run={},
)


def summary(folder: Path, *, tested: bool) -> RunView:
    """Devices trained with 500 FLOPs in round 1, two of them, and one with 600 in round 2; those of tests are apart. 11
    and 3.1 MB went down and up in round 1."""
    store = begin_run(folder)
    store.rounds.close(RUN, 2, SavedState({}, None, {}), {"dp_epsilon": 1.5, "generated_difference": 0.25})
    if tested:
        evaluated(store, 2, "a", 1, 2, flops=10**6)
        evaluated(store, 2, "b", 2, 2)
        store.rounds.close_evaluation(RUN, 2)
    made = read_run(store, RUN)
    store.close()
    return made


def test_a_cell_has_means_over_devices_and_rounds(tmp_path: Path) -> None:
    result = make_result(CELL, summary(tmp_path, tested=True), wall_s=3.0)
    first, second = result.rounds
    assert (result.accuracy.mean, result.accuracy.std_over_devices, result.accuracy.weighted) == (0.75, 0.25, 0.75)
    assert result.accuracy_by_device == {"a": 0.5, "b": 1.0}
    assert (result.flops, first.flops, second.flops) == (pytest.approx(1100 / 3), 250, 600)
    assert (first.bytes_down, first.bytes_up, second.bytes_up) == (5_500_000, 1_550_000, 0)
    assert result.bytes_down == pytest.approx(11_000_000 / 3)
    assert (result.epsilon, result.feature_epsilon, result.refusals, result.wall_s) == (1.5, None, 2, 3.0)
    assert result.generated_difference == 0.25


def test_a_round_has_the_time_of_its_slowest_device(tmp_path: Path) -> None:
    store = begin_run(tmp_path)
    store.rounds.close(RUN, 2, SavedState({}, None, {}), {})
    store.rounds.open(RUN, 3, ["a", "b"])
    for device, train_s in (("a", 5.0), ("b", 2.0)):
        trained(store, 3, device, train_s=train_s)
        evaluated(store, 3, device, 1, 2)
    store.rounds.close(RUN, 3, SavedState({}, None, {}), {})
    store.rounds.close_evaluation(RUN, 3)
    result = make_result(CELL, read_run(store, RUN), wall_s=3.0)
    store.close()
    assert [entry.longest_s for entry in result.rounds] == [None, None, 5.0]


def test_a_cell_without_test_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV2106")):
        make_result(CELL, summary(tmp_path, tested=False), wall_s=3.0)


def test_classes_of_a_data_set_need_no_order(tmp_path: Path) -> None:
    """A server that answers with the first class of the data set, which comes last by its name, is right in two of
    three images."""
    digits, parts = read_digits(32), tmp_path / "parts"
    rows = np.concatenate([np.flatnonzero(digits.labels == 0)[:40], np.flatnonzero(digits.labels == 1)[:20]])
    two = replace(digits, images=digits.images[rows], labels=digits.labels[rows], classes=("zebra", "ant"))
    deal(two, "iid", 2, parts, DealSettings(global_test=0.5))
    (cell, *_) = read_grid(written_experiment(tmp_path, write_file(["even"], ["fedavg"], seeds=1))).cells
    cell = msgspec.structs.replace(cell, run={**cell.run, "model_options": TINY_MODEL})
    tensors = {name: value.numpy() for name, value in build_vit(SMALL, 2, seed=0, options=TINY_MODEL).tensors().items()}
    tensors |= {"head.weight": 0 * tensors["head.weight"], "head.bias": np.array([1, 0], np.float32)}
    server = tmp_path / "model.safetensors"
    server.write_bytes(pack(tensors))
    assert generic_accuracy(cell, server, parts) == pytest.approx(2 / 3)


def test_a_full_disk_costs_no_round_of_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "runs" / "rounds"
    kept.parent.mkdir()
    kept.write_bytes(b"two rounds")
    (tmp_path / CELL_FILE).write_bytes(msgspec.json.encode(CELL))

    def fill_disk(*_: object, **__: object) -> None:
        raise DiskFull("FV0012", "no space left")

    monkeypatch.setattr("fleet.experiments.cell._train", fill_disk)
    with pytest.raises(DiskFull):
        run_cell(tmp_path, tmp_path / "parts", CellOptions(at_once=1))
    assert kept.read_bytes() == b"two rounds"
