"""The cost of training with kept features: those of layers that a phase does not train."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedvit.frozen_part import FrozenPart, find_frozen_part
from fedvit.onnx_model import read_model, write_model
from fedvit.program import Program, Train
from profiles.cost import GraphCost


class PricedCut(NamedTuple):
    """A phase's graph in two parts, with their costs."""

    part: FrozenPart
    features: GraphCost
    rest: GraphCost

    def has_room(self, images: int, feature_bytes: int) -> bool:
        """Return whether all features of so many images fit into these bytes."""
        return images * self.part.views * 4 * self.part.numbers <= feature_bytes

    def count_feature_runs(self, runs: float, passes: float, *, is_first_round: bool) -> float:
        """Count the runs of the first part among `runs` of the second one, which see each image `passes` times.

        In later rounds the features of frozen layers are all there.
        """
        if not is_first_round and not self.part.changing:
            return 0.0
        return runs * min(1.0, self.part.views / passes)


def price_cuts(
    program: Program, contents: Mapping[str, bytes], price: Callable[[bytes], GraphCost]
) -> dict[str, PricedCut]:
    """Price both parts of each graph of the training that can be cut, by the graph's name."""
    cuts = {}
    for phase in program.train:
        if phase.graph not in cuts and (cut := _price_cut(program, phase, contents[phase.graph], price)):
            cuts[phase.graph] = cut
    return cuts


def _price_cut(program: Program, phase: Train, content: bytes, price: Callable[[bytes], GraphCost]) -> PricedCut | None:
    part = find_frozen_part(program, phase, read_model(content))
    if part is None:
        return None
    features, rest = (price(b"".join(map(bytes, write_model(model, {}, {})))) for model in part.cut[:2])
    return PricedCut(part, features, rest)
