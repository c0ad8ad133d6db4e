"""The package of the optional kernels, compiled for this processor."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

from tests.support.once import make_once

SOURCE = Path(__file__).parents[2] / "kernels"


def compiled(shared: Path, kind: str = "") -> Path:
    """A folder for the path of modules, compiled once for all tests; `kind`: instructions for which alone."""

    def make(folder: Path) -> None:
        shutil.copytree(SOURCE / "fedvit_kernels", folder / "fedvit_kernels")
        _compiling().compile_library(kernels_in(folder), kind)

    return make_once(shared / f"kernels-{kind}", make)


def kernels_in(folder: Path) -> Path:
    return folder / "fedvit_kernels" / "libfedvit_kernels.so"


def _compiling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", SOURCE / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
