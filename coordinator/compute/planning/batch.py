"""Conversion of a device's images, or its text, into a method's inputs, and how many samples it processes at a time."""

import msgspec

from coordinator.config import ImageConfig
from fedvit.errors import ConfigError
from fedvit.methods.base import Method
from fedvit.models.text import TextModel
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Text

UNCHANGED = ImageConfig()
"""Images without augmentation."""
FULL_SPEED_ROWS = 192
"""With this number of rows (of a Transformer samples x tokens) products reach nearly a processor's full speed."""
ACTIVATION_BYTES = 320 << 20
"""Memory for activations by default: more samples at a time are no faster."""


def method_batch(method: Method, vit: PatchViT, images: ImageConfig = UNCHANGED) -> Batch:
    """The batch of a method on a model; all of it at a time where the method does not set `micro_batch`.

    Raises ConfigError for augmentation of images on a model of text.
    """
    if isinstance(vit, TextModel):
        if images != UNCHANGED:
            raise ConfigError(
                "FV1110", f"[images] changes pictures, and model {vit.name!r} reads text: leave the table out"
            )
        text = Text(context=vit.context)
        return Batch(batch_size=method.samples_per_step, micro_batch=method.micro_batch, text=text)
    mean, std = vit.mean_std
    return Batch(
        image_size=vit.image_size,
        patch_size=vit.patch_size,
        batch_size=method.samples_per_step,
        mean=mean,
        std=std,
        mask_ratio=method.mask,
        sample_seeds=method.dropout > 0,
        crop_padding=images.crop_padding,
        flip=images.flip,
        brightness=images.brightness,
        views=images.views or msgspec.UNSET,
        micro_batch=method.micro_batch,
        labels=vit.label_form,
    )


def choose_batch(method: Method, vit: PatchViT, images: ImageConfig) -> Batch:
    """The same with as many images at a time as suit the model, where the method does not set `micro_batch`."""
    batch = method_batch(method, vit, images)
    run_size = method.micro_batch or suitable_run_size(vit, batch)
    return msgspec.structs.replace(batch, micro_batch=min(run_size, batch.batch_size))


def suitable_run_size(vit: PatchViT, batch: Batch) -> int:
    """Samples that a device processes at a time: as fit into ACTIVATION_BYTES, but enough for full speed.

    The batch is divided into equal runs if possible, as the padding of a last run is wasted work.
    """
    tokens = batch.tokens + vit.prefix_tokens
    sample_bytes = vit.activation_bytes(tokens)
    full_speed = -(-FULL_SPEED_ROWS // vit.product_rows(tokens))
    wanted = min(batch.batch_size, max(full_speed, ACTIVATION_BYTES // sample_bytes))
    equal = max(size for size in range(1, wanted + 1) if batch.batch_size % size == 0)
    return equal if 2 * equal > wanted else -(-batch.batch_size // -(-batch.batch_size // wanted))
