"""A package of somebody else, as an installation leaves it: modules, and the metadata beside them."""

from collections.abc import Mapping
from pathlib import Path

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
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    declared = "".join(f"{name} = {place}\n" for name, place in methods.items())
    (metadata / "entry_points.txt").write_text(f"[fedvit.methods]\n{declared}")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
