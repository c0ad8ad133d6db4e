"""CellJob on a real Ray cluster of two nodes on loopback: the same files as without it, also when a node is gone."""

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import to_builtins

from fleet.devices import virtual_devices
from fleet.experiments.cell import CellFolder, CellResult, run_cell
from fleet.experiments.grid import read_grid
from fleet.experiments.scheduler import Dealer
from fleet.simulate import simulate
from tests.support.programs import CONFIG, Stage, open_to_others, program, toml, wait_for

HEAD, SECOND = "127.0.0.2", "127.0.0.3"
FILE = """
dataset = "digits"
image_size = 16
devices = 3
rounds = 60
evaluate_every = 60
test_share = 0.9
model = { options = { patch_size = 8, width = 16, depth = 2, heads = 2 } }
partitions = { even = { partition = "iid" } }
common = { batch_size = 8, epochs = 1, lr = 0.05 }

[methods.fedavg]
method = "fedavg"

[methods.fedper]
method = "fedper"

[ray]
num_cpus = 1
methods = { fedper = { memory = "50MB" } }
""".lstrip()
VALUES: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 8,
    "evaluate_every": 8,
    "seed": 5,
    "options": {"batch_size": 8, "epochs": 1, "lr": 0.05},
    "model_options": CONFIG["model_options"],
    "rejoin_grace_s": 60.0,
}


