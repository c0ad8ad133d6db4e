"""An optimizer's memory with 8 bits a number instead of 32, as in 8-bit Adam (Dettmers et al., arXiv:2110.02861).

The numbers of a block share its largest size as a scale. A mean of gradients is kept as the square root of its share of
the scale, rounded to the nearest of 255 values. A mean of squares is kept as the fourth root, which spans ten decades.
It is rounded up or down at random, right in the mean, as a step changes it by less than the distance of two values.
What is not zero stays above zero, since an update divides by it.
"""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]

BLOCK = 2048
"""Numbers with one scale."""
SQUARES = frozenset({"exp_avg_sq"})
"""Slots that hold means of squares."""


class PackedSlot:
    """One slot of an optimizer for a vector of so many numbers, zero at first."""

    def __init__(self, slot: str, length: int) -> None:
        blocks = -(-length // BLOCK)
        self._holds_squares = slot in SQUARES
        self._codes = np.zeros((blocks, BLOCK), np.uint8 if self._holds_squares else np.int8)
        self._scales = np.zeros((blocks, 1), np.float32)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def unpack(self, first: int, into: Numbers) -> None:
        """Write the numbers from `first` on into a buffer. Both are a multiple of a block."""
        rows, values = self._rows(first, into), into.reshape(-1, BLOCK)
        values[...] = self._codes[rows]
        if self._holds_squares:
            np.square(values, out=values)
            np.square(values, out=values)
            values *= self._scales[rows] / 255.0**4
        else:
            values *= np.abs(values)
            values *= self._scales[rows] / 127.0**2

    def pack(self, first: int, values: Numbers, draw: np.random.Generator) -> None:
        """Keep the numbers of a buffer from `first` on."""
        rows, values = self._rows(first, values), values.reshape(-1, BLOCK)
        sizes = np.abs(values)
        scales = sizes.max(axis=1, keepdims=True)
        self._scales[rows] = scales
        with np.errstate(invalid="ignore"):  # a loss that is not finite ends the task
            sizes /= np.where(scales > 0, scales, 1)
            np.sqrt(sizes, out=sizes)
            if self._holds_squares:
                below = np.floor(255 * np.sqrt(sizes))
                low, high = np.square(np.square(below / 255)), np.square(np.square((below + 1) / 255))
                is_above = draw.random(sizes.shape, np.float32) * (high - low) < np.square(sizes) - low
                self._codes[rows] = np.clip(below + is_above, values > 0, 255)
            else:
                sizes *= 127
                self._codes[rows] = np.rint(np.copysign(sizes, values), out=sizes)

    def _rows(self, first: int, values: Numbers) -> slice:
        return slice(first // BLOCK, (first + len(values)) // BLOCK)
