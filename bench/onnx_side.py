"""One measured process: a case's training step as a device runs it. Prints one JSON object.

Imports only what `edge-client` imports; programs, graphs and tensors are files in a blob store, as on a device.
"""

import json
import sys
import time
from pathlib import Path

_BEGAN = time.perf_counter()
import numpy as np

import edge_client.agent
import edge_client.cli  # noqa: F401 - this and the following are the imports of the program
import fedvit.transport.mqtt  # noqa: F401
from edge_client.work.runtime import Runtime, Seeds, Watch
from fedvit.blobs import BlobStore
from fedvit.data.folder import Files, Split, TextSplit
from fedvit.data.images import Flags, Indices, Pixels
from fedvit.program import Program, decode_program
from fedvit.tensors import Tensors, check_tensors, map_tensors
from profiles.probes.host import peak_rss_bytes

IMPORT_S = time.perf_counter() - _BEGAN
from bench.product import FILES, measure_gflops

START = "start.json"
"""File beside the blobs: digest of the Program, and group -> digest of its values at the start of the round."""


def main() -> None:
    """Arguments: the prepared folder, steps, threads, "kernels" or "plain"."""
    own_kernels = sys.argv[4] == "kernels"
    folder, steps, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    start = json.loads((folder / START).read_text())
    blobs = BlobStore(folder)
    program = decode_program(blobs.get(start["program"]))
    runtime = Runtime(threads, own_kernels=own_kernels)
    began = time.perf_counter()
    for graph in program.graphs.values():
        runtime.open(graph.digest, blobs.path(graph.digest))
    load_s = time.perf_counter() - began
    values = start_values(program, start["groups"], blobs)
    samples = make_noise_samples(program, steps * program.batch.batch_size)
    watch = Watch(lambda done, total, loss: None, lambda: False)
    trained = runtime.train(program, values, samples, Seeds(0, 1, "device-0"), 1.0, watch)

    if foreign := sorted({"torch", "timm", "onnx"} & sys.modules.keys()):
        raise RuntimeError(f"this process has imported {foreign[0]}, which is not installed on devices")
    measured: dict[str, object] = {
        "step_s": trained.step_s,
        "import_s": IMPORT_S,
        "peak_rss_bytes": peak_rss_bytes(),
        "load_s": load_s,
        "gflop": trained.flops / trained.steps / 1e9,
    }
    measured["product_gflops"] = {kind: measure_onnx_gflops(folder / file, threads) for kind, file in FILES.items()}
    sys.stdout.write(json.dumps(measured) + "\n")


def measure_onnx_gflops(file: Path, threads: int) -> float:
    import onnxruntime  # late, as on devices

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    (side, _) = session.get_inputs()[0].shape
    rng = np.random.default_rng(0)
    kinds = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int8)": np.int8}
    feeds = {one.name: rng.integers(0, 64, (side, side)).astype(kinds[one.type]) for one in session.get_inputs()}
    return measure_gflops(lambda: session.run(None, feeds), side)


def start_values(program: Program, digests: dict[str, str], blobs: BlobStore) -> Tensors:
    """Load every tensor at the start of a round, as the agent does."""
    values: Tensors = {}
    for group in program.groups:
        tensors = map_tensors(blobs.path(digests[group]))
        check_tensors(tensors, program.forms_of([group]), f"group {group!r}")
        values |= tensors
    return values


def make_noise_samples(program: Program, count: int) -> Split:
    """Draw characters at random, or make decoded images of noise; `count` of these take the memory of one batch."""
    rng = np.random.default_rng(0)
    if program.batch.text:
        return TextSplit.of(rng.integers(len(program.classes), size=(count, program.batch.text.context + 1)), [])
    size, batch_size = program.batch.image_size, program.batch.batch_size
    pictures = rng.integers(256, size=(batch_size, size, size, 3), dtype=np.uint8)

    class Noise(Files):
        def load(self, rows: Indices, size: int) -> tuple[Pixels, Flags]:
            return pictures[rows % batch_size], np.ones(len(rows), np.bool_)

    labels = rng.integers(len(program.classes), size=count)
    return Split(labels, Noise([Path(str(row)) for row in range(count)]))


if __name__ == "__main__":
    main()
