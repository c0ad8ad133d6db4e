"""No code comes from outside: neither the tree nor the wheel runs, loads or unpickles what it receives."""

import ast
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import run_child

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedvit", "export", "profiles", "edge_client", "coordinator", "fleet", "bench")
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {("pickle", name) for name in ("load", "loads", "_load", "_loads", "_Unpickler")}
FORBIDDEN_ATTRIBUTES = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("torch", "load"), *LOADERS}
OWN_PIPES = {
    "coordinator/compute/rank_loop.py",
    "coordinator/compute/ranks.py",
    "edge_client/sandbox/pickles.py",
    "edge_client/sandbox/sandbox.py",
    "edge_client/sandbox/worker.py",
}
"""The worker process, and a device, send work to processes that they started themselves, over pipes that nobody else
has; what comes back to a device is no pickle."""
READS_DATA = "fleet/datasets/pickles.py"
"""CIFAR comes as pickles. An unpickler that makes nothing but arrays reads them, in Python: that in C takes as much
memory as a file names."""
KNOW_PICKLES = {READS_DATA, "bench/wire_side.py", *OWN_PIPES}
"""The benchmark writes some."""

LOADS_KERNELS = "fedvit/engine.py"
"""The library of the optional package that the device's owner installed; graphs that ask for it are refused."""


def offences(name: str, source: str) -> Iterator[str]:
    """Calls and imports that could run what came from outside."""
    for node in ast.walk(ast.parse(source, name)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                yield f"{where} calls {node.func.id}"
            for keyword in node.keywords:
                given = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if (keyword.arg, given) in (("shell", True), ("allow_pickle", True), ("trust_remote_code", True)):
                    yield f"{where} passes {keyword.arg}=True"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            allowed = LOADERS if name in OWN_PIPES else {("pickle", "_Unpickler")} if name == READS_DATA else set()
            if (node.value.id, node.attr) in FORBIDDEN_ATTRIBUTES - allowed:
                yield f"{where} uses {node.value.id}.{node.attr}"
            if node.attr == "register_custom_ops_library" and name != LOADS_KERNELS:
                yield f"{where} loads a library of operators"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if name not in KNOW_PICKLES:
                yield from (f"{where} imports {one}" for one in names if one.partition(".")[0] in FORBIDDEN_MODULES)


def test_the_walk_finds_what_it_looks_for() -> None:
    source = (
        "import pickle\nfrom dill import x\neval('1')\nos.system('ls')\nrun('x', shell=True)\nf(a, allow_pickle=True)\n"
        "pickle.loads(a)\noptions.register_custom_ops_library(a)"
    )
    assert len(list(offences("x.py", source))) == 8
    assert list(offences("x.py", "# pickle, eval(\nmodel.eval()\nsession.exec(query)\nre.compile('x')")) == []


def test_nothing_in_the_tree_runs_what_came_from_outside() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 150
    found = [text for file in files for text in offences(str(file.relative_to(ROOT)), file.read_text())]
    assert found == []


@pytest.mark.slow
def test_nothing_in_the_wheel_does_either(tmp_path: Path) -> None:
    """The wheel as it is built: all but its Python and the scripts of two pages is data."""
    command = [
        sys.executable,
        "-c",
        "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])",
    ]
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    built = run_child([*command, str(tmp_path)], cwd=source, check=True)
    assert "absent from the `packages` configuration" not in built.stdout + built.stderr
    [file] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        found = [text for name in names if name.endswith(".py") for text in offences(name, wheel.read(name).decode())]
    assert found == []
    kinds = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert kinds <= {".py", ".toml", ".json", ".html", ".css", ".svg", ".js", ".onnx", ".program", ".typed", ".txt"}
    scripts = {"coordinator/views/dashboard/dashboard.js", "edge_client/owner/page/page.js"}
    assert {name for name in names if name.endswith(".js")} == scripts
    assert not [name for name in names if name.startswith(("tests", "deploy"))]
    assert not [name for name in names if "bench" in Path(name).with_suffix("").parts]
