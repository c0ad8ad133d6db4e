"""From image files to graph inputs: decode, augment, normalise, unfold, select patches.

This module uses numpy and pillow only, as it runs on devices. Shape letters: B samples, S image side,
C = 3 colours, P patch side, N patches, K kept patches, V = 3 P P values of a patch.
"""

import contextlib
import os
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL import __version__ as PILLOW
from PIL.JpegImagePlugin import JpegImageFile

from fedvit.errors import DataError
from fedvit.program import Batch

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

DECODING = f"1, pillow {PILLOW}"
"""The way from a file to numbers, part of the origin of kept features. Raise the number after a change here."""
DAMAGED = "damaged or cut off"
"""A reason why an image is not used; a colon and details follow."""
DECODED_BYTES = 256 << 20
"""Most memory that one image may take while it is decoded: 64 megapixels, or a baseline JPEG of any size."""
_BYTES_PER_PIXEL = 4  # of pillow, also for three colours
_LEAST_DECODED_BYTES = 16 << 20
_COEFFICIENT_BYTES = 2  # of libjpeg, one for each value of each component
_START_OF_SCAN = 0xDA

# pillow's own limit counts pixels before a JPEG is scaled down; here images are refused by the memory that they take
Image.MAX_IMAGE_PIXELS = None

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".pgm", ".ppm"})

# pillow supports more formats, some of which start other programs (EPS: ghostscript); as pillow ignores a file's
# suffix, this list restricts it
_MASK_MODES = ("1", "L", "P")
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")


def is_image_name(name: str) -> bool:
    """Return whether a file name is that of an image; hidden files are not images.

    >>> [is_image_name(name) for name in ("a.JPG", "notes.txt", "._a.jpg")]
    [True, False, False]
    """
    return not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES


