"""A package of somebody else, as an installation leaves it: modules, and the metadata beside them."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.waiting import WAIT_S

NORMS = """
from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import NORMS
from fedvit.program import Role


@dataclass(frozen=True, kw_only=True)
class Norms(FedAvg):
    \"\"\"Layer norms are shared.\"\"\"

    source: ClassVar[str] = "made for these tests"

    strength: float = 1.0  # of nothing

    def rules(self, vit):
        return GroupRule("norms", Role.SHARED, NORMS), GroupRule("rest", Role.FROZEN, ("*",))
"""
"""Source of a module with one method."""

STILL = f"""{NORMS}

from fedvit.methods.base import StepResult


@dataclass(frozen=True, kw_only=True)
class Still(Norms):
    \"\"\"A step of its own, which moves nothing.\"\"\"

    def local_step(self, calculus, vit, phase, updated, fixed, inputs):
        loss, collected = self.objective(vit, phase, {{**fixed, **updated}}, inputs)
        return StepResult(loss, dict(updated), collected)
"""
"""Source of a module with a method whose graphs would not be its step."""


def install(folder: Path, package: str, methods: Mapping[str, str], **modules: str) -> None:
    """Put a package into `folder`: `methods` are its entry points, `modules` their sources by name."""
    install_plugins(folder, package, {"fedvit.methods": methods}, **modules)


def install_plugins(folder: Path, package: str, groups: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """Put a package into `folder`: `groups` are its entry points by group, `modules` their sources by name."""
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [
        line for group, entries in groups.items() for line in (f"[{group}]", *map(" = ".join, entries.items()), "")
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


def build_and_install(source: Path, folder: Path, scratch: Path) -> None:
    """Build the package of a folder, and install it alone into another one, without the network."""
    shutil.copytree(source, scratch, ignore=shutil.ignore_patterns("__pycache__"))  # a build writes beside the source
    subprocess.run(
        [
            Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--offline", "--no-deps",
            "--no-build-isolation", "--python", sys.executable, "--target", folder, scratch,
        ],
        check=True, timeout=WAIT_S,
    )  # fmt: skip
