"""Find the nodes of a graph that compute what a pattern describes."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedvit.onnx_model import Model, Node, Numbers, read_numbers

REPEATED = "ConstantOfShape"
"""The operator that makes a tensor of one number."""


class GraphIndex:
    """The nodes of a model, their places, and the makers and readers of each tensor."""

    def __init__(self, model: Model) -> None:
        self.nodes = model.nodes
        self.outputs = set(model.outputs)
        self.places = {node: place for place, node in enumerate(model.nodes)}
        self.makers: dict[str, Node] = {}
        self.readers: dict[str, list[Node]] = defaultdict(list)
        decoded = {name: read_numbers(tensor) for name, tensor in model.constants.items()}
        self.constants = {name: numbers for name, numbers in decoded.items() if numbers is not None}
        self._model = model
        for node in model.nodes:
            self.makers |= dict.fromkeys(node.outputs, node)
            if node.operator == REPEATED:
                self.constants |= dict.fromkeys(node.outputs, node.attributes.get("value", (0.0,)))
            for name in node.inputs:
                self.readers[name].append(node)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor that is not a constant; None if the graph does not say it."""
        return None if name in self._model.constants else self._model.find_shape(name)


@dataclass(frozen=True)
class PatternStep:
    """One node of a pattern."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Numbers]


def parse_pattern(text: str) -> tuple[PatternStep, ...]:
    """Parse lines `results = Operator operands [name:1,2]`.

    `#name` is a constant. The matcher only finds it; `Match.has` compares its numbers.
    """
    steps = []
    for line in text.strip().splitlines():
        results, _, call = line.partition("=")
        operator, *operands = call.split()
        texts = dict(operand.split(":") for operand in operands if ":" in operand)
        attributes = {name: tuple(float(number) for number in numbers.split(",")) for name, numbers in texts.items()}
        steps.append(
            PatternStep(operator, tuple(o for o in operands if ":" not in o), tuple(results.split()), attributes)
        )
    return tuple(steps)


@dataclass
class Match:
    """The graph's names for the names of a pattern, and the nodes that compute it."""

    names: dict[str, str]
    nodes: set[Node]

    def extend(self, graph: GraphIndex, pattern: Sequence[PatternStep], last: Node) -> "Match | None":
        """Match a further pattern whose last step is `last`. Return both matches as one, or None if it differs."""
        makers = {result: step for step in pattern for result in step.outputs}
        match = Match(dict(self.names), set(self.nodes))
        waiting = [(pattern[-1], last)]
        visited: set[int] = set()
        while waiting:
            step, node = waiting.pop()
            if id(step) in visited:
                continue
            visited.add(id(step))
            if not match._add(graph, step, node):
                return None
            for name, own_name in zip(step.inputs, node.inputs, strict=True):
                if name in makers:
                    if own_name not in graph.makers:
                        return None
                    waiting.append((makers[name], graph.makers[own_name]))
        return match

    def _add(self, graph: GraphIndex, step: PatternStep, node: Node) -> bool:
        """Add a node that computes the step. Return False if it computes something else."""
        sizes_differ = len(node.inputs) != len(step.inputs) or len(node.outputs) != len(step.outputs)
        if node.operator != step.operator or sizes_differ:
            return False
        if any(node.attributes.get(name) != numbers for name, numbers in step.attributes.items()):
            return False
        for name, own_name in zip((*step.inputs, *step.outputs), (*node.inputs, *node.outputs), strict=True):
            before = self.names.setdefault(name, own_name)
            if name.startswith("#"):  # equal constants may have several names
                if own_name not in graph.constants or graph.constants[before] != graph.constants[own_name]:
                    return False
            elif before != own_name:
                return False
        self.nodes.add(node)
        return True

    def is_closed(self, graph: GraphIndex, *results: str) -> bool:
        """Return whether other nodes and the graph's outputs read only `results` of the pattern."""
        inside = {name for node in self.nodes for name in node.outputs} - {self.names[name] for name in results}
        return not inside & graph.outputs and all(self.nodes.issuperset(graph.readers[name]) for name in inside)

    def has(self, graph: GraphIndex, **numbers: Sequence[float]) -> bool:
        """Return whether constants of the pattern have these numbers; names that it lacks are ignored."""
        return all(
            _are_close(graph.constants[self.names[f"#{name}"]], expected)
            for name, expected in numbers.items()
            if f"#{name}" in self.names
        )


def _are_close(numbers: Numbers, expected: Sequence[float]) -> bool:
    return len(numbers) == len(expected) and all(
        math.isclose(one, other, rel_tol=1e-6) for one, other in zip(numbers, expected, strict=True)
    )