def limit_decoded_bytes(memory_budget_bytes: int | None) -> int:
    """Memory that one image may take while it is decoded on a device with this budget.

    >>> limit_decoded_bytes(None), limit_decoded_bytes(400_000_000)
    (268435456, 100000000)
    """
    if memory_budget_bytes is None:
        return DECODED_BYTES
    return min(DECODED_BYTES, max(memory_budget_bytes // 4, _LEAST_DECODED_BYTES))


def header_problem(path: Path, file: BinaryIO | None = None, *, decoded_bytes: int = DECODED_BYTES) -> str | None:
    """Return the reason why the image cannot be opened, or None; read the header only.

    `file` holds the bytes if `path` is only a name (a member of an archive). An image that would take more than
    `decoded_bytes` of memory is refused.
    """
    try:
        with Image.open(file or path, formats=_FORMATS) as image:
            return _draft(image, 1, decoded_bytes)
    except Exception as error:  # noqa: BLE001 - pillow raises nearly anything on damaged files
        return _reason(error)


def read_image(path: Path, size: int, file: BinaryIO | None = None, *, decoded_bytes: int = DECODED_BYTES) -> Pixels:
    """Decode one image as the models see it: upright, RGB, (size, size, 3) uint8, resized bilinearly if needed.

    Width and height are scaled independently: nothing is cut off, other shapes are distorted to a square.
    Of an animation the first frame is used; transparency is dropped. `file` and `decoded_bytes` as in
    `header_problem`. Raises DataError that names `path` and the reason when it cannot be decoded.
    """
    square = _decode(path, file, size, decoded_bytes)
    if square.size != (size, size):
        square = square.resize((size, size), Image.Resampling.BILINEAR)
    return np.array(square, dtype=np.uint8)


def read_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image file as it is shown upright, for a mask of its size, a byte a pixel.

    Raises DataError that names `path`, also for a mask that would take more than DECODED_BYTES.
    """
    try:
        with Image.open(path, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > DECODED_BYTES:
                raise DataError("FV1403", f"too large for a mask: {width} x {height} pixels")
            lies = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
    except Exception as error:
        raise DataError("FV1403", f"cannot read image {path}: {_reason(error)}") from error
    return (height, width) if lies else (width, height)


def read_mask(path: Path, size: int, patch_size: int, classes: int) -> Indices:
    """Return the class of each patch of a mask, (patches,) by rows: the one that most of its pixels have.

    The mask is resized to `size` without new values. Pixels with values from `classes` on have no class, a patch of
    such pixels is -1. Raises DataError, naming the file, for one that is no picture of one value a pixel.
    """
    try:
        with Image.open(path, formats=_FORMATS) as image:
            if image.mode not in _MASK_MODES:
                raise DataError("FV1403", f"mode {image.mode}; a mask has one value a pixel, mode L or P")
            if problem := _draft(image, 1, DECODED_BYTES):
                raise DataError("FV1403", problem)
            values = np.asarray(image.resize((size, size), Image.Resampling.NEAREST))
    except Exception as error:
        raise DataError("FV1403", f"cannot read mask {path}: {_reason(error)}") from error
    grid = size // patch_size
    # one value for all pixels without a class; two bytes a pixel, as a side may have 4096
    known = np.minimum(values[: grid * patch_size, : grid * patch_size], classes).astype(np.int16)
    rows = known.reshape(grid, patch_size, grid, patch_size).transpose(0, 2, 1, 3)
    return np.concatenate([_find_most(row.reshape(grid, -1), classes) for row in rows])


def _find_most(patches: Indices, classes: int) -> Indices:
    """Return the most frequent value below `classes` in each row, (n,); -1 where there is none."""
    first = (classes + 1) * np.arange(len(patches))[:, None]
    counts = np.bincount((first + patches).ravel(), minlength=(classes + 1) * len(patches))
    counts = counts.reshape(len(patches), classes + 1)[:, :classes]
    return np.where(counts.any(axis=1), counts.argmax(axis=1), -1)


def read_thumbnail(path: Path, width: int, height: int, *, decoded_bytes: int = DECODED_BYTES) -> Pixels:
    """Decode one image for people: upright, RGB, in its own proportions, as large as fits into `width` x `height`.

    Raises DataError as `read_image`.
    """
    image = _decode(path, None, max(width, height), decoded_bytes)
    scale = min(width / image.width, height / image.height)
    size = [max(1, round(side * scale)) for side in image.size]  # of a very long image a line is left
    return np.array(image.resize((size[0], size[1])), dtype=np.uint8)


def _decode(path: Path, file: BinaryIO | None, least: int, decoded_bytes: int) -> Image.Image:
    """The image upright and in RGB, at least `least` pixels wide and high if it has so many."""
    try:
        with Image.open(file or path, formats=_FORMATS) as image:
            if problem := _draft(image, least, decoded_bytes):
                raise DataError("FV1403", problem)
            image.load()
            with contextlib.suppress(Exception):  # a damaged EXIF block says nothing about the pixels
                ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)
    except Exception as error:
        # broad, because pillow's decoders raise nearly anything on damaged files (struct.error, SyntaxError, ...)
        raise DataError("FV1403", f"cannot read image {path}: {_reason(error)}") from error


class Variation(NamedTuple):
    """The augmentation of each of B samples; None: not augmented in this way."""

    top: Indices | None  # (B,) first row of the crop in the image with its reflected border
    left: Indices | None  # (B,) first column
    flipped: npt.NDArray[np.bool_] | None  # (B,) mirrored horizontally
    factors: Floats | None  # (B,) of brightness


def draw_variation(rows: Indices, batch: Batch, rng: np.random.Generator) -> Variation:
    """Draw the augmentation of `batch` for these of a device's images. Disabled kinds draw nothing from `rng`."""
    views = draw_views(len(rows), batch, rng)
    return _draw_new(len(rows), batch, rng) if views is None else find_views(rows, views, batch)


def draw_views(samples: int, batch: Batch, rng: np.random.Generator) -> Indices | None:
    """Draw which of its views each sample is seen in, (B,); None if images are augmented anew each time."""
    return rng.integers(batch.views, size=samples) if batch.is_augmented and batch.views else None


def find_views(rows: Indices, views: Indices, batch: Batch) -> Variation:
    """Return the augmentation of these views, (B,), of a device's images: the same in all rounds."""
    seeds = zip(rows.tolist(), views.tolist(), strict=True)
    each = [_draw_new(1, batch, np.random.default_rng(seed)) for seed in seeds]
    kinds = zip(*each, strict=True)
    return Variation(*(None if values[0] is None else np.concatenate(values) for values in kinds))


def _draw_new(samples: int, batch: Batch, rng: np.random.Generator) -> Variation:
    starts = 2 * batch.crop_padding + 1
    top = rng.integers(starts, size=samples) if batch.crop_padding else None
    left = rng.integers(starts, size=samples) if batch.crop_padding else None
    flipped = rng.random(samples) < 0.5 if batch.flip else None
    brightest = 1.0 + batch.brightness
    factors = rng.uniform(1.0 - batch.brightness, brightest, size=samples) if batch.brightness else None
    return Variation(top, left, flipped, None if factors is None else factors.astype(np.float32))


def augment(images_BSSC: Pixels, batch: Batch, variation: Variation) -> Pixels:
    """Augment each sample as `variation`, drawn for `batch`, says: crop, flip, brightness.

    Takes and returns (B, S, S, 3); the input is never changed, and returned itself without augmentation.
    """
    samples, side = images_BSSC.shape[:2]
    top, left, flipped, factors = variation
    if batch.crop_padding or batch.flip:
        # rows_BS[b, r] = which row of the original becomes row r; the same for columns: one indexing does both
        rows_BS = np.broadcast_to(np.arange(side), (samples, side))
        cols_BS = rows_BS
        if top is not None and left is not None:
            reflected = np.pad(np.arange(side), batch.crop_padding, mode="reflect")
            rows_BS = reflected[top[:, None] + np.arange(side)]
            cols_BS = reflected[left[:, None] + np.arange(side)]
        if flipped is not None:
            cols_BS = np.where(flipped[:, None], cols_BS[:, ::-1], cols_BS)
        images_BSSC = images_BSSC[np.arange(samples)[:, None, None], rows_BS[:, :, None], cols_BS[:, None, :]]
    if factors is not None:
        brighter = images_BSSC * factors[:, None, None, None]
        images_BSSC = np.rint(brighter.clip(0, 255, out=brighter), out=brighter).astype(np.uint8)
    return images_BSSC


def normalise(images_BSSC: Pixels, batch: Batch) -> Floats:
    """(value / 255 - mean) / std for each colour, float32; mean and std are on the 0..1 scale."""
    mean, std = np.asarray(batch.mean), np.asarray(batch.std)
    scaled = images_BSSC.astype(np.float32)
    scaled *= (1.0 / (255.0 * std)).astype(np.float32)
    scaled -= (mean / std).astype(np.float32)
    return scaled


def unfold(images_BSSC: Floats, patch_size: int) -> Floats:
    """Cut images into patches, so that the patch embedding is a linear layer: (B, S, S, 3) -> (B, N, V).

    `patches @ conv.weight.flatten(1).T + conv.bias` equals `Conv2d(3, D, P, stride=P)` on the NCHW image
    followed by `flatten(2).transpose(1, 2)`: patches are ordered by row, a patch's values by colour, row,
    column. Like the convolution it ignores pixels at the right and bottom that fill no patch.

    >>> image = np.arange(4 * 4, dtype=np.float32).reshape(1, 4, 4, 1).repeat(3, axis=3)
    >>> unfold(image, 2)[0, 1]
    array([2., 3., 6., 7., 2., 3., 6., 7., 2., 3., 6., 7.], dtype=float32)
    """
    samples, side, _, colours = images_BSSC.shape
    grid = side // patch_size
    whole = images_BSSC[:, : grid * patch_size, : grid * patch_size]
    split = whole.reshape(samples, grid, patch_size, grid, patch_size, colours)
    return split.transpose(0, 1, 3, 5, 2, 4).reshape(samples, grid * grid, colours * patch_size**2)


def draw_kept(rng: np.random.Generator, samples: int, patches: int, keep: int) -> Indices:
    """The patches that are kept in masking: for each sample a uniformly random subset, (samples, keep), ascending.

    New in every call (EFTViT draws a mask in every forward pass). Draws nothing if all are kept.
    """
    if keep == patches:
        return np.tile(np.arange(patches, dtype=np.int64), (samples, 1))
    order = rng.random((samples, patches)).argpartition(keep, axis=1)
    return np.sort(order[:, :keep], axis=1).astype(np.int64)


def select(patches_BNV: Floats, kept_BK: Indices) -> Floats:
    """The kept patches of each sample: (B, N, V) and (B, K) -> (B, K, V)."""
    return np.take_along_axis(patches_BNV, kept_BK[:, :, None], axis=1)


def _rgb(image: Image.Image) -> Image.Image:
    """Pillow's conversion to RGB, except for 16-bit gray, which pillow would clip at 255."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def _draft(image: Image.Image, least: int, decoded_bytes: int) -> str | None:
    """Choose the size at which the image is decoded. Return the reason why it takes too much memory, or None.

    A JPEG far larger than needed is decoded at 1/2, 1/4 or 1/8 of its size, never below twice `least`: a camera's
    12 megapixels cost a Pi much time and memory otherwise.
    """
    width, height = image.size
    kept_bytes = _coefficient_bytes(image) if isinstance(image, JpegImageFile) else 0
    image.draft(None, (2 * least, 2 * least))
    taken_bytes = kept_bytes + image.width * image.height * _BYTES_PER_PIXEL
    if taken_bytes <= decoded_bytes:
        return None
    pixels = f"{width} x {height} pixels{' of a progressive JPEG' if kept_bytes else ''}"
    return f"too large: {pixels} take {taken_bytes >> 20} MiB, at most {decoded_bytes >> 20} MiB may be"


def _coefficient_bytes(image: JpegImageFile) -> int:
    """Memory of the coefficients that libjpeg keeps of the whole image, whatever size it is decoded at.

    0 if the first scan has all components: then libjpeg decodes a few lines at a time.
    """
    if "progressive" not in image.info and _count_scanned_components(image.fp) == image.layers:
        return 0
    samplings = [across * down for _, across, down, _ in image.layer]
    values = image.width * image.height * sum(samplings) // max(samplings, default=1)
    return values * _COEFFICIENT_BYTES


def _count_scanned_components(file: IO[bytes] | None) -> int:
    """Count the components in the first scan of a JPEG file; 0 if its segments cannot be followed."""
    if file is None:
        return 0
    place = file.seek(0, os.SEEK_CUR)
    try:
        file.seek(2)
        while len(head := file.read(5)) == 5 and head[0] == 0xFF:
            if head[1] == _START_OF_SCAN:
                return head[4]
            file.seek(int.from_bytes(head[2:4]) - 3, os.SEEK_CUR)  # its length counts from the third byte on
    finally:
        file.seek(place)
    return 0


def _reason(error: Exception) -> str:
    """The reason; what stands before a colon is the same for all files with this fault."""
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, UnidentifiedImageError):
        return "not a PNG, JPEG, BMP, WebP, GIF, TIFF, PGM or PPM image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{DAMAGED}: {error or type(error).__name__}"
