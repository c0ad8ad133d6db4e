"""CellJob on a real Ray cluster of two nodes on loopback: the same files as without it, also when a node is gone."""

import json
import os
import re
import secrets
import shutil
import socket
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from msgspec import to_builtins

from coordinator.record.copies import COPIES
from fedvit.errors import ConfigError, LinkDown
from fleet.cli import cli
from fleet.clusters.cluster import connect
from fleet.devices import virtual_devices
from fleet.experiments.cell import run_cell
from fleet.experiments.cells import CellOptions
from fleet.experiments.folder import CellFolder
from fleet.experiments.scheduler import Dealer
from fleet.request import RunRequest
from fleet.simulate import simulate
from profiles.report.curves import RoundFigures
from tests.support.codes import has_code
from tests.support.experiments import read_grid
from tests.support.forked import Forked
from tests.support.programs import CONFIG, Stage, open_to_others, toml, wait_for

HEAD, SECOND = "127.0.0.2", "127.0.0.3"
LITTLE, MUCH = 100_000_000, 1_000_000_000
"""Bytes of memory of the head and of the second node, for Ray's accounts."""
FILE = """
dataset = "digits"
image_size = 16
devices = 3
rounds = 30
evaluate_every = 30
seeds = [0]
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
memory = "50MB"
methods = { fedavg = { memory = "500MB" } }
""".lstrip()
PASSWORD = "known-to-devices-alone"
VALUES: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 3,
    "evaluate_every": 3,
    "seed": 5,
    "options": {"batch_size": 8, "epochs": 1, "lr": 0.05},
    "model_options": CONFIG["model_options"],
    "rejoin_grace_s": 120.0,
}


class Nodes:
    """A cluster of a head and one more node, of one CPU each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "memory": LITTLE, "node_ip_address": HEAD, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._second: Any = None
        self.address = str(self._cluster.address)

    def with_second(self) -> None:
        if self._second is None:
            self._second = self._cluster.add_node(num_cpus=1, memory=MUCH, node_ip_address=SECOND)

    def end_second(self) -> None:
        """All that runs on it is killed at once, as when a machine loses power."""
        node, self._second = self._second, None
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        processes = [raylet, *raylet.children(recursive=True)]
        folders = {folder for process in processes if (folder := folder_of(process))}
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        for folder in folders:
            shutil.rmtree(folder)

    def close(self) -> None:
        self._cluster.shutdown()


def folder_of(process: psutil.Process) -> Path | None:
    """Where a program of ours works on a node; None for other processes."""
    try:
        folder = Path(process.cwd())
    except psutil.Error:
        return None
    return folder if folder.name.startswith("fedvit-ray-") else None


def cell_process(method: str) -> psutil.Process | None:
    """The process of the cell of this method on this cluster, which alone has this token."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            folder = folder_of(process)
            if folder is None or process.environ().get("RAY_AUTH_TOKEN") != os.environ["RAY_AUTH_TOKEN"]:
                continue
            if json.loads((folder / "work" / "cell.json").read_text())["method"] == method:
                return process
    return None


def read_closed_rounds(place: CellFolder) -> dict[int, str]:
    """When each round of a cell was closed, as far as its record has come back."""
    file = place.folder / "runs" / "fedvit.db"
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as record:
            return dict(record.execute("select round, closed_at from rounds where closed_at is not null").fetchall())
    except sqlite3.Error:
        return {}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_TMPDIR", "/tmp")  # its sockets' paths are short
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_health_check_period_ms", "500")  # a node that is gone is soon known to be so
        patch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")
        patch.setenv("RAY_worker_register_timeout_seconds", "480")  # a busy machine needs it
        patch.setenv("RAY_worker_niceness", "0")  # by default 15: other programs took nearly all of the time
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # it counts the memory of all programs of the machine
        nodes = Nodes()
        yield nodes
        nodes.close()


def fleet(stage: Stage, *arguments: str, module: str = "fleet.cli", **environment: str) -> Forked:
    """`fleet`, with the token of the cluster."""
    stage.environment.update({name: value for name, value in os.environ.items() if name.startswith("RAY_")})
    stage.environment.update(environment)
    return stage.keep(Forked(module, list(arguments), stage.log_path("fleet"), stage.environment))


def select_learned(figures: RoundFigures) -> dict[str, Any]:
    beside = ("bytes_down", "bytes_up", "took_s", "longest_s")
    return {key: value for key, value in to_builtins(figures).items() if key not in beside}


