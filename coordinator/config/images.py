"""The table [images]."""

from typing import Annotated

from msgspec import Meta, Struct

from fedvit.errors import ConfigError


class ImageConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Image augmentation on devices: the table [images]."""

    crop_padding: Annotated[
        int, Meta(ge=0, le=64, description="Random crop after reflecting this many pixels at each border.")
    ] = 0
    flip: Annotated[bool, Meta(description="Random left-right flip.")] = False
    brightness: Annotated[float, Meta(ge=0, lt=1, description="Random brightness factor in [1 - this, 1 + this].")] = (
        0.0
    )
    views: Annotated[
        int, Meta(ge=0, le=64, description="Fixed augmentations of each image, whose features are kept; 0: new ones.")
    ] = 0

    def __post_init__(self) -> None:
        if self.views and not (self.crop_padding or self.flip or self.brightness):
            raise ConfigError("FV1004", f"views = {self.views}: images are not augmented: leave it out, or set a key")
