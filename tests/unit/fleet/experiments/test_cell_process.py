"""Cells that are forked from a process which has imported everything, by real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.experiments.cell_process import CellProcess
from fleet.experiments.cells import CellOptions
from fleet.experiments.folder import LOG_FILE, CellFolder
from fleet.experiments.scheduler import Dealer
from fleet.processes import program
from tests.support.experiments import read_grid, written_experiment
from tests.support.waiting import wait_until

FILE = """
dataset = "digits"
image_size = 32
devices = 2
rounds = 1
seeds = [0]
test_share = 0.9
[model]
options = {patch_size = 8, width = 32, depth = 1, heads = 2, mlp_ratio = 2.0}
[partitions.even]
partition = "iid"
[methods.fedavg]
method = "fedavg"
batch_size = 8
epochs = 1
lr = 0.05
"""
MEASURED = ("wall_s", "took_s", "longest_s", "peak_rss_bytes", "bytes_up", "bytes_down")
"""Figures that differ from run to run: messages hold times."""
SCHEDULER = """
import sys, time
from pathlib import Path
from tests.unit.fleet.experiments.test_cell_process import start
job = start(Path(sys.argv[1]), "rounds = 1", "rounds = 9999")
print(job._process.pid, flush=True)
time.sleep(600)
"""


def make_folder(out: Path, old: str = "", new: str = "") -> CellFolder:
    """Deal the images of the file's only cell out, and prepare its folder."""
    [cell] = read_grid(written_experiment(out, FILE.replace(old, new))).cells
    folder = CellFolder(cell, out)
    Dealer().deal(folder)
    folder.begin()
    return folder


def start(out: Path, old: str = "", new: str = "") -> CellProcess:
    """Start the file's only cell."""
    return CellProcess(make_folder(out, old, new), options=CellOptions(at_once=1))


def read_figures(folder: CellFolder) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.to_builtins(folder.result())
    for figures in (result, *result["rounds"]):
        for name in MEASURED:
            figures.pop(name, None)
    return result


@pytest.mark.slow
def test_result_is_that_of_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both agree to the last bit; a module in the current folder is not imported."""
    forked, fresh = make_folder(tmp_path / "forked"), make_folder(tmp_path / "fresh")
    (tmp_path / "export.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    job = CellProcess(forked, options=CellOptions(at_once=1))
    arguments = [str(fresh.folder), str(fresh.parts), msgspec.json.encode(CellOptions(at_once=1)).decode()]
    subprocess.run([*program("fleet.experiments.cell"), *arguments], check=True)
    wait_until(lambda: job.code() is not None, "the cell's end")
    job.stop()
    assert job.code() == 0, (forked.folder / LOG_FILE).read_text()
    assert read_figures(forked) == read_figures(fresh)


@pytest.mark.slow
def test_failure_is_the_last_line_of_its_log(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder.parts / "device-0").rename(folder.parts / "first")
    (folder.parts / "device-1").rename(folder.parts / "second")
    job = CellProcess(folder, options=CellOptions(at_once=1))
    wait_until(lambda: job.code() is not None, "the cell's end")
    assert job.code() == 1
    assert "make them with `fleet partition" in folder.failure(1)
    job.stop()


@pytest.mark.slow
def test_cell_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """By kill -9, and by `stop`."""
    command = [sys.executable, "-c", SCHEDULER, str(tmp_path / "killed")]
    scheduler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert scheduler.stdout is not None
    cell = int(scheduler.stdout.readline())
    os.kill(cell, 0)
    scheduler.send_signal(signal.SIGKILL)
    scheduler.wait()
    scheduler.stdout.close()
    wait_until(lambda: not Path(f"/proc/{cell}/cmdline").is_file(), "the cell's end")
    job = start(tmp_path / "stopped", "rounds = 1", "rounds = 9999")
    assert job.code() is None
    job.stop()
    assert job.code() == -signal.SIGTERM
