"""Compiles the library with g++, or with the compiler that CXX names; nothing but the standard library is needed.

What computes is compiled once for each set of instructions, and the library chooses when it is loaded.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = "libfedvit_kernels.so"
SOURCES = Path(__file__).parent / "src"

_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
_WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
_PLAIN = ["-DNAME=plain_kernels", "-DLANES=4"]
_X86 = [
    ["-DNAME=avx2_kernels", "-DLANES=8", "-mavx2", "-mfma"],
    ["-DNAME=avx512_kernels", "-DLANES=16", "-mavx512f", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
]
_ALONE = ["-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,-z,defs"]


def compile_library(target: Path, only: str = "") -> None:
    """Write the library; with `only`, one that does not choose. Raises subprocess.CalledProcessError where the compiler
    fails; it says why.
    """
    chosen = [f"-DONLY={only}"] if only else []
    kinds = [_PLAIN] if is_aarch64() else [_PLAIN, *_X86]
    files = [("compute.cpp", kind) for kind in kinds] + [("library.cpp", chosen)]
    with tempfile.TemporaryDirectory() as made:
        objects = [str(Path(made, f"{number}.o")) for number in range(len(files))]
        for (source, flags), object_file in zip(files, objects, strict=True):
            _call(*_FLAGS, *_WARNINGS, *flags, "-c", str(SOURCES / source), "-o", object_file)
        target.parent.mkdir(parents=True, exist_ok=True)
        _call(*_ALONE, *objects, "-o", str(target))


def is_aarch64() -> bool:
    """Return whether the compiler makes code for aarch64."""
    return _ask_compiler("-dumpmachine").startswith("aarch64")


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _ask_compiler(*arguments: str) -> str:
    return subprocess.run([_compiler(), *arguments], check=True, capture_output=True, text=True).stdout


def _call(*arguments: str) -> None:
    subprocess.run([_compiler(), *arguments], check=True)


if __name__ == "__main__":
    compile_library(Path(sys.argv[1]))