@pytest.mark.slow
def test_a_cell_resumes_when_its_node_is_gone_and_another_is_killed(
    nodes: Nodes, stage: Stage, graph_cache: Path
) -> None:
    """FedPer's process is killed, as the system does when memory runs out: one line. FedAvg's node, the only one that
    has memory enough, loses power: another one finishes the rounds that are left, with the files of a calm cell."""
    nodes.with_second()
    file, out = stage.folder / "tiny.toml", stage.folder / "out"
    file.write_text(FILE)
    places = {cell.method: CellFolder(cell, out) for cell in read_grid(file).cells}
    place = places["fedavg"]
    # what Ray says of nodes goes to standard output unless something is done about it
    given = ("experiment", str(file), "--out", str(out), "--ray", nodes.address)
    running = fleet(stage, *given, RAY_DEDUP_LOGS="0")
    wait_for(lambda: cell_process("fedper"), "the cell of FedPer").kill()
    wait_for(lambda: running.poll() is not None or read_closed_rounds(place), "closed rounds of FedAvg to come back")
    before = read_closed_rounds(place)
    nodes.end_second()
    lost = "restarting on another node"
    wait_for(lambda: running.poll() is not None or lost in stage.log("fleet"), "the loss to be seen")
    assert running.poll() is None, stage.log("fleet")
    assert f"{SECOND} is lost; restarting on another node" in stage.log("fleet")
    nodes.with_second()
    assert stage.finish(running, "fleet") == 1
    assert "(raylet)" not in stage.log("fleet")

    killed = "its process was killed, as the system does when memory runs out; run fewer cells at the same time"
    last = stage.log("fleet").strip().splitlines()[-1]
    assert last == f"fleet: 1 of 2 cells failed, the first: {places['fedper'].cell.path}: {killed} [FV2104]"
    results = json.loads((out / "results.json").read_text())
    assert {cell["method"]: cell["failure"] for cell in results["cells"]} == {"fedavg": None, "fedper": killed}
    assert "ray" not in results["settings"]

    assert 0 < len(before) < 30
    calm = CellFolder(place.cell, stage.folder / "calm")
    Dealer().deal(calm)
    calm.begin()
    run_cell(calm.folder, calm.parts, CellOptions(at_once=2), graph_cache)
    expected, found = calm.result(), place.result()
    assert expected is not None
    assert found is not None
    assert found.accuracy_by_device == expected.accuracy_by_device
    assert list(map(select_learned, found.rounds)) == list(map(select_learned, expected.rounds))
    # a result counts what was sent since the last one: the loss of a node shows in that round's and the next one's;
    # elsewhere only messages of progress differ
    pairs = enumerate(zip(found.rounds, expected.rounds, strict=True))
    other_bytes = [at for at, (one, calm) in pairs if one.bytes_up != pytest.approx(calm.bytes_up, abs=3000)]
    assert not other_bytes or other_bytes[-1] <= other_bytes[0] + 1, other_bytes
    model = "runs/run/model.safetensors"
    assert (place.folder / model).read_bytes() == (calm.folder / model).read_bytes()
    # the record's copies are kept at times, not at rounds
    names = [
        {path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file() and COPIES not in path.parts}
        for one in (calm.folder, place.folder)
    ]
    assert names[0] <= names[1]  # and the log, which a process of its own has
    assert names[1] - names[0] <= {"cell.log"}
    assert read_closed_rounds(place).items() > before.items()  # it did not begin anew


