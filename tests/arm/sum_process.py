"""Masks of a device in a secure sum: python -m tests.arm.sum_process NEIGHBOURS WORDS"""

import sys

from fedvit.secure.masks import add_masks
from fedvit.secure.vectors import Vector, pack_vector


def main() -> None:
    neighbours, words = map(int, sys.argv[1:])
    total = Vector.zeros(words, 3)
    add_masks(total, [(bytes([number] * 32), number % 2 == 0) for number in range(neighbours + 1)], 32)
    assert len(pack_vector(total, 32)) > 4 * words


if __name__ == "__main__":
    main()
