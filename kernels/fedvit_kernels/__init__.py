"""Path of the library with the operators."""

from pathlib import Path

LIBRARY = Path(__file__).parent / "libfedvit_kernels.so"
