"""The device on emulated processors (`make arm`): by its name the usual suite does not collect this file.

A device's processes are emulated, with all that they start; torch, the coordinator and the broker are not.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from torch import Tensor

from bench.cases import Case
from bench.prepare import prepare
from coordinator.compute.planning.planner import make_plan
from coordinator.config import make_config
from export import verify
from fedvit.blobs import BlobStore
from fedvit.methods import make_method
from fedvit.models import SMALL
from fedvit.tensors import Tensors, unpack
from fleet.datasets.digits import read_digits
from fleet.partition import write_device_folders
from fleet.partitions import partition
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.arm.counting import read_counts
from tests.arm.emulation import ALIKE, ARM, KERNELS, PROCESSORS, ROOT, emulate, find_python
from tests.arm.loops import compile_kernels, count_cycles, find_largest_loops
from tests.support.brokers import mosquitto, served
from tests.support.forked import Forked
from tests.support.once import make_once
from tests.support.programs import Stage, toml
from tests.support.settings import make_settings
from tests.support.tiny import make_tiny

PROGRAM = "from edge_client.cli import main; main()"

OWN_TESTS = (
    *(f"edge_client/work/test_{name}.py" for name in ("runtime", "uplink", "private", "sampler")),
    *(f"edge_client/storage/test_{name}.py" for name in ("evaluation", "integrity", "vault_key")),
    *("edge_client/commands/test_predict.py", "edge_client/owner/test_speed.py"),
    *(f"fedvit/test_{name}.py" for name in ("blobs", "engine", "files", "onnx_file", "packets", "program", "protobuf")),
    *(f"fedvit/test_{name}.py" for name in ("resources", "tensors")),
    "fedvit/data",
    "fedvit/updates",
    "profiles/probes",
)
"""What a processor can change: numbers, bytes, memory, and what is measured. All other tests of the device are about
what is said and kept, in Python alone; the run below says and keeps it."""
NO_TORCH = "not torch"
"""And not those whose right answer is torch's, which is not installed there: the graphs below are compared with it."""
NOT_LONG = "not test_training_learns"
"""And not two that train for many epochs, a third of the whole time: the run below trains."""

MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2}
RUN: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 2,
    "seed": 5,
    "devices": 2,
    "options": {"batch_size": 8, "epochs": 2, "lr": 0.05, "momentum": 0.9},
    "model_options": MODEL,
    "deadline_s": 1800.0,
    "rejoin_grace_s": 600.0,
}
CLASSES = tuple(map(str, range(10)))


@pytest.fixture(scope="session")
def parts(shared: Path) -> Path:
    """Two devices with 40 digits in all."""

    def deal(folder: Path) -> None:
        digits = read_digits(size=32)
        shares = partition("iid", digits.labels[:40], 2, seed=3)
        write_device_folders(digits, shares, folder, test_share=0.2, seed=3)

    return make_once(shared / "arm" / "parts", deal)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_what_a_processor_can_change_is_as_elsewhere(processor: str, shared: Path, graph_cache: Path) -> None:
    """The device's own tests, in its own Python; none of them is skipped."""
    settings = make_once(shared / "arm" / "settings", lambda folder: make_settings(folder, graph_cache))
    tests = [f"tests/unit/{name}" for name in OWN_TESTS]
    said = emulate(
        processor, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", NO_TORCH, "-k", NOT_LONG, *tests,
        FEDVIT_TEST_SETTINGS=str(settings),
    )  # fmt: skip
    last = said.strip().splitlines()[-1]
    assert "skipped" not in last, said
    print(processor, last)


# --- graphs -------------------------------------------------------------------------------------------


