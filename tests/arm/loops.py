"""Cycles of the kernels' inner loops, as llvm-mca schedules them: it knows ports and latencies, but no caches."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPILER = "aarch64-linux-gnu-g++"
COMPUTE = Path(__file__).parents[2] / "kernels" / "src" / "compute.cpp"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti")
ITERATIONS = 200

_LABEL = re.compile(r"(\S+):")
_BRANCH = re.compile(r"\tb(?:\.?\w+)?\t(\.L\w+)$")


class Loop(NamedTuple):
    """An innermost loop: the function that it is inlined into, and its instructions."""

    function: str
    instructions: list[str]

    @property
    def products(self) -> int:
        """Vector instructions that multiply and add."""
        return sum("fmla" in line or "fmls" in line for line in self.instructions)

    @property
    def has_vectors(self) -> bool:
        return any(".4s" in line for line in self.instructions)


def compile_kernels() -> str:
    """Return the assembly of all kernels for aarch64."""
    kind = ("-DNAME=plain_kernels", "-DLANES=4")
    command = [COMPILER, *FLAGS, *kind, "-S", str(COMPUTE), "-o", "-"]
    assembly = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return subprocess.run(["c++filt"], input=assembly, check=True, capture_output=True, text=True).stdout


def find_largest_loops(assembly: str) -> list[Loop]:
    """Return the innermost loop of each function that has the most products, or else the most instructions."""
    largest: dict[str, Loop] = {}
    for loop in _iterate_loops(assembly.splitlines()):
        before = largest.get(loop.function)
        if before is None or _size(loop) > _size(before):
            largest[loop.function] = loop
    return sorted(largest.values(), key=_size, reverse=True)


def _size(loop: Loop) -> tuple[int, int]:
    return loop.products, len(loop.instructions)


def _iterate_loops(lines: list[str]) -> Iterator[Loop]:
    function, labels = "", {}
    for number, line in enumerate(lines):
        if line and not line[0].isspace() and line.endswith(":"):
            labels[line[:-1]] = number
            if not line.startswith(".L"):
                function = re.sub(r"\(anonymous namespace\)::|\(.*", "", line[:-1])
        elif (branch := _BRANCH.match(line)) and branch[1] in labels:
            body = lines[labels[branch[1]] + 1 : number + 1]
            if not any(_LABEL.match(inner) for inner in body):
                yield Loop(function, [inner for inner in body if inner.startswith("\t") and inner[1] != "."])


def count_cycles(loop: Loop, processor: str) -> tuple[float, float]:
    """Return the cycles of one iteration: what its ports allow, and with all latencies.

    The model lets an address that a store moves on wait for the stored value, which processors do not: the second
    figure is too high for loops that end with such a store.
    """
    command = ["llvm-mca", "-mtriple=aarch64-linux-gnu", f"-mcpu={processor}", f"-iterations={ITERATIONS}"]
    source = "\n".join(loop.instructions)
    report = subprocess.run(command, input=source, check=True, capture_output=True, text=True).stdout
    bound, total = re.search(r"Block RThroughput: +([\d.]+)", report), re.search(r"Total Cycles: +(\d+)", report)
    assert bound is not None, report
    assert total is not None, report
    return float(bound[1]), int(total[1]) / ITERATIONS
