"""Compiles the library with g++, or with the compiler that CXX names; nothing but the standard library is needed.

What computes is compiled once for each set of instructions, and the library chooses when it is loaded.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = "libfedvit_kernels.so"
SOURCES = Path(__file__).parent / "src"
_OLDEST_GLIBC = 17
"""Minor version that installers know by a name of its own, manylinux2014; older ones are on no device."""
_PARTS_OF_GLIBC = {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
]
_WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
_PLAIN = ["-DNAME=plain_kernels", "-DLANES=4"]
_X86 = [
    ["-DNAME=avx2_kernels", "-DLANES=8", "-mavx2", "-mfma"],
    ["-DNAME=avx512_kernels", "-DLANES=16", "-mavx512f", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
]
_ALONE = [
    *("-shared", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,-z,defs", "-Wl,--as-needed"),
    f"-Wl,--version-script={SOURCES / 'exports.map'}",
]


def compile_library(target: Path, only: str = "") -> None:
    """Write the library; with `only`, one that does not choose. Raises subprocess.CalledProcessError where the compiler
    fails; it says why.
    """
    chosen = [f"-DONLY={only}"] if only else []
    kinds = [_PLAIN] if is_aarch64() else [_PLAIN, *_X86]
    files = [("compute.cpp", kind) for kind in kinds] + [("library.cpp", chosen), ("runtime.cpp", [])]
    with tempfile.TemporaryDirectory() as made:
        objects = [str(Path(made, f"{number}.o")) for number in range(len(files))]
        for (source, flags), object_file in zip(files, objects, strict=True):
            _call(*_FLAGS, *_WARNINGS, *flags, "-c", str(SOURCES / source), "-o", object_file)
        target.parent.mkdir(parents=True, exist_ok=True)
        _call(*_ALONE, *objects, "-o", str(target))


def is_aarch64() -> bool:
    """Return whether the compiler makes code for aarch64."""
    return _ask_compiler("-dumpmachine").startswith("aarch64")


def find_platform(library: Path) -> str:
    """Return the wheel's platform: of the compiler's processor, with the oldest glibc that has what the library needs.

    Raises subprocess.CalledProcessError or ValueError where the library needs more than the C library.
    """
    reader = _ask_compiler("-print-prog-name=objdump").strip()
    table = subprocess.run([reader, "-p", str(library)], check=True, capture_output=True, text=True).stdout
    if foreign := set(re.findall(r"NEEDED +(\S+)", table)) - _PARTS_OF_GLIBC:
        raise ValueError(f"{library} needs {', '.join(sorted(foreign))}, expected nothing but the C library")
    minor = max(_OLDEST_GLIBC, *(int(number) for number in re.findall(r"GLIBC_2\.(\d+)", table)))
    return f"manylinux_2_{minor}_{'aarch64' if is_aarch64() else 'x86_64'}"


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _ask_compiler(*arguments: str) -> str:
    return subprocess.run([_compiler(), *arguments], check=True, capture_output=True, text=True).stdout


def _call(*arguments: str) -> None:
    subprocess.run([_compiler(), *arguments], check=True)


if __name__ == "__main__":
    compile_library(Path(sys.argv[1]))
