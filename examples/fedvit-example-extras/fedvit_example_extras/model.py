"""A model: a convolutional network with two blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedvit.model_options import PackagedModel


@dataclass(frozen=True, kw_only=True)
class SmallCnn(PackagedModel):
    image_size: int = 32
    width: int = 32  # channels of the first block; the second has twice as many

    contract_options: ClassVar[Mapping[str, Any]] = {"image_size": 12, "width": 8}

    def __post_init__(self) -> None:
        self.check_wholes("image_size", "width")

    def build(self, name: str, classes: int) -> Any:
        from fedvit_example_extras.network import Layers, SmallCnn  # torch: a wrong option need not wait for it

        return SmallCnn(name, self.image_size, Layers(classes, self.width))