class Nodes:
    """A cluster of a head and one more node, of one CPU each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "node_ip_address": HEAD, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._second: Any = None
        self.address = str(self._cluster.address)

    def with_second(self) -> None:
        if self._second is None:
            self._second = self._cluster.add_node(num_cpus=1, node_ip_address=SECOND)

    def end_second(self) -> None:
        """All of its processes at once, as when a machine loses power."""
        node, self._second = self._second, None
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def cell_processes() -> list[psutil.Process]:
    """Cells that are at work on this cluster, which alone has this token."""
    found = []
    for process in psutil.process_iter():
        try:
            is_cell = "fleet.experiments.cell" in " ".join(process.cmdline())
            if is_cell and process.environ().get("RAY_AUTH_TOKEN") == os.environ["RAY_AUTH_TOKEN"]:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_TMPDIR", "/tmp")  # its sockets' paths are short
        nodes = Nodes()
        yield nodes
        nodes.close()


def fleet(stage: Stage, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """`fleet`, with the token of the cluster."""
    stage.environment.update({name: value for name, value in os.environ.items() if name.startswith("RAY_")})
    stage.environment.update(environment)
    return stage.start("fleet", [*program("fleet.cli"), *arguments])


def learned(result: CellResult) -> dict[str, Any]:
    """All that is not what a machine took, nor bytes, some of which travel again in a round that was interrupted."""
    other = ("wall_s", "peak_rss_bytes", "bytes_down", "bytes_up")
    found = {key: value for key, value in to_builtins(result).items() if key not in other}
    found["rounds"] = [{key: value for key, value in one.items() if key not in other} for one in found["rounds"]]
    return found


def test_cells_are_finished_when_a_node_is_gone(nodes: Nodes, stage: Stage, graph_cache: Path) -> None:
    """Two cells on two nodes, one of which is gone in the middle: files as without Ray, bit for bit."""
    nodes.with_second()
    file, out = stage.folder / "tiny.toml", stage.folder / "out"
    file.write_text(FILE)
    cells = read_grid(file).cells
    places = [CellFolder(cell, out) for cell in cells]
    running = fleet(stage, "experiment", str(file), "--out", str(out), "--ray", nodes.address)

    def under_way(place: CellFolder) -> bool:
        return (place.folder / "runs").is_dir() and place.progress().round > 0

    wait_for(lambda: running.poll() is not None or all(map(under_way, places)), "the record of both cells to come back")
    assert running.poll() is None, stage.log("fleet")
    assert all(place.progress().round < 60 for place in places)
    nodes.end_second()
    assert stage.finish(running, "fleet") == 0, stage.log("fleet")
    assert "(raylet)" not in stage.log("fleet")
    assert "is gone; it goes to another" in stage.log("fleet")

    results = json.loads((out / "results.json").read_text())
    assert [cell["failure"] for cell in results["cells"]] == [None, None]
    assert "ray" not in results["settings"]
    for place in places:
        calm = CellFolder(place.cell, stage.folder / "calm")
        Dealer().deal(calm)
        calm.begin()
        run_cell(calm.folder, calm.parts, at_once=2, graph_cache=graph_cache)
        expected, found = calm.result(), place.result()
        assert expected is not None
        assert found is not None
        assert learned(found) == learned(expected)
        model = "runs/run/model.safetensors"
        assert (place.folder / model).read_bytes() == (calm.folder / model).read_bytes()
        names = [
            {path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file()}
            for one in (calm.folder, place.folder)
        ]
        assert names[0] <= names[1]  # and the log, which a process of its own has
        assert names[1] - names[0] <= {"cell.log"}


def test_a_cell_that_is_killed_leaves_the_others(nodes: Nodes, stage: Stage) -> None:
    """As the system kills what takes too much memory: one line, and the other cell is finished."""
    file, out = stage.folder / "tiny.toml", stage.folder / "out"
    file.write_text(FILE.replace("60", "2"))
    running = fleet(stage, "experiment", str(file), "--out", str(out), "--ray", nodes.address)
    wait_for(cell_processes, "a cell")[0].kill()
    assert stage.finish(running, "fleet") == 1
    said = stage.log("fleet").strip().splitlines()[-1]
    assert said.startswith("fleet: 1 of 2 cells failed, the first: ")
    assert said.endswith(
        "its process was killed, as the system does when memory runs out; run fewer cells at the same time"
    )
    assert len(list(out.glob("cells/*/*/*/result.json"))) == 1


def test_a_run_ends_when_a_node_is_gone(nodes: Nodes, stage: Stage, graph_cache: Path) -> None:
    """Six devices on two nodes: the host whose node is gone comes back on the other one, and every round is whole."""
    nodes.with_second()
    config = stage.folder / "run.toml"
    config.write_text(toml(VALUES))
    running = fleet(
        stage, "run", "--virtual", "6", "--parts", str(stage.parts), "--out", str(stage.out), "--name", "run",
        "--broker", "mosquitto", "--port", str(stage.port), "--config", str(config), "--ray", nodes.address, "--json",
    )  # fmt: skip
    some = "select 1 from results where round = 2"
    wait_for(lambda: running.poll() is not None or stage.query(some), "results of round 2")
    assert running.poll() is None, stage.log("fleet")
    nodes.end_second()
    assert stage.finish(running, "fleet") == 0, stage.log("fleet")
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [6] * 8
    assert sorted(path.name for path in (stage.out / "run" / "state").iterdir()) == ["host-0", "host-1"]
    assert open_to_others(stage.out) == []
    calm = simulate(
        virtual_devices(stage.parts, 6), VALUES, out=stage.folder / "calm", run="calm", graph_cache=graph_cache
    )
    assert stage.model() == (calm.folder / "model.safetensors").read_bytes()


class TestRefused:
    """Each in one line that says what to do."""

    def refused(self, stage: Stage, *arguments: str, **environment: str) -> str:
        running = fleet(stage, *arguments, **environment)
        assert stage.finish(running, "fleet") not in (0, 1)
        lines = [line for line in stage.log("fleet").splitlines() if line.startswith("fleet: ")]
        assert len(lines) == 1, stage.log("fleet")
        assert "Traceback" not in stage.log("fleet")
        return lines[0]

    def experiment(self, stage: Stage, text: str, address: str, **environment: str) -> str:
        file = stage.folder / "tiny.toml"
        file.write_text(text)
        return self.refused(
            stage, "experiment", str(file), "--out", str(stage.folder / "out"), "--ray", address, **environment
        )

    def test_resources_that_no_node_has(self, nodes: Nodes, stage: Stage) -> None:
        said = self.experiment(stage, FILE.replace("num_cpus = 1", "num_cpus = 1\nnum_gpus = 0.5"), nodes.address)
        assert (
            "[ray], for fedavg/even/seed-0: no node of the cluster has 1 CPU, 0.5 GPUs; nodes are 127.0.0.2: 1 CPU"
            in said
        )

    def test_more_hosts_than_nodes_take(self, nodes: Nodes, stage: Stage) -> None:
        said = self.refused(
            stage, "run", "--virtual", "6", "--parts", str(stage.parts), "--out", str(stage.out), "--hosts", "9",
            "--ray", nodes.address,
        )  # fmt: skip
        assert "--hosts 9 of 1 CPU each, but the cluster has room for" in said

    def test_another_token(self, nodes: Nodes, stage: Stage) -> None:
        said = self.experiment(stage, FILE, nodes.address, RAY_AUTH_TOKEN="0" * 64)
        assert "see that all have the same token" in said

    def test_another_version(self, nodes: Nodes, stage: Stage) -> None:
        site = stage.folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.52.0'\n")
        said = self.experiment(stage, FILE, nodes.address, PYTHONPATH=str(site))
        assert "this is Ray 2.52.0 under Python" in said
        assert "install the same on all machines" in said

    def test_address_without_an_answer(self, stage: Stage) -> None:
        with socket.socket() as probe:
            probe.bind((HEAD, 0))
            address = f"{HEAD}:{probe.getsockname()[1]}"
            assert f"--ray {address}: no answer from {address}" in self.experiment(stage, FILE, address)

    def test_no_address(self, stage: Stage) -> None:
        assert "--ray 'ray://head': expected HOST:PORT" in self.experiment(stage, FILE, "ray://head")

    def test_no_ray(self, stage: Stage) -> None:
        site = stage.folder / "site" / "ray"
        site.mkdir(parents=True)
        (site / "__init__.py").write_text("raise ImportError('not installed')\n")
        said = self.experiment(stage, FILE, "local", PYTHONPATH=str(site.parent))
        assert said == "fleet: --ray needs the package ray: pip install 'fedvit[ray]'"
