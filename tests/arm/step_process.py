"""Training steps of a case that `bench.prepare` wrote, as on a device: python -m tests.arm.step_process FOLDER STEPS"""

import json
import sys
from pathlib import Path

from bench.onnx_side import START, noise_samples, start_values
from edge_client.runtime import Runtime, Seeds, Watch
from fedvit.blobs import BlobStore
from fedvit.program import decode_program


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    start = json.loads((folder / START).read_text())
    blobs = BlobStore(folder)
    program = decode_program(blobs.get(start["program"]))
    runtime = Runtime(1)
    for graph in program.graphs.values():
        runtime.open(graph.digest, blobs.path(graph.digest))
    images = noise_samples(program, steps * program.batch.batch_size)
    watch = Watch(lambda *step: None, lambda: False)
    trained = runtime.train(
        program, start_values(program, start["groups"], blobs), images, Seeds(0, 1, "device-0"), 1.0, watch
    )
    print(json.dumps({"steps": trained.steps, "flops": trained.flops}))


if __name__ == "__main__":
    main()
