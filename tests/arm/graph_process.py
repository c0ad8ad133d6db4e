"""A graph in the onnxruntime of this process, for another one: python -m tests.arm.graph_process GRAPH

Each line that comes in names a file of inputs (npz); the outputs are in FILE.out.npz when the line is repeated.
"""

import sys

import numpy as np
import onnxruntime


def main() -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    for line in sys.stdin:
        with np.load(line.strip()) as inputs:
            feeds = {value.name: inputs[value.name] for value in session.get_inputs()}
        np.savez(f"{line.strip()}.out", **dict(zip(names, session.run(names, feeds), strict=True)))
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