@pytest.mark.slow
def test_a_run_ends_when_a_node_is_gone(nodes: Nodes, stage: Stage, graph_cache: Path) -> None:
    """Six devices on two nodes, over a broker with a password: the host whose node is gone comes back on the other one,
    every round is whole, and the tensors are those of a calm run."""
    nodes.with_second()
    config = stage.folder / "run.toml"
    config.write_text(toml({**VALUES, "broker": {"password": PASSWORD}}))
    running = fleet(
        stage, "run", "--virtual", "6", "--parts", str(stage.parts), "--runs", str(stage.out), "--run", "run",
        "--broker", "mosquitto", "--broker.port", str(stage.port), "--config", str(config), "--ray", nodes.address,
        "--json",
    )  # fmt: skip
    some = "select 1 from results where round = 2"
    wait_for(lambda: running.poll() is not None or stage.query(some), "results of round 2")
    assert running.poll() is None, stage.log("fleet")
    assert [process.pid for process in psutil.process_iter() if PASSWORD in " ".join(words(process))] == []
    nodes.end_second()
    assert stage.finish(running, "fleet") == 0, stage.log("fleet")
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [6] * 3
    run = stage.out / "run"
    # three devices of a host; ray may have put both hosts on the node that ends
    assert (run / "coordinator.log").read_text().count("device joined") in (6 + 3, 6 + 6)
    assert sorted(path.name for path in (run / "state").iterdir()) == ["host-0", "host-1"]
    said = [log.read_text() for log in sorted((run / "devices").iterdir())]
    assert [text.count("run ended") for text in said] == [3, 3]  # each device heard of it
    assert open_to_others(stage.out) == []
    calm = simulate(
        RunRequest(
            virtual_devices(stage.parts, 6), VALUES, out=stage.folder / "calm", run="calm", graph_cache=graph_cache
        )
    )
    assert stage.model() == (calm.folder / "model.safetensors").read_bytes()


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
class TestRefused:
    """Each in one line that says what to do."""

    def run_refused(self, stage: Stage, *arguments: str, module: str = "fleet.cli", **environment: str) -> str:
        running = fleet(stage, *arguments, module=module, **environment)
        assert stage.finish(running, "fleet") not in (0, 1)
        lines = [line for line in stage.log("fleet").splitlines() if line.startswith("fleet: ")]
        assert len(lines) == 1, stage.log("fleet")
        assert "Traceback" not in stage.log("fleet")
        return lines[0]

    def experiment(self, stage: Stage, address: str, *, text: str = FILE, **given: str) -> str:
        file = stage.folder / "tiny.toml"
        file.write_text(text)
        out = stage.folder / "out"
        return self.run_refused(stage, "experiment", str(file), "--out", str(out), "--ray", address, **given)

    def test_resources_that_no_node_of_a_local_cluster_has(
        self, nodes: Nodes, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        stage.environment.pop("RAY_AUTH_TOKEN", None)
        said = self.experiment(stage, "local", text=FILE.replace("num_cpus = 1", "num_cpus = 1\nnum_gpus = 0.5"))
        wanted = "[ray], for fedavg/even/seed-0: no node of the cluster has 1 CPU, 0.5 GPUs, 500 MB; nodes are "
        assert re.search(re.escape(wanted) + r"[\d.]+: \d+ CPU", said), said

    def test_more_hosts_than_nodes_take(self, nodes: Nodes, stage: Stage) -> None:
        said = self.run_refused(
            stage, "run", "--virtual", "6", "--parts", str(stage.parts), "--runs", str(stage.out), "--hosts", "9",
            "--ray", nodes.address,
        )  # fmt: skip
        assert "--hosts 9 of 1 CPU each, but the cluster has room for" in said

    def test_another_token(self, nodes: Nodes, stage: Stage) -> None:
        said = self.experiment(stage, nodes.address, RAY_AUTH_TOKEN="0" * 64)
        assert "see that all have the same token" in said

    def test_another_version(self, nodes: Nodes, stage: Stage) -> None:
        said = self.experiment(stage, nodes.address, module="tests.support.other_ray")
        assert "this is Ray 2.52.0 under Python" in said
        assert "install the same on all machines" in said

    @pytest.mark.usefixtures("nodes")
    def test_an_address_that_nobody_answers(self) -> None:
        with socket.socket() as probe:
            probe.bind((HEAD, 0))
            address = f"{HEAD}:{probe.getsockname()[1]}"
            with pytest.raises(LinkDown, check=has_code("FV2115", address)), connect(address):
                pass

    @pytest.mark.usefixtures("nodes")
    def test_no_address(self) -> None:
        with pytest.raises(ConfigError, check=has_code("FV2115", "ray://head")), connect("ray://head"):
            pass

    @pytest.mark.usefixtures("nodes")
    def test_no_ray(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
        file = tmp_path / "tiny.toml"
        file.write_text(FILE)
        done = CliRunner().invoke(cli, ["experiment", str(file), "--out", str(tmp_path / "out"), "--ray", "local"])
        assert str(done.exception) == "--ray needs the package ray: pip install 'fedvit[ray]'"
        assert isinstance(done.exception, ConfigError)
