"""The tensors of the model, and what they compute."""

from torch import Tensor, nn

from fedvit.models.pixels import PixelModel

SIDE = 3  # of the convolutions


class Block(nn.Module):
    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(entering, leaving, SIDE, padding=SIDE // 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(x).relu()
        return result


class Layers(nn.Module):
    """Names are those of a Transformer where tensors do the same, so that methods find them."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embed_dim, self.num_classes, self.num_prefix_tokens = 2 * width, classes, 0
        self.blocks = nn.Sequential(Block(3, width), Block(width, 2 * width))
        self.head = nn.Linear(2 * width, classes)


class SmallCnn(PixelModel):
    def enter(self, images: Tensor) -> Tensor:
        return images

    def activation_bytes(self, tokens: int) -> int:
        """Both blocks' results in float32, before and after the rectifier."""
        return 4 * 2 * (3 * self.width // 2) * self.image_size**2

    def product_rows(self, tokens: int) -> int:
        return self.image_size**2
