"""Where the library with the operators is."""

from pathlib import Path

LIBRARY = Path(__file__).parent / "libfedvit_kernels.so"
