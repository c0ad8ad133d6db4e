"""Graphs in a confined process: the same results as in this one, and an end to those that do not end."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from onnx import TensorProto, helper

from edge_client.sandbox.launcher import Launcher
from edge_client.sandbox.sandbox import Sandbox
from edge_client.work.runtime import Challenge, ModelSource, ModelTest, OutOfMemory, Seeds, Stopped, Watch
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload, DataError, DeviceTrouble
from fedvit.program import Program
from fedvit.tensors import map_tensors, pack
from tests.support.agents import SILENT, assert_same_bits
from tests.support.codes import has_code
from tests.support.settings import Setting
from tests.support.waiting import wait_until

SEEDS = Seeds(run=1, round=1, device="pi")


@pytest.fixture
def sandbox(launcher: Launcher, made: Path, tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(launcher, threads=1, readable=(made, tmp_path))
    yield sandbox
    sandbox.release()


def open_graphs(sandbox: Sandbox, setting: Setting) -> None:
    for graph in setting.program.graphs.values():
        sandbox.open(graph.digest, setting.blobs.path(graph.digest))


@pytest.mark.parametrize("name", ["fedavg", "fedavg in parts", "eftvit"])
def test_results_are_those_of_the_same_process_bit_for_bit(
    name: str, settings: Mapping[str, Setting], data: DeviceData, sandbox: Sandbox
) -> None:
    setting = settings[name]
    open_graphs(sandbox, setting)
    tally = Watch(lambda *_: None, lambda: False)
    for number in (1, 2):  # the second one finds the process with its graphs and pictures
        seeds = Seeds(1, number, "pi")
        want = setting.runtime().train(setting.program, setting.start(), data.train, seeds, 0.5, SILENT)
        got = sandbox.train(setting.program, setting.start(), data.train, seeds, 0.5, tally)
        assert_same_bits(got.tensors, want.tensors)
        assert_same_bits(got.collected, want.collected)
        assert (got.samples, got.loss, got.steps, got.flops) == (want.samples, want.loss, want.steps, want.flops)
        assert tally.tally.steps == number * want.steps
    values = {**setting.start(), **want.tensors}
    counted = setting.runtime().evaluate(ModelTest(setting.program, values, data, SEEDS), SILENT)
    assert sandbox.evaluate(ModelTest(setting.program, values, data, SEEDS), SILENT) == counted


def count_mapped_bytes(file: Path) -> int:
    """Count the resident pages of a file that this process maps."""
    parts = Path("/proc/self/smaps").read_text().split(str(file))
    return sum(1024 * int(re.findall(r"Rss: +(\d+) kB", part)[0]) for part in parts[1:])


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_tensors_are_resident_in_the_process_that_computes_alone(
    kind: str, fedavg: Setting, data: DeviceData, sandbox: Sandbox, tmp_path: Path
) -> None:
    """The device has read all of them before, as it does to check them."""
    open_graphs(sandbox, fedavg)
    file = tmp_path / "tensors"
    file.write_bytes(pack(fedavg.start()))
    values = map_tensors(file)
    assert sum(value.sum() for value in values.values())
    assert count_mapped_bytes(file) >= 4096
    resident = []
    watch = Watch(lambda *_: None, lambda: bool(resident.append(count_mapped_bytes(file))))
    if kind == "train":
        sandbox.train(fedavg.program, values, data.train, SEEDS, 1.0, watch)
    else:
        sandbox.evaluate(ModelTest(fedavg.program, values, data, SEEDS), watch)
    assert resident
    assert set(resident) == {0}


def test_comparison_is_that_of_the_same_process(
    fedavg: Setting, data: DeviceData, sandbox: Sandbox, tmp_path: Path
) -> None:
    """With a champion whose folder the process may read; it writes none."""
    open_graphs(sandbox, fedavg)
    data = data.relabel(fedavg.program.classes)
    graph = fedavg.blobs.path(fedavg.program.graphs[fedavg.program.evaluate.graph].digest)
    champion = None
    for _ in range(2):
        challenge = Challenge(ModelSource("run", 1, "pi", 0), graph, champion, "x86_64", 2, "may be sent: no update")
        want = fedavg.runtime().compare(ModelTest(fedavg.program, fedavg.start(), data, SEEDS), SILENT, challenge)
        got = sandbox.compare(ModelTest(fedavg.program, fedavg.start(), data, SEEDS), SILENT, challenge)
        assert (got.comparison, got.with_champion, got.flops) == (want.comparison, want.with_champion, want.flops)
        assert got.files["model.onnx"] == want.files["model.onnx"]
        champion = tmp_path / "champion"
        champion.mkdir(exist_ok=True)
        for name, content in got.files.items():
            (champion / name).write_bytes(content)
    assert got.with_champion


def with_hostile_answers(setting: Setting, folder: Path, *nodes: Any) -> tuple[Program, Path]:
    """A Program whose answers need what the nodes compute from `size` and `square`, and the graph."""
    batch = setting.program.batch
    patches = [batch.answer_size, batch.patches, batch.patch_values]
    graph = helper.make_graph(
        [
            *nodes,
            helper.make_node("ReduceMax", ["worked", "axes"], ["largest"], keepdims=0),
            helper.make_node("ReduceMax", ["batch/patches", "axes1"], ["pixels"], keepdims=0),
            helper.make_node("Add", ["pixels", "largest"], ["sum"]),
            helper.make_node("MatMul", ["sum", "to_classes"], ["logits"]),
        ],
        "hostile",
        [helper.make_tensor_value_info("batch/patches", TensorProto.FLOAT, patches)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch.answer_size, 3])],
        [
            helper.make_tensor("axes", TensorProto.INT64, [2], [0, 1]),
            helper.make_tensor("axes1", TensorProto.INT64, [1], [1]),
            helper.make_tensor(
                "to_classes", TensorProto.FLOAT, [batch.patch_values, 3], [0.0] * 3 * batch.patch_values
            ),
            helper.make_tensor("size", TensorProto.INT64, [2], [1500, 1500]),
            helper.make_tensor("large", TensorProto.INT64, [2], [30_000, 30_000]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    path = folder / "hostile.onnx"
    path.write_bytes(model.SerializeToString())
    spec = msgspec.structs.replace(setting.program.graphs["predict"], digest="hostile")
    return msgspec.structs.replace(setting.program, graphs={**setting.program.graphs, "predict": spec}), path


def endless(setting: Setting, folder: Path) -> tuple[Program, Path]:
    """Thousands of large products in a row: about an hour of one core."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    nodes = [helper.make_node("ConstantOfShape", ["size"], ["p0"], value=one)]
    nodes += [helper.make_node("MatMul", ["p0", f"p{number}"], [f"p{number + 1}"]) for number in range(20_000)]
    nodes.append(helper.make_node("Identity", ["p20000"], ["worked"]))
    return with_hostile_answers(setting, folder, *nodes)


