"""Processes that see a processor without instructions beyond AVX2, whatever processor runs them."""

import os
import subprocess
import sys
from pathlib import Path

from fedvit.errors import FedvitError

ISAS = ("avx2", "avx-vnni")
"""Instructions of small x86 processors: up to AVX2, and with its products of 8-bit integers."""

_SOURCE = Path(__file__).with_name("isa.c")
_IS_HIDDEN = "import ctypes; print(ctypes.CDLL(None).syscall(158, 0x1011, 0))"
"""Ask the kernel (arch_prctl, ARCH_GET_CPUID) whether this process may ask the processor itself: 1, or 0."""


def restrict(isa: str, folder: Path) -> dict[str, str]:
    """Return the environment in which processes see only these instructions.

    Raises FedvitError if this machine has no C compiler, or if its processor or kernel cannot answer for CPUID.
    """
    library = folder / "isa.so"
    flags = ["-DAVX_VNNI"] if isa == "avx-vnni" else []
    try:
        command = ["cc", "-O2", "-shared", "-fPIC", *flags, "-o", str(library), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise FedvitError(
            "FV0002", f"--isa {isa}: {_SOURCE.name} cannot be compiled on this machine: {reason}"
        ) from error
    environment = {"LD_PRELOAD": str(library)}
    asked = subprocess.run(
        [sys.executable, "-c", _IS_HIDDEN], env={**os.environ, **environment}, capture_output=True, text=True
    )
    if asked.stdout.strip() != "0":
        raise FedvitError(
            "FV0002", f"--isa {isa}: this processor or kernel cannot hide instructions (cpuid_fault in /proc/cpuinfo)"
        )
    return environment
