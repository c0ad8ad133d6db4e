"""Programs on an emulated processor, from the folder that `root.sh` makes."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARM = ROOT / "build" / "arm"
PROCESSORS = ("cortex-a72", "cortex-a76")
"""The processors of a Raspberry Pi 4 and 5; the second alone has instructions for products of 8-bit integers."""
KERNELS = {"PYTHONPATH": str(ARM / "kernels")}
"""The environment in which a program on those has the optional kernels."""
KERNELS_X86 = {"PYTHONPATH": str(ARM / "kernels-x86")}
ALIKE = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
"""The environment in which a program runs the same instructions each time."""


def find_python(processor: str) -> str:
    return str(ARM / processor / "bin" / "python")


def emulate(processor: str, *arguments: object, codes: tuple[int, ...] = (0,), **environment: str) -> str:
    """Run Python on that processor and return what it prints."""
    command = [find_python(processor), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout
