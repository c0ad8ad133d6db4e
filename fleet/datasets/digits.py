"""Handwritten digits that come with scikit-learn: a real data set that needs no download.

1797 images of 8x8 from the UCI "Optical Recognition of Handwritten Digits" test set.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image

from fedvit.data.images import Pixels
from fleet.datasets.samples import OtherLabels, Samples


def read_digits(size: int = 32) -> Samples:
    """The digits as RGB, gray levels 0..16 spread over 0..255, resized bilinearly to `size`."""
    from sklearn.datasets import load_digits  # slow to import, and needed for this data set only

    digits = load_digits()
    gray = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return Samples(
        dataset="digits",
        size=size,
        images=np.stack([_enlarge(image, size) for image in gray]),
        labels=digits.target.astype(np.int64),
        classes=tuple(str(name) for name in digits.target_names),
    )


def read_digit_domains(size: int = 32) -> Samples:
    """The digits in four domains, as four cameras might see them; every image is in one of them."""
    digits = read_digits(size)
    domains = np.arange(len(digits), dtype=np.int64) % len(_DOMAINS)
    cameras = list(_DOMAINS.values())
    images = np.stack([cameras[domain](image) for domain, image in zip(domains, _load_all(digits), strict=True)])
    return replace(digits, dataset="digits-domains", images=images, domains=domains, domain_names=tuple(_DOMAINS))


def read_turned_digits(size: int = 32) -> Samples:
    """Every digit in four orientations, which are the classes; nothing tells which digit it is.

    For a backbone that has seen such images and none of their labels, in place of weights from a large data set.
    """
    digits = read_digits(size)
    turns = range(4)
    return Samples(
        dataset="digits-turned",
        size=size,
        images=np.concatenate([np.rot90(_load_all(digits), turn, axes=(1, 2)) for turn in turns]),
        labels=np.repeat(np.arange(4, dtype=np.int64), len(digits)),
        classes=tuple(f"{90 * turn:03d}" for turn in turns),
    )


def read_digit_pairs(size: int = 32) -> Samples:
    """Two digits side by side, of which an image has the classes: one class where both are the same."""
    digits = read_digits(size)
    images, count = _load_all(digits), len(digits)
    other = np.random.default_rng(0).permutation(count)
    half = (size + 1) // 2
    pairs = np.concatenate([_squeeze(images, half), _squeeze(images[other], size - half)], axis=2)
    sets = np.zeros((count, len(digits.classes)), np.float32)
    for labels in (digits.labels, digits.labels[other]):
        sets[np.arange(count), labels] = 1.0
    both = OtherLabels(task="multi_label", values=sets)
    return replace(digits, dataset="digits-pairs", images=pairs, labels=both.choose_strata(), other=both)


def read_dimmed_digits(size: int = 32) -> Samples:
    """Digits that are more or less bright: the number is the share of the brightness that is left, 0.1 to 1."""
    digits = read_digits(size)
    shares = np.random.default_rng(0).uniform(0.1, 1.0, len(digits))
    images = np.rint(_load_all(digits) * shares[:, None, None, None]).astype(np.uint8)
    labels = OtherLabels(task="regression", values=shares.astype(np.float32)[:, None])
    return replace(
        digits,
        dataset="digits-dimmed",
        images=images,
        labels=labels.choose_strata(),
        classes=("brightness",),
        other=labels,
    )


def read_digit_masks(size: int = 32) -> Samples:
    """Digits with a class for each pixel: the digit where there is ink, else the background."""
    digits = read_digits(size)
    images = _load_all(digits)
    classes = (*digits.classes, "background")
    masks = np.where(images[..., 0] > 96, digits.labels[:, None, None], len(digits.classes)).astype(np.uint8)
    shares = np.stack([(masks == place).mean(axis=(1, 2)) for place in range(len(classes))], axis=1)
    labels = OtherLabels(task="segmentation", values=shares.astype(np.float32), masks=[*masks])
    return replace(
        digits,
        dataset="digits-masks",
        images=images,
        labels=labels.choose_strata(),
        classes=classes,
        other=labels,
    )


def _squeeze(images: Pixels, width: int) -> Pixels:
    size = (width, images.shape[1])
    return np.stack([np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)) for image in images])


def _fade(image: Pixels) -> Pixels:
    return (image // 4 + 96).astype(np.uint8)


def _invert(image: Pixels) -> Pixels:
    return ~image


def _mirror(image: Pixels) -> Pixels:
    return image[:, ::-1]


def _copy(image: Pixels) -> Pixels:
    return image


_DOMAINS: dict[str, Callable[[Pixels], Pixels]] = {
    "faint": _fade,
    "inverted": _invert,
    "mirrored": _mirror,
    "plain": _copy,
}


def _load_all(digits: Samples) -> Pixels:
    return digits.images[np.arange(len(digits))]


def _enlarge(gray: Pixels, size: int) -> Pixels:
    image = Image.fromarray(gray).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image.convert("RGB"))
