"""Builds the wheel with the library in it: for this processor, or for that of the compiler in CXX."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from compile import LIBRARY, compile_library, is_aarch64


class WithLibrary(build_py):
    def run(self) -> None:
        super().run()
        compile_library(Path(self.build_lib, "fedvit_kernels", LIBRARY))


class OfOneProcessor(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    """Make one wheel for all versions of Python, as the library is not a Python module."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", "linux_aarch64" if is_aarch64() else platform


setup(cmdclass={"build_py": WithLibrary, "bdist_wheel": AnyPython}, distclass=OfOneProcessor)
