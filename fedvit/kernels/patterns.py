"""Finds the nodes that compute what a pattern describes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedvit.kernels.nodes import Node, Nodes, Numbers


@dataclass(frozen=True)
class Step:
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Numbers]


def pattern(text: str) -> tuple[Step, ...]:
    """Lines `results = Kind operands [name:1,2]`. `#name` is a constant, which is looked at afterwards."""
    steps = []
    for line in text.strip().splitlines():
        results, _, call = line.partition("=")
        kind, *operands = call.split()
        given = dict(operand.split(":") for operand in operands if ":" in operand)
        attributes = {name: tuple(float(number) for number in numbers.split(",")) for name, numbers in given.items()}
        steps.append(Step(kind, tuple(o for o in operands if ":" not in o), tuple(results.split()), attributes))
    return tuple(steps)


@dataclass
class Match:
    """Which tensors and nodes stand for those of a pattern."""

    names: dict[str, str]
    nodes: set[Node]

    def extended(self, nodes: Nodes, pattern: Sequence[Step], last: Node) -> "Match | None":
        """This match and that of a pattern whose last step is `last`; None if it is another computation."""
        made_by = {result: step for step in pattern for result in step.outputs}
        match = Match(dict(self.names), set(self.nodes))
        waiting = [(pattern[-1], last)]
        seen: set[int] = set()
        while waiting:
            step, node = waiting.pop()
            if id(step) in seen:
                continue
            seen.add(id(step))
            sizes_differ = len(node.inputs) != len(step.inputs) or len(node.outputs) != len(step.outputs)
            if node.kind != step.kind or sizes_differ:
                return None
            if any(node.attributes.get(name) != numbers for name, numbers in step.attributes.items()):
                return None
            called = (*step.inputs, *step.outputs)
            for name, here in zip(called, (*node.inputs, *node.outputs), strict=True):
                if name.startswith("#"):
                    if here not in nodes.constants:
                        return None
                    # equal constants may have several names
                    if nodes.constants[match.names.setdefault(name, here)] != nodes.constants[here]:
                        return None
                elif match.names.setdefault(name, here) != here:
                    return None
            match.nodes.add(node)
            for name, here in zip(step.inputs, node.inputs, strict=True):
                if name in made_by:
                    if here not in nodes.makers:
                        return None
                    waiting.append((made_by[name], nodes.makers[here]))
        return match

    def closed(self, nodes: Nodes, *results: str) -> bool:
        """Whether nothing outside reads what is inside, but `results` of the pattern."""
        shown = {self.names[name] for name in results}
        inside = {name for node in self.nodes for name in node.outputs} - shown
        return not inside & nodes.kept and all(self.nodes.issuperset(nodes.readers[name]) for name in inside)

    def has(self, nodes: Nodes, **numbers: Sequence[float]) -> bool:
        """Whether constants of the pattern have these numbers, as far as it has them."""
        return all(
            self._near(nodes.constants[self.names[f"#{name}"]], wanted)
            for name, wanted in numbers.items()
            if f"#{name}" in self.names
        )

    def _near(self, found: Numbers, wanted: Sequence[float]) -> bool:
        return len(found) == len(wanted) and all(
            math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, wanted, strict=True)
        )
