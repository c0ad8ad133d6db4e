"""Residual networks with group norms, on images that are one patch each.

A mean over a batch has no meaning for a server that averages models: devices have other classes, and a last batch may
hold one image. So norms are over groups of channels of an image. Letters in names: B batch, C channels, S side of the
image, H and W rows and columns inside the model, D width, the channels of the last block.
"""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedvit.model_options import RESNET_WIDTH, ResnetOptions, SmallResnetOptions
from fedvit.models.pixels import PixelModel
from fedvit.models.vit import ModelPart

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
"""Blocks of each stage; He et al., table 1."""
BOTTLENECKS = ("resnet50", "resnet101")
EXPANSION = 4
"""Ratio of a bottleneck's outer to its inner width."""

Block = Literal["basic", "bottleneck"]
Stem = Literal["7x7", "3x3"]


class GroupNorm(nn.Module):
    """Over all pixels of a group of an image's channels, with a scale and a shift for each channel.

    Source: Wu and He, "Group Normalization", arXiv:1803.08494. Computed as a layer norm whose rows are the groups.
    """

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        groups_BGN = x_BCHW.reshape(x_BCHW.shape[0], self.groups, -1)
        normal_BCHW = nn.functional.layer_norm(groups_BGN, groups_BGN.shape[2:]).reshape(x_BCHW.shape)
        return normal_BCHW * self.weight.reshape(-1, 1, 1) + self.bias.reshape(-1, 1, 1)


class ResidualBlock(nn.Module):
    """Convolutions with norms, beside a shortcut: two of 3 x 3 ("basic"), or 1 x 1, 3 x 3 and 1 x 1 ("bottleneck").

    Differs from He et al.: the stride of a bottleneck is in its 3 x 3 convolution, as in all later implementations, and
    the scale of the last norm begins at zero (Goyal et al., arXiv:1706.02677), so that a block begins as its shortcut.
    """

    def __init__(self, entering: int, width: int, stride: int, block: Block, groups: int) -> None:
        super().__init__()
        self.stride = stride
        leaving = width if block == "basic" else EXPANSION * width
        if block == "basic":
            self.conv1 = _convolution(entering, width, 3, stride)
            self.conv2 = _convolution(width, width, 3)
        else:
            self.conv1 = _convolution(entering, width, 1)
            self.conv2 = _convolution(width, width, 3, stride)
        self.norm1, self.norm2 = GroupNorm(width, groups), GroupNorm(width, groups)
        self.conv3 = _convolution(width, leaving, 1) if block == "bottleneck" else None
        self.norm3 = GroupNorm(leaving, groups) if block == "bottleneck" else None
        self.shortcut = self.shortcut_norm = None
        if stride > 1 or entering != leaving:
            self.shortcut = _convolution(entering, leaving, 1, stride)
            self.shortcut_norm = GroupNorm(leaving, groups)
        nn.init.zeros_((self.norm3 or self.norm2).weight)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        made_BCHW = self.norm2(self.conv2(self.norm1(self.conv1(x_BCHW)).relu()))
        if self.conv3 is not None and self.norm3 is not None:
            made_BCHW = self.norm3(self.conv3(made_BCHW.relu()))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x_BCHW = self.shortcut_norm(self.shortcut(x_BCHW))
        return cast(Tensor, (made_BCHW + x_BCHW).relu())


class _Layers(nn.Module):
    """The tensors, named as a Transformer's where they do the same."""

    def __init__(
        self, classes: int, depths: tuple[int, ...], width: int, block: Block, stem: Stem, groups: int
    ) -> None:
        super().__init__()
        self.num_classes = classes
        self.num_prefix_tokens = 0
        self.stem = _convolution(3, width, 7, 2) if stem == "7x7" else _convolution(3, width, 3)
        self.norm_pre = GroupNorm(width, groups)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "7x7" else nn.Identity()
        self.blocks = nn.Sequential()
        entering = width
        for stage, depth in enumerate(depths):
            inner = width << stage
            for place in range(depth):
                stride = 2 if stage and not place else 1
                self.blocks.append(ResidualBlock(entering, inner, stride, block, groups))
                entering = inner if block == "basic" else EXPANSION * inner
        self.embed_dim = entering
        self.head = nn.Linear(entering, classes)


class ResNet(PixelModel):
    """A residual network; its tokens are all pixels' channels."""

    kind = "a ResNet"
    has = frozenset[ModelPart]({"norms"})

    def enter(self, images_B3SS: Tensor) -> Tensor:
        layers = self._layers()
        return cast(Tensor, layers.pool(layers.norm_pre(layers.stem(images_B3SS)).relu()))

    def activation_bytes(self, tokens: int) -> int:
        """Memory for one image: every convolution's result, plain, normalised and rectified."""
        layers, sides = self._layers(), self._sides()
        shrunk = 4 if isinstance(layers.pool, nn.MaxPool2d) else 1  # pixels of the stem for one of the first block
        values = layers.stem.out_channels * shrunk * sides[0] ** 2
        for block, side in zip(layers.blocks, sides, strict=True):
            values += sum(one.out_channels for one in block.children() if isinstance(one, nn.Conv2d)) * side**2
        return 4 * 3 * values

    def product_rows(self, tokens: int) -> int:
        """Pixels of the first block: onnxruntime convolves image by image, so that more of them are no faster."""
        return self._sides()[0] ** 2

    def _sides(self) -> list[int]:
        """Rows and columns of what leaves each block."""
        layers, sides = self._layers(), []
        side = -(-self.image_size // 4) if isinstance(layers.pool, nn.MaxPool2d) else self.image_size
        for block in layers.blocks:
            side = -(-side // cast(ResidualBlock, block).stride)
            sides.append(side)
        return sides

    def _layers(self) -> _Layers:
        return cast(_Layers, cast(nn.Module, self.vit))


def make_small_resnet(name: str, classes: int, options: SmallResnetOptions) -> ResNet:
    """Make a small network; each stage has half the rows and columns of that before it, and twice the channels.

    Source: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, section 4.2, with group norms.
    """
    stages = (options.depth,) * options.stages
    layers = _Layers(classes, stages, options.width, cast(Block, options.block), "3x3", options.groups)
    return ResNet(name, options.image_size, layers)


def make_resnet(name: str, classes: int, options: ResnetOptions) -> ResNet:
    """Make one of `DEPTHS`. With stem "3x3", for images of 32 pixels, all pixels are kept; with "7x7" a sixteenth.

    Source: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1, with group norms.
    """
    block: Block = "bottleneck" if name in BOTTLENECKS else "basic"
    layers = _Layers(classes, DEPTHS[name], RESNET_WIDTH, block, cast(Stem, options.stem), options.groups)
    return ResNet(name, options.image_size, layers)


def _convolution(entering: int, leaving: int, side: int, stride: int = 1) -> nn.Conv2d:
    """Without a bias, as a norm follows."""
    made = nn.Conv2d(entering, leaving, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made