def large(setting: Setting, folder: Path) -> tuple[Program, Path]:
    """A graph of a few hundred bytes that makes 3.6 GB."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    return with_hostile_answers(setting, folder, helper.make_node("ConstantOfShape", ["large"], ["worked"], value=one))


def evaluate(sandbox: Sandbox, setting: Setting, data: DeviceData, program: Program, watch: Watch = SILENT) -> Any:
    return sandbox.evaluate(ModelTest(program, setting.start(), data, SEEDS), watch)


def pid_of(sandbox: Sandbox) -> int:
    assert sandbox._process
    return sandbox._process.pid


def test_a_step_that_does_not_end_is_killed_and_the_next_task_is_done(
    fedavg: Setting, data: DeviceData, sandbox: Sandbox, tmp_path: Path
) -> None:
    open_graphs(sandbox, fedavg)
    program, path = endless(fedavg, tmp_path)
    sandbox.open("hostile", path)
    sandbox.load()
    first, stop = pid_of(sandbox), threading.Event()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(Stopped):
        evaluate(sandbox, fedavg, data, program, Watch(lambda *_: None, stop.is_set))
    wait_until(lambda: not psutil.pid_exists(first))
    sandbox.keep_only({graph.digest for graph in fedavg.program.graphs.values()})
    assert evaluate(sandbox, fedavg, data, fedavg.program).samples == 12


def test_a_graph_gets_no_more_memory_than_the_budget(
    fedavg: Setting, data: DeviceData, launcher: Launcher, tmp_path: Path, made: Path
) -> None:
    budget = psutil.Process().memory_info().rss + 400_000_000
    sandbox = Sandbox(launcher, threads=1, readable=(made, tmp_path), memory_bytes=budget)
    open_graphs(sandbox, fedavg)
    program, path = large(fedavg, tmp_path)
    evaluate(sandbox, fedavg, data, fedavg.program)  # its own memory is there
    sandbox.memory.forget_peak()
    sandbox.open("hostile", path)
    with pytest.raises(OutOfMemory, check=has_code("FV1425")):
        evaluate(sandbox, fedavg, data, program)
    assert (sandbox.memory.peak_bytes() or 0) < budget
    sandbox.keep_only({graph.digest for graph in fedavg.program.graphs.values()})
    assert evaluate(sandbox, fedavg, data, fedavg.program).samples == 12
    sandbox.release()


def test_the_process_keeps_only_the_right_to_compute(sandbox: Sandbox) -> None:
    sandbox.load()
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid_of(sandbox)}/status").read_text().splitlines())
    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
    process = psutil.Process(pid_of(sandbox))
    assert not process.net_connections(kind="inet")


def test_killed_at_work_it_does_the_work_again(fedavg: Setting, data: DeviceData, sandbox: Sandbox) -> None:
    """After its second step; steps count once."""
    open_graphs(sandbox, fedavg)
    want = fedavg.runtime().train(fedavg.program, fedavg.start(), data.train, SEEDS, 1.0, SILENT)
    killed: list[int] = []

    def step(done: int, _total: int, _loss: float | None) -> None:
        if not killed:
            killed.append(pid_of(sandbox))
            os.kill(killed[0], signal.SIGKILL)

    watch = Watch(step, lambda: False)
    got = sandbox.train(fedavg.program, fedavg.start(), data.train, SEEDS, 1.0, watch)
    assert_same_bits(got.tensors, want.tensors)
    assert watch.tally.steps == want.steps
    assert pid_of(sandbox) != killed[0]


def test_killed_twice_at_work_it_is_a_failure_and_the_next_task_is_done(
    fedavg: Setting, data: DeviceData, sandbox: Sandbox, tmp_path: Path
) -> None:
    open_graphs(sandbox, fedavg)
    program, path = endless(fedavg, tmp_path)
    sandbox.open("hostile", path)
    sandbox.load()
    pids = {pid_of(sandbox)}

    def kill() -> None:
        os.kill(max(pids), signal.SIGKILL)
        wait_until(lambda: sandbox._process is not None and pid_of(sandbox) not in pids)
        os.kill(pid_of(sandbox), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DeviceTrouble, check=has_code("FV1480", "ended twice")):
        evaluate(sandbox, fedavg, data, program)
    killer.join()
    sandbox.keep_only({graph.digest for graph in fedavg.program.graphs.values()})
    assert evaluate(sandbox, fedavg, data, fedavg.program).samples == 12


def test_killed_between_two_tasks_it_is_replaced(fedavg: Setting, data: DeviceData, sandbox: Sandbox) -> None:
    open_graphs(sandbox, fedavg)
    want = evaluate(sandbox, fedavg, data, fedavg.program)
    os.kill(pid_of(sandbox), signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid_of(sandbox)))
    assert evaluate(sandbox, fedavg, data, fedavg.program) == want


def test_processes_end_with_the_launcher_and_a_new_one_is_started(
    fedavg: Setting, data: DeviceData, made: Path
) -> None:
    launcher = Launcher()
    sandbox = Sandbox(launcher, threads=1, readable=(made,))
    open_graphs(sandbox, fedavg)
    want = evaluate(sandbox, fedavg, data, fedavg.program)
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid_of(sandbox)))
    assert evaluate(sandbox, fedavg, data, fedavg.program) == want
    launcher.close()
    wait_until(lambda: not psutil.pid_exists(pid_of(sandbox)))
    sandbox.release()


def test_errors_of_graphs_and_images_are_those_of_the_same_process(
    fedavg: Setting, data: DeviceData, sandbox: Sandbox, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no graph at all")
    sandbox.open("broken", broken)
    with pytest.raises(BadPayload, check=has_code("FV1418", "broken")):
        evaluate(sandbox, fedavg, data, fedavg.program)
    sandbox.keep_only(set())
    open_graphs(sandbox, fedavg)
    for path in (*(tmp_path / name for name in ("train/0/a.png", "train/1/b.png")), tmp_path / "test/0/c.png"):
        path.parent.mkdir(parents=True)
        path.write_bytes(data.train.paths[0].read_bytes()[:150])
    spoiled = DeviceData.open(tmp_path)
    with pytest.raises(DataError, check=has_code("FV1403", "none of the 2 training images")):
        sandbox.train(fedavg.program, fedavg.start(), spoiled.train, SEEDS, 1.0, SILENT)
    assert set(spoiled.train.failed) == set(spoiled.train.paths)


def test_pictures_behind_links_are_read(fedavg: Setting, data: DeviceData, sandbox: Sandbox, tmp_path: Path) -> None:
    """The process may read the folders that the links lead to, also if they come later."""
    open_graphs(sandbox, fedavg)
    want = evaluate(sandbox, fedavg, data, fedavg.program)
    for part, split in (("train", data.train), ("test", data.test)):
        for path in split.paths:
            folder = tmp_path / part / path.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).symlink_to(path)
    assert evaluate(sandbox, fedavg, DeviceData.open(tmp_path), fedavg.program) == want


def test_tensors_of_the_vault_are_passed_on_without_the_right_to_read_it(
    fedavg: Setting, data: DeviceData, launcher: Launcher, made: Path, tmp_path: Path
) -> None:
    """Mapped from a file below a folder that the process may not read, and from one that it may."""
    start = fedavg.start()
    want = fedavg.runtime().train(fedavg.program, start, data.train, SEEDS, 1.0, SILENT)
    sandbox = Sandbox(launcher, threads=1, readable=(made, tmp_path / "blobs"))
    open_graphs(sandbox, fedavg)
    for folder in ("blobs", "vault"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "values").write_bytes(pack(start))
        mapped = map_tensors(tmp_path / folder / "values")
        assert_same_bits(sandbox.train(fedavg.program, mapped, data.train, SEEDS, 1.0, SILENT).tensors, want.tensors)
    sandbox.release()


def test_a_folder_that_was_made_anew_is_read(
    fedavg: Setting, data: DeviceData, launcher: Launcher, made: Path, tmp_path: Path
) -> None:
    """A right belongs to the folder that was removed, not to its name."""
    sandbox = Sandbox(launcher, threads=1, readable=(data.folder, tmp_path / "blobs"))
    for _ in range(2):
        shutil.copytree(fedavg.blobs.folder, tmp_path / "blobs")
        for graph in fedavg.program.graphs.values():
            sandbox.open(graph.digest, BlobStore(tmp_path / "blobs").path(graph.digest))
        assert evaluate(sandbox, fedavg, data, fedavg.program).samples == 12
        sandbox.keep_only(set())
        shutil.rmtree(tmp_path / "blobs")
    sandbox.release()
