"""Training steps of a case that `bench.prepare` wrote: python -m tests.arm.step_process FOLDER STEPS [FILE]

As on a device, with a mark after each step. How far each tensor moved goes to FILE (npz).
"""

import json
import sys
from pathlib import Path

import numpy as np

from bench.onnx_side import START, make_noise_samples, start_values
from edge_client.work.runtime import Runtime, Seeds, Watch
from fedvit.blobs import BlobStore
from fedvit.kernels import find_library
from fedvit.program import decode_program
from tests.arm.counting import mark


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    start = json.loads((folder / START).read_text())
    blobs = BlobStore(folder)
    program = decode_program(blobs.get(start["program"]))
    runtime = Runtime(1)
    for graph in program.graphs.values():
        runtime.open(graph.digest, blobs.path(graph.digest))
    images = make_noise_samples(program, steps * program.batch.batch_size)
    watch = Watch(lambda *step: mark(), lambda: False)
    values = start_values(program, start["groups"], blobs)
    trained = runtime.train(program, values, images, Seeds(0, 1, "device-0"), 1.0, watch)
    for file in sys.argv[3:]:
        np.savez(file, **{name: value - values[name] for name, value in trained.tensors.items()})
    print(json.dumps({"steps": trained.steps, "flops": trained.flops, "kernels": find_library() is not None}))


if __name__ == "__main__":
    main()
