"""Builds the wheel with the library in it: for this processor, or for that of the compiler in CXX."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from compile import LIBRARY, compile_library, find_platform


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
        (library,) = Path(self.bdist_dir).rglob(LIBRARY)
        return "py3", "none", find_platform(library)


setup(cmdclass={"build_py": WithLibrary, "bdist_wheel": AnyPython}, distclass=OfOneProcessor)
