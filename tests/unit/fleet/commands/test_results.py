"""`fleet results` from the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedvit.errors import ConfigError, StorageFailed
from fleet.commands.results import results_command
from fleet.experiments.command import write_results
from fleet.experiments.outcome import make_outcome
from tests.support.codes import has_code
from tests.support.experiments import make_measured_outcome, read_grid, write_file, written_experiment

FILE = write_file(["even"], ["fedavg", "fedper"])
CURVES = {
    "fedavg/even/seed-0": [0.5], "fedavg/even/seed-1": [0.7], "fedper/even/seed-0": [0.8], "fedper/even/seed-1": [0.95],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    write_results(make_measured_outcome(read_grid(written_experiment(folder, FILE)), CURVES), folder)
    return folder


def call(*words: str | Path) -> str:
    done = CliRunner().invoke(results_command, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_kept_results(folder: Path, tmp_path: Path) -> None:
    assert f"written: {tmp_path / 'kept' / 'tiny.json'}" in call(folder, "--keep", tmp_path / "kept").replace("\n", "")


def test_without_flags_it_shows_the_report(folder: Path) -> None:
    shown = call(folder)
    assert "tiny: accuracy" in shown
    assert "0.600 ± 0.141" in shown
    assert "critical difference 1.386" in shown  # 1.960 sqrt(2 x 3 / (6 x 2))
    assert "Wilcoxon" not in shown


def test_files_are_written_and_named(folder: Path, tmp_path: Path) -> None:
    shown = call(
        folder, "--csv", "--latex", "--out", tmp_path / "tables", "--figures", tmp_path / "figures", "--format", "svg",
        "--holm",
    )  # fmt: skip
    written = sorted(file for place in ("tables", "figures") for file in (tmp_path / place).iterdir())
    assert len(written) == 12
    assert all(str(file) in shown.replace("\n", "") for file in written)
    assert "p (Holm)" in shown
    assert r"\toprule" in (tmp_path / "tables" / "tests.tex").read_text()


def test_unfinished_cells_are_named(tmp_path: Path) -> None:
    grid = read_grid(written_experiment(tmp_path, FILE))
    some = {name: means for name, means in CURVES.items() if name != "fedper/even/seed-1"}
    write_results(make_measured_outcome(grid, some), tmp_path)
    shown = call(tmp_path, "--csv", "--out", tmp_path / "tables")
    assert "1 of 4 cells are not finished; not run or interrupted: fedper/even/seed-1" in shown
    document = json.loads(call(tmp_path, "--json", "--wilcoxon"))
    assert document["unfinished"] == ["fedper/even/seed-1"]
    assert document["ranks"] is None
    assert document["tests"] == [
        {"method": "fedper", "pairs": 1, "better": 1, "worse": 0, "median": pytest.approx(0.3), "p": None,
         "p_holm": None}
    ]  # fmt: skip


def test_nothing_finished_is_an_error(tmp_path: Path) -> None:
    write_results(make_outcome(read_grid(written_experiment(tmp_path, FILE)), []), tmp_path)
    with pytest.raises(ConfigError) as refused:
        call(tmp_path, "--csv")
    assert has_code("FV2125", "4 of 4 cells")(refused.value)


def test_font_and_folder_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        call(folder, "--figures", tmp_path / "figures", "--font", "No Such Font")
    assert has_code("FV2126", "No Such Font")(refused.value)
    assert not (tmp_path / "figures").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed) as full:
        call(folder, "--csv", "--out", tmp_path / "file")
    assert has_code("FV1701", str(tmp_path / "file"))(full.value)
