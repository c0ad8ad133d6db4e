"""Handwritten digits that come with scikit-learn: a real data set that needs no download.

1797 images of 8x8 from the UCI "Optical Recognition of Handwritten Digits" test set.
"""

import numpy as np
from PIL import Image

from fedvit.data.images import Pixels
from fleet.datasets.samples import Samples


def read_digits(size: int = 32) -> Samples:
    """The digits as RGB, gray levels 0..16 spread over 0..255, resized bilinearly to `size`."""
    from sklearn.datasets import load_digits  # slow to import, and needed for this data set only

    digits = load_digits()
    gray = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return Samples(
        dataset="digits",
        size=size,
        images=np.stack([_enlarged(image, size) for image in gray]),
        labels=digits.target.astype(np.int64),
        classes=tuple(str(name) for name in digits.target_names),
    )


def _enlarged(gray: Pixels, size: int) -> Pixels:
    image = Image.fromarray(gray).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image.convert("RGB"))
