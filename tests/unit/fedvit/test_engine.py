"""What the engine takes of memory, and gives back."""

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.children import run_child
from tests.support.waiting import WAIT_S

MIB = 2**20

CHILD = """
import gc, pathlib, sys
import numpy as np
from fedvit.engine import trim_memory, load_engine, open_session
from profiles.probes.host import resident_bytes

load_engine()
trim_memory()  # what the first session of a process takes for good is here before
before = resident_bytes()
session = open_session(pathlib.Path(sys.argv[1]), 1)
outputs = session.run(None, {"x": np.ones((4096, 1024), np.float32)})
del session, outputs
gc.collect()
closed = resident_bytes()
trim_memory()
again = open_session(pathlib.Path(sys.argv[1]), 1)
[sum_] = again.run(None, {"x": np.ones((4096, 1024), np.float32)})
del again
trim_memory()
print(before, closed, resident_bytes(), float(sum_))
"""


def test_the_arenas_memory_is_given_back(tmp_path: Path) -> None:
    """Six tensors of 16 MiB live at once: they stay resident when the session is closed, and go when asked for;
    the engine works as before. The sum of x + 1 + ... + 1, six times over: (2 + ... + 7) 4 Mi = 27 x 2^22."""
    ones = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    names = ["x", *(f"h{number}" for number in range(6))]
    nodes = [helper.make_node("Add", [before, "one"], [after]) for before, after in itertools.pairwise(names)]
    nodes += [helper.make_node("Sum", names[1:], ["all"]), helper.make_node("ReduceSum", ["all"], ["y"], keepdims=0)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4096, 1024])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
        [ones],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "big.onnx")
    done = run_child([sys.executable, "-c", CHILD, str(tmp_path / "big.onnx")])
    assert done.returncode == 0, done.stderr
    before, closed, after, total = map(float, done.stdout.split())
    assert total == 27 * 2**22
    assert closed > before + 60 * MIB
    assert after < before + 30 * MIB


@pytest.mark.parametrize("loads", ["fedvit.engine as e; e.load_engine(); e.trim_memory()", "export.bundle.read"])
def test_the_engine_does_not_number_the_machine_nor_report_to_its_maker(tmp_path: Path, loads: str) -> None:
    """Left to itself the official build keeps a number of the machine, and what it will report, in the user's cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ORT_"))}
    environment |= {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    code = f"import {loads}\nimport sys; assert 'onnxruntime' in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=WAIT_S)
    assert list(tmp_path.rglob("*")) == []


def test_engine_is_silenced_before_it_is_loaded() -> None:
    """What stands in a package's `__init__` comes before all of its modules."""
    root = Path(__file__).parents[3]
    for package in ("export", "profiles", "edge_client", "coordinator", "fleet", "bench"):
        trees = [ast.parse(file.read_text()) for file in (root / package).rglob("*.py")]
        names = {
            alias.name for tree in trees for node in tree.body if isinstance(node, ast.Import) for alias in node.names
        }
        if "onnxruntime" in names:
            assert "import fedvit" in (root / package / "__init__.py").read_text(), package