class EmulatedRunner:
    """What `export.verify` runs graphs with, on another processor."""

    def __init__(self, processor: str, folder: Path) -> None:
        self.processor, self.folder = processor, folder
        self._processes: list[subprocess.Popen[str]] = []

    def __call__(self, graph: bytes) -> verify.Run:
        file = self.folder / f"{len(self._processes)}.onnx"
        file.write_bytes(graph)
        command = [find_python(self.processor), "-m", "tests.arm.graph_process", str(file)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        requests, replies = process.stdin, process.stdout
        assert requests is not None
        assert replies is not None
        return lambda inputs: _answer(requests, replies, file.with_suffix(".npz"), inputs)

    def close(self) -> None:
        for process in self._processes:
            process.communicate(timeout=600)  # its input ends, and so does it
            assert process.returncode == 0


def _answer(requests: IO[str], replies: IO[str], file: Path, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    np.savez(file, **{name: value.numpy() for name, value in inputs.items()})
    requests.write(f"{file}\n")
    requests.flush()
    assert replies.readline() == f"{file}\n", "the graph ran"
    with np.load(f"{file}.out.npz") as outputs:
        return dict(outputs)


@pytest.fixture
def runner(processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedRunner]:
    runner = EmulatedRunner(processor, tmp_path)
    monkeypatch.setattr(verify, "_runner", runner)
    yield runner
    runner.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {"optimizer": "sgd", "momentum": 0.9}),
        ("eftvit", {"mask": 0.5, "local_blocks": 1}),
        ("eftvit", {"mask": 0.5, "local_blocks": 1, "compute": "int8"}),
        ("eftvit", {"mask": 0.5, "local_blocks": 1, "compute": "fp16"}),
    ],
    ids=["fedavg", "eftvit", "eftvit-int8", "eftvit-fp16"],
)
def test_graphs_pass_the_check_of_the_export(
    runner: EmulatedRunner, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Every graph of a method is compared with torch in float64, as at its export, but runs on the other processor."""
    graphs = make_tiny(make_method(method, {"batch_size": 8, **options}), tmp_path / "cache").graphs
    assert {graph.cached for graph in graphs.values()} == {False}
    for name, graph in graphs.items():
        print(f"{runner.processor} {method} {name}: differs from torch by {graph.max_difference:.1e}")


# --- a run --------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("environment", [{}, KERNELS], ids=["plain", "kernels"])
def test_a_run_with_an_emulated_device(
    environment: dict[str, str], tmp_path: Path, parts: Path, cache: Path, graph_cache: Path
) -> None:
    """A Raspberry Pi 4 and an x86 device train over mosquitto. Beside a run of x86 devices alone, with the same images
    and seeds, the update of the Pi differs by rounding."""
    with closing(Stage(tmp_path, parts, cache)) as stage:
        config = tmp_path / "run.toml"
        config.write_text(toml(RUN))
        given = ["start", "--runs", str(stage.out), "--broker", "mosquitto", "--broker.port", str(stage.port)]
        given += ["--config", str(config), "--run", "run"]
        coordinator = stage.keep(Forked("coordinator.cli", given, stage.log_path("coordinator"), stage.environment))
        flags = ["--broker", f"127.0.0.1:{stage.port}", "--data", str(parts / "device-0")]
        flags += ["--state", str(tmp_path / "state"), "--id", "device-0", "--threads", "1", "--once"]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setitem(stage.environment, name, value)
            emulated_device = stage.start("device-0", [find_python("cortex-a72"), "-c", PROGRAM, *flags])
        device = stage.device("device-1")
        for name, process in (("coordinator", coordinator), ("device-0", emulated_device), ("device-1", device)):
            assert process.wait(1800) == 0, stage.log(name)
        shown = stage.show()
        got = unpack(stage.model())
    assert [entry["accepted"] for entry in shown["rounds"]] == [2, 2]
    assert not shown["refusals"]

    folders = [parts / name for name in ("device-0", "device-1")]
    simulate(RunRequest(folders, RUN, out=tmp_path / "same", run="run", graph_cache=graph_cache))
    want = unpack((tmp_path / "same" / "run" / "model.safetensors").read_bytes())
    plan = make_plan(make_config(RUN, "test").run, CLASSES, BlobStore(tmp_path / "plan"), cache=graph_cache)
    moved, apart = _largest(want, plan.state.tensors), _largest(got, want)
    print(f"the run's model differs by {apart / moved:.1e} of its largest change")
    assert 0 < apart < verify.TOLERANCE * moved


def _largest(some: Tensors, others: Mapping[str, Any]) -> float:
    assert some.keys() == others.keys()
    return max(float(np.abs(value - others[name]).max()) for name, value in some.items())


# --- commands -----------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
def test_doctor_and_profile(tmp_path: Path, parts: Path) -> None:
    """The speed is the emulator's, or not measured where its probe is not done in time; memory is this machine's."""
    with mosquitto(tmp_path / "broker") as broker, served(broker.address):
        flags = ["--broker", f"127.0.0.1:{broker.address.port}", "--data", parts / "device-0", "--json"]
        flags += ["--state", tmp_path / "state"]
        found = json.loads(emulate("cortex-a72", "-c", PROGRAM, "doctor", *flags, codes=(0, 1)))
        profile = json.loads(emulate("cortex-a72", "-c", PROGRAM, "profile", *flags))
    findings = {finding["check"]: finding for finding in found["findings"]}
    for name in ("engine", "state", "broker", "messages", "coordinator"):
        assert findings[name]["level"] == "ok", findings[name]
    assert (profile["host"]["machine"], profile["host"]["processor"]) == ("aarch64", "Cortex-A72")
    assert profile["speed"] is not None or "compute speed" in profile["not_measured"]
    print(f"{profile['host']['processor']}: {profile['speed_origin']}; {profile['not_measured']}")


# --- steps --------------------------------------------------------------------------------------------


def prepare_steps(folder: Path, graph_cache: Path, compute: str, **options: str) -> None:
    options = {"epochs": 1, "batch_size": 8, "mask": 0.5, "local_blocks": 2, "compute": compute, **options}
    model = {**MODEL, "width": 128, "depth": 8, "heads": 8, "patch_size": 4, "mlp_ratio": 2.0}
    case = Case(name="", method="eftvit", options=options, model=SMALL, model_options=model)
    prepare(case, folder, 8, graph_cache)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("compute", "near"), [("fp32", 1e-4), ("int8", 0.05)])
def test_steps_with_kernels_train_the_same(
    processor: str, compute: str, near: float, tmp_path: Path, graph_cache: Path
) -> None:
    """By the change of all tensors, which the last bits of weights limit."""
    prepare_steps(tmp_path, graph_cache, compute, optimizer="sgd")
    trained = []
    for name, environment in (("plain", {}), ("kernels", KERNELS)):
        file = tmp_path / f"{name}.npz"
        done = json.loads(emulate(processor, "-m", "tests.arm.step_process", tmp_path, 2, file, **environment))
        assert done["kernels"] == (name == "kernels")
        with np.load(file) as tensors:
            trained.append(np.concatenate([tensors[each].ravel() for each in sorted(tensors)]))
    plain, ours = trained
    apart = np.linalg.norm(ours - plain) / np.linalg.norm(plain)
    print(f"{processor} {compute}: with kernels two steps end {apart:.1e} of their length apart")
    assert 0 < apart < near


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("environment", [{}, KERNELS], ids=["plain", "kernels"])
@pytest.mark.parametrize("compute", ["fp32", "fp16", "int8"])
def test_instructions_of_a_step(
    processor: str, compute: str, environment: dict[str, str], tmp_path: Path, graph_cache: Path
) -> None:
    """Count what four steps run. The number says nothing of caches, and of instructions that run at the same time."""
    prepare_steps(tmp_path, graph_cache, compute)
    given = {"QEMU_PLUGIN": f"{ARM / 'instructions.so'},out={tmp_path / 'count'}", **ALIKE, **environment}
    done = json.loads(emulate(processor, "-m", "tests.arm.step_process", tmp_path, 5, **given))
    counts = read_counts(tmp_path / "count")
    one, flops = (counts[4] - counts[0]) / 4, done["flops"] / done["steps"]
    kernels = ", with kernels" if done["kernels"] else ""
    print(f"{processor} {compute}{kernels}: {one / 1e6:,.0f} million instructions for {flops / 1e6:,.0f} MFLOP")
    assert 0 < one < counts[0] * 100


def test_cycles_of_inner_loops() -> None:
    """The figure of docs/measurements.md, of a Cortex-A72: LLVM 14 has no model of the Cortex-A76."""
    loops = [loop for loop in find_largest_loops(compile_kernels()) if loop.has_vectors]
    assert {"softmax", "gelu_grad", "layer_norm"} <= {loop.function for loop in loops}
    for loop in loops:
        least, most = count_cycles(loop, "cortex-a72")
        print(f"{loop.function}: {len(loop.instructions)} instructions, {least:.1f} to {most:.1f} cycles")
        assert len(loop.instructions) / 3 <= least <= most


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_instructions_of_masks(processor: str, tmp_path: Path) -> None:
    """The figure of docs/measurements.md, for 20 neighbours and an update of 87 MB, from smaller updates."""
    counts, words = [], (1 << 20, 1 << 21)
    for each in words:
        plugin = f"{ARM / 'instructions.so'},out={tmp_path / 'count'}"
        emulate(processor, "-m", "tests.arm.sum_process", 20, each, QEMU_PLUGIN=plugin, **ALIKE)
        counts.append(read_counts(tmp_path / "count")[-1])
    all_ = (counts[1] - counts[0]) / (words[1] - words[0]) * 87e6 / 4
    print(f"{processor}: {all_ / 1e6:,.0f} million instructions for the masks over 87 MB")
    assert 0 < counts[0] < counts[1]
