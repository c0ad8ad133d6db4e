"""The machine of a measurement: processor, versions, and the disk space of a set of packages."""

import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

import psutil
from msgspec import Struct
from packaging.requirements import Requirement

from profiles.probes.host import usable_cores

DEVICE_PACKAGES = ("fedvit",)
TORCH_PACKAGES = ("torch", "torchvision", "timm")
VERSIONS_OF = ("onnxruntime", "numpy", "torch", "timm")


class Machine(Struct, frozen=True, kw_only=True):
    cpu: str
    instructions: tuple[str, ...]  # of those that products of matrices use, as /proc/cpuinfo names them
    cores: int  # that this process may use
    ram_bytes: int
    system: str
    python: str
    versions: dict[str, str]


def describe_machine() -> Machine:
    return Machine(
        cpu=_read_cpu_model(),
        instructions=_list_instructions(),
        cores=usable_cores(),
        ram_bytes=psutil.virtual_memory().total,
        system=platform.platform(),
        python=platform.python_version(),
        versions={name: version(name) for name in VERSIONS_OF},
    )


def _read_cpu_model() -> str:
    """Read the name from /proc/cpuinfo; without one, as on ARM, return the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


_PRODUCT_INSTRUCTIONS = {
    "avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve",
}  # fmt: skip


def _list_instructions() -> tuple[str, ...]:
    """List instructions for products: virtual machines hide the processor's name more often."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(flag for flag in flags if flag in _PRODUCT_INSTRUCTIONS)


def count_installed_bytes(packages: Iterable[str]) -> int:
    """Sum the disk space of packages and their requirements, without compiled bytecode."""
    return sum(_count_bytes(package) for package in list_requirements(packages))


def list_requirements(packages: Iterable[str]) -> list[Distribution]:
    """List the installed distributions of these names and, in turn, of their requirements for this machine."""
    todo = [Requirement(name) for name in packages]
    seen: set[tuple[str, str]] = set()
    found: dict[str, Distribution] = {}
    while todo:
        wanted = todo.pop()
        try:
            package = distribution(wanted.name)
        except PackageNotFoundError:  # an alternative, or a package for another machine
            continue
        found[package.name.lower()] = package
        for extra in ("", *wanted.extras):
            if (key := (package.name.lower(), extra)) not in seen:
                seen.add(key)
                todo += _iterate_requirements(package, extra)
    return [found[name] for name in sorted(found)]


def _iterate_requirements(package: Distribution, extra: str) -> Iterator[Requirement]:
    for text in package.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _count_bytes(package: Distribution) -> int:
    paths = (Path(str(file.locate())) for file in package.files or () if file.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file())
