"""Commands for runs whose files are in a mirror: real runs, real stores."""

import json
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cli
from coordinator.record.mirror import open_store
from coordinator.record.record import open_record
from fedvit.errors import StorageFailed
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.programs import CONFIG
from tests.support.stores import AnyServer, set_keys, store_server

RUN = "mirrored"
DEVICES = ("device-0", "device-1")
STRAY = f"blobs/{'0' * 64}"


class World:
    """A finished run of FedTP in a folder of runs, and the store with its mirror."""

    def __init__(self, runs: Path, server: AnyServer) -> None:
        self.runs = runs
        self.server = server

    def run(self, *arguments: object) -> Result:
        return CliRunner().invoke(cli, [*map(str, arguments), "--runs", str(self.runs)])

    def export(self, out: Path) -> Result:
        return self.run("export", RUN, "--device", DEVICES[0], "--out", out, "--threads", 1)

    def list_runs(self) -> list[str]:
        return [entry["run"] for entry in json.loads(self.run("runs", "--json").output)]

    def put(self, name: str, content: bytes, run: str = RUN) -> None:
        """Put an object, as another coordinator would."""
        obstore.put(open_store(self.server.config(mirror=True), run), name, content)


BOTH_STORES = pytest.mark.parametrize("world", [pytest.param("s3", marks=pytest.mark.slow), "folder"], indirect=True)


@pytest.fixture
def world(
    request: pytest.FixtureRequest, tmp_path: Path, parts: Path, graph_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    set_keys(monkeypatch)
    with store_server(getattr(request, "param", "folder"), tmp_path / "store") as server:
        mirror = msgspec.structs.asdict(server.config(mirror=True))
        options = {"batch_size": 8, "epochs": 1, "lr": 0.01}
        values = {**CONFIG, "method": "fedtp", "rounds": 1, "options": options, "variants": {}, "blobs": mirror}
        folders = [parts / name for name in DEVICES]
        simulate(RunRequest(folders, values, out=tmp_path / "runs", run=RUN, graph_cache=graph_cache))
        yield World(tmp_path / "runs", server)


def files_of(bundle: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(bundle.glob("*.onnx"))}


def failure(ended: Result, *named: object) -> None:
    assert isinstance(ended.exception, StorageFailed), (ended.output, ended.exception)
    for text in named:
        assert str(text) in str(ended.exception)


@BOTH_STORES
def test_export_reads_from_the_mirror_what_this_machine_has_not(world: World, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert world.export(here).exit_code == 0
    shutil.rmtree(world.runs / RUN)
    ended = world.export(there)
    assert ended.exit_code == 0, ended.exception
    assert files_of(there) == files_of(here) != {}
    assert not (world.runs / RUN).exists(), "a command that reads writes nothing"


def test_export_names_what_is_damaged_in_both_places(world: World, tmp_path: Path) -> None:
    with open_record(world.runs, check=False, reads_only=True) as store:
        program = store.runs.read(RUN).program
    assert program is not None
    name = f"blobs/{program.partition(':')[2]}"
    shutil.rmtree(world.runs / RUN)
    world.put(name, b"something else")
    failure(world.export(tmp_path / "bundle"), f"{RUN}/{name} is damaged")


@BOTH_STORES
def test_export_names_a_store_that_cannot_be_used(world: World, tmp_path: Path) -> None:
    shutil.rmtree(world.runs / RUN / "blobs")
    world.server.kill()
    failure(world.export(tmp_path / "bundle"), "is missing", "in the run's mirror", "cannot be used")


@BOTH_STORES
def test_rm_removes_the_mirror_too(world: World) -> None:
    world.put("results/model.safetensors", b"of another run", "other-run")
    removed = json.loads(world.run("rm", RUN, "--json").output)
    assert {entry["what"] for entry in removed} == {"run", "mirror"}
    assert all(entry["bytes"] > 10_000 for entry in removed)
    assert world.server.objects() == [f"{world.server.prefix}/other-run/results/model.safetensors"]
    assert not (world.runs / RUN).exists()
    assert world.list_runs() == []


def test_rm_removes_nothing_while_the_store_cannot_be_used(world: World) -> None:
    world.server.kill()
    failure(world.run("rm", RUN), "cannot be used")
    assert world.list_runs() == [RUN]
    assert (world.runs / RUN / "model.safetensors").is_file() or (world.runs / RUN / "blobs").is_dir()
    assert world.run("rm", RUN, "--keep-mirrors").exit_code == 0
    assert world.list_runs() == []


def test_gc_removes_what_a_coordinator_that_was_cut_off_has_left(world: World, tmp_path: Path) -> None:
    world.run("gc")  # the first one may remove blobs of this disk
    before = world.server.objects()
    world.put(STRAY, bytes(5000))
    would = json.loads(world.run("gc", "--dry-run", "--json").output)
    assert [(entry["what"], entry["bytes"]) for entry in would] == [("mirror", 5000)]
    assert world.run("gc").exit_code == 0
    assert world.server.objects() == before
    shutil.rmtree(world.runs / RUN)
    assert world.export(tmp_path / "bundle").exit_code == 0, "what is needed is still there"


def test_gc_keeps_a_run_whose_mirror_cannot_be_used(world: World) -> None:
    world.server.kill()
    ended = world.run("gc", "--keep-runs", 0)
    assert ended.exit_code == 0, ended.exception
    assert f"run {RUN!r} is kept as it is: object store" in ended.output
    assert world.list_runs() == [RUN]
    assert world.run("gc", "--keep-runs", 0, "--keep-mirrors").exit_code == 0
    assert world.list_runs() == []


def test_run_whose_mirror_a_newer_version_described_is_kept(world: World) -> None:
    """Its table [blobs] has a key that this version does not know."""
    with closing(sqlite3.connect(world.runs / "fedvit.db")) as database:
        [[text]] = database.execute("SELECT config FROM runs").fetchall()
        config: dict[str, Any] = json.loads(text)
        config["blobs"]["future"] = 1
        database.execute("UPDATE runs SET config = ?, seal = NULL", [json.dumps(config)])
        database.commit()
    objects = world.server.objects()
    failure(world.run("rm", RUN), f"[blobs] of run {RUN!r} cannot be read", "future")
    assert world.list_runs() == [RUN]
    assert world.run("rm", RUN, "--keep-mirrors").exit_code == 0
    assert world.server.objects() == objects


def test_run_with_a_mirror_is_kept_where_the_package_is_missing(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But what its folder has is exported without it."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "coordinator.record.mirror")
    failure(world.run("rm", RUN), "needs the package 'obstore'", "fedvit[s3]")
    assert world.list_runs() == [RUN]
    assert world.export(tmp_path / "bundle").exit_code == 0
