"""A plain convolutional network: two convolutions with pools, and three linear layers of which the last is the head.

Letters in names: B batch, C channels, S side of the image, H and W rows and columns inside the model, D width.
"""

from typing import cast

from torch import Tensor, nn

from fedvit.model_options import CnnOptions
from fedvit.models.pixels import PixelModel
from fedvit.models.resnet import GroupNorm
from fedvit.models.vit import ModelPart

KERNEL = 5
HIDDEN = (120, 84)
"""Units of the two hidden linear layers."""


class _Convolution(nn.Module):
    def __init__(self, entering: int, leaving: int, groups: int | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(entering, leaving, KERNEL)
        self.norm1 = GroupNorm(leaving, groups) if groups else nn.Identity()
        self.pool = nn.MaxPool2d(2, 2)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return cast(Tensor, self.pool(self.norm1(self.conv(x_BCHW)).relu()))


class _Hidden(nn.Module):
    def __init__(self, entering: int, leaving: int, has_norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(entering, leaving)
        self.norm1 = nn.LayerNorm(leaving) if has_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm1(self.linear(x.flatten(1))).relu())


class _Layers(nn.Module):
    """The tensors, named as a Transformer's where they do the same."""

    def __init__(self, classes: int, options: CnnOptions) -> None:
        super().__init__()
        self.num_classes = classes
        self.num_prefix_tokens = 0
        self.embed_dim = HIDDEN[-1]
        width, groups = options.width, options.groups
        pixels = 2 * width * sides(options.image_size)[1] ** 2
        self.stem = _Convolution(3, width, groups)
        self.blocks = nn.Sequential(
            _Convolution(width, 2 * width, groups),
            _Hidden(pixels, HIDDEN[0], groups is not None),
            _Hidden(HIDDEN[0], HIDDEN[1], groups is not None),
        )
        self.head = nn.Linear(HIDDEN[1], classes)


class Cnn(PixelModel):
    """Its head reads the last hidden layer."""

    def enter(self, images_B3SS: Tensor) -> Tensor:
        return cast(Tensor, cast(nn.Module, cast(nn.Module, self.vit).stem)(images_B3SS))

    def features(self, x_BD: Tensor, normed: bool = True) -> Tensor:
        """(B, D)"""
        return x_BD

    def activation_bytes(self, tokens: int) -> int:
        """Memory for one image: results of all layers, plain, normalised and rectified, and of pools."""
        width = cast(_Convolution, self.vit.blocks[0]).conv.in_channels
        pooled = [side**2 for side in sides(self.image_size)]
        return 4 * ((3 * 4 + 1) * (width * pooled[0] + 2 * width * pooled[1]) + 3 * sum(HIDDEN))

    def product_rows(self, tokens: int) -> int:
        """Pixels of the first convolution: onnxruntime convolves image by image, so that more are no faster."""
        return (self.image_size - KERNEL + 1) ** 2


class NormedCnn(Cnn):
    has = frozenset[ModelPart]({"norms"})


def sides(image_size: int) -> tuple[int, int]:
    """Rows and columns behind both pools.

    >>> sides(32)
    (14, 5)
    """
    first = (image_size - KERNEL + 1) // 2
    return first, (first - KERNEL + 1) // 2


def make_cnn(name: str, classes: int, options: CnnOptions) -> Cnn:
    """Make the network of pFedHN's and FedTP's comparisons with CNNs, with torch's first values.

    Source: Shamsian et al., arXiv:2103.04628, after LeNet-5; FedTP, arXiv:2211.01572, Table 3. FedTP's FedBN has batch
    norms; `groups` has group norms in their places, for the reason that residual networks have them.
    """
    kind = Cnn if options.groups is None else NormedCnn
    return kind(name, options.image_size, _Layers(classes, options))
