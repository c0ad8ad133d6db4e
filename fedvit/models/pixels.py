"""Models that read a whole image, such as convolutional networks, in the form of a `PatchViT`.

Letters in names: B batch, N = 1 patch of P values, C channels, S side of the image, H and W rows and columns inside the
model, D width.
"""

from abc import abstractmethod
from typing import cast

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedvit.models.recompute import SampleSeeds
from fedvit.models.vit import ModelPart, PatchViT


class PixelModel(PatchViT):
    """The part of a `PatchViT` that methods use. Tokens are all pixels' channels; the head reads their mean.

    `layers` has the tensors under the names of a Transformer where they do the same: `blocks` (an `nn.Sequential`) and
    `head`; and the numbers `embed_dim` (channels that leave the last block), `num_classes`, `num_prefix_tokens` (0).
    """

    kind = "a convolutional network"
    has = frozenset[ModelPart]()

    def __init__(self, name: str, image_size: int, layers: nn.Module) -> None:
        nn.Module.__init__(self)
        self.name = name
        self._image_size = image_size
        # methods read tensors, blocks and head, and those that a Transformer has
        self.vit = cast(VisionTransformer, layers.eval())
        self.seeds = SampleSeeds()
        self.recompute = False

    @abstractmethod
    def enter(self, images_B3SS: Tensor) -> Tensor:
        """(B, C, H, W) what enters the first block."""

    @abstractmethod
    def activation_bytes(self, tokens: int) -> int:
        """Memory for one image's backward pass."""

    @abstractmethod
    def product_rows(self, tokens: int) -> int:
        """Pixels of the first block: onnxruntime convolves image by image, so that more of them are no faster."""

    @property
    def image_size(self) -> int:
        return self._image_size

    @property
    def patch_size(self) -> int:
        """The whole image: a device then hands it over as colours, rows and columns."""
        return self._image_size

    @property
    def patches(self) -> int:
        return 1

    def embed(self, patches_BNP: Tensor, kept_BN: Tensor | None = None, seeds_B: Tensor | None = None) -> Tensor:
        """(B, C, H, W) what enters the first block; the others are None, as nothing is masked and nothing dropped."""
        return self.enter(patches_BNP.reshape(-1, 3, self.image_size, self.image_size))

    def run_to_class(self, x_BCHW: Tensor, first: int, last: int | None = None) -> Tensor:
        """(B, C, H, W): the head needs all pixels."""
        return self.run_blocks(x_BCHW, first, self.depth if last is None else last)

    def features(self, x_BCHW: Tensor, normed: bool = True) -> Tensor:
        """(B, D)"""
        return x_BCHW.mean(dim=(2, 3))
