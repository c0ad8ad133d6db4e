"""The server's part of a case, in its own process: writes Program, graphs and start tensors. Prints progress."""

import importlib
import json
import sys
from pathlib import Path

import click
import onnx
from onnx import helper

from bench.cases import Case, decode_case
from bench.onnx_side import START
from bench.product import FILES
from coordinator.compute.planning.planner import make_plan
from coordinator.config import RunConfig
from fedvit.blobs import BlobStore
from fedvit.tensors import pack


def prepare(case: Case, folder: Path, product_side: int, cache: Path | None = None) -> None:
    """Write all that a device fetches for round 1 into a blob store in `folder`, with START and a product beside it.

    Raises ConfigError when the case does not fit its method or model.
    """
    config = RunConfig(
        method=case.method, options=case.options, model=case.model, model_options=case.model_options, rounds=1
    )
    classes = tuple(f"class-{number}" for number in range(case.classes))
    blobs = BlobStore(folder)
    plan = make_plan(config, classes, blobs, cache=cache, progress=click.echo)
    program = plan.first.program
    digests: dict[str, str] = {}
    for group, spec in program.groups.items():
        if spec.initial is not None:
            digests[group] = spec.initial
            continue
        generated = spec.role.is_made_for_device
        values = plan.rule.generate(plan.state, "device-0", config.seed) if generated else plan.state.tensors
        names = [name for name in program.names(group) if name in values]
        digest = blobs.put(pack({name: values[name] for name in names})).digest
        digests[group] = digest if generated else plan.find_sent_blob(plan.first, group, digest)
    (folder / START).write_text(json.dumps({"program": plan.first.digest, "groups": digests}))
    write_products(folder, product_side)


def write_products(folder: Path, side: int) -> None:
    """Write graphs of one product of square matrices each; both are inputs, as the weights of a step are."""
    floats, unsigned, signed = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8, onnx.TensorProto.INT8
    one = helper.make_tensor("one", floats, [], [1.0])
    integers = helper.make_node("MatMulIntegerToFloat", ["a", "b", "one", "one"], ["y"], domain="com.microsoft")
    products = {
        "fp32": (helper.make_node("Gemm", ["a", "b"], ["y"]), floats, floats),
        "int8": (integers, unsigned, signed),
    }
    for precision, (node, left, right) in products.items():
        a, b, y = (
            helper.make_tensor_value_info(name, kind, [side, side])
            for name, kind in (("a", left), ("b", right), ("y", floats))
        )
        graph = helper.make_graph([node], "product", [a, b], [y], [one] if precision == "int8" else [])
        # not onnx's newest versions, which onnxruntime may not read yet
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        (folder / FILES[precision]).write_bytes(model.SerializeToString())


def main() -> None:
    """Arguments: the case, the folder, side of the product, and the graph cache or an empty text."""
    # compiles these modules for the first measured process, as those of torch and timm are compiled
    importlib.import_module("edge_client.agent")
    importlib.import_module("edge_client.cli")
    text, folder, side, cache = sys.argv[1:]
    prepare(decode_case(text), Path(folder), int(side), Path(cache) if cache else None)


if __name__ == "__main__":
    main()
