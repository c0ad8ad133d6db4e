"""What travels to the nodes of a cluster and back, and what a cell may ask of a node. No Ray is needed."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedvit.errors import ConfigError, StorageFailed
from fleet.clusters.cluster import Cluster
from fleet.clusters.programs import ProgramJob, pack, pause, run_program, unpack
from fleet.clusters.resources import NodeRequest, RayTable, Resources
from fleet.processes import Fleet
from tests.support.codes import has_code
from tests.support.experiments import read_grid
from tests.unit.fleet.experiments.test_experiment import FILE, written


class TestFiles:
    def test_a_folder_becomes_another_one(self, tmp_path: Path) -> None:
        here, there = tmp_path / "here", tmp_path / "there"
        unpack({"a": b"1", "b/c": b"2"}, here)
        (here / "link").symlink_to(tmp_path)
        unpack({"old": b""}, there)
        unpack(pack(here), there)
        assert pack(there) == {"a": b"1", "b/c": b"2"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]

    def test_a_file_outside_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StorageFailed, check=has_code("FV2120")):
            unpack({"../x": b""}, tmp_path / "folder")
        assert not (tmp_path / "x").exists()


def test_stopped(tmp_path: Path) -> None:
    """A process that writes without end writes nothing while it is paused."""
    with Fleet() as fleet:
        file = tmp_path / "log"
        process = fleet.start("writer", [sys.executable, "-uc", "while True: print(1)"], file)
        while not file.read_bytes():
            time.sleep(0.01)
        with pause(process.pid):
            assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            size = file.stat().st_size
            time.sleep(0.05)
            assert file.stat().st_size == size
        while file.stat().st_size == size:
            time.sleep(0.01)


def test_another_software_is_refused(tmp_path: Path) -> None:
    job = ProgramJob("cell", "no_such_module", (), None, "0.0.0")
    (report,) = run_program(job, {}, {}, "10.0.0.7")
    assert report.code == 1
    assert report.log.decode().startswith(f"fedvit {version('fedvit')} is installed on node 10.0.0.7, and 0.0.0 where")


def test_program_that_fails_reports_why(tmp_path: Path) -> None:
    job = ProgramJob("cell", "no_such_module", (), None, version("fedvit"))
    *_, last = run_program(job, {}, {"file": b"kept"}, "here")
    assert last.code == 1
    assert last.files == {"file": b"kept"}
    assert b"No module named 'no_such_module'" in last.log


class TestResources:
    def test_tables_win_over_more_general_ones(self) -> None:
        table = RayTable(
            num_cpus=2, memory="1GB",
            methods={"a": NodeRequest(num_gpus=0.5, memory=5)},
            partitions={"p": NodeRequest(num_cpus=0.5, memory="2GB")},
        )  # fmt: skip
        assert table.resources("b", "q") == Resources(2, 0, 10**9)
        assert table.resources("a", "q") == Resources(2, 0.5, 5)
        assert table.resources("a", "p") == Resources(0.5, 0.5, 2 * 10**9)
        assert RayTable().resources("a", "p") == Resources(1, 0, 0)

    def test_they_are_no_part_of_a_cell(self, tmp_path: Path) -> None:
        grid = read_grid(written(tmp_path, FILE + "\n[ray]\nnum_cpus = 3\n"))
        assert grid.experiment.ray.num_cpus == 3
        assert grid.cells == read_grid(written(tmp_path)).cells

    @pytest.mark.parametrize(
        ("table", "code"),
        [
            ("num_cpu = 1", "FV1002"),
            ("num_cpus = 0", "FV2107"),
            ("num_gpus = 1.5", "FV2119"),
            ("memory = 'much'", "FV2119"),
            ("methods = { fedagv = {} }", "FV2119"),
            ("partitions = { odd = {} }", "FV2119"),
        ],
    )
    def test_refused(self, tmp_path: Path, table: str, code: str) -> None:
        with pytest.raises(ConfigError, check=has_code(code)):
            read_grid(written(tmp_path, FILE + f"\n[ray]\n{table}\n"))


class TwoCores:
    """Ray's answers for a cluster of one node."""

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        return lambda function: function

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 2.0}}]


def test_a_cluster_has_room_for_no_program_where_none_waits() -> None:
    """All cells of an experiment may be finished."""
    cluster = Cluster(TwoCores())
    assert cluster.at_once([Resources(1, 0, 0), Resources(2, 0, 0)]) == 2
    assert cluster.at_once([]) == 0


def test_a_stopped_program_ends_with_its_parent(tmp_path: Path) -> None:
    """A paused process ends on SIGKILL alone."""
    source = """
import sys, signal
from fleet.processes import Fleet
from fleet.clusters.programs import KILLED_WITH_PARENT, pause
fleet = Fleet(ends_with_parent=KILLED_WITH_PARENT)
child = fleet.start("child", [sys.executable, "-c", "import time; time.sleep(600)"])
with pause(child.pid):
    print(child.pid, flush=True)
    signal.raise_signal(signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    child = int(parent.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(child)
        while found.is_running() and found.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
