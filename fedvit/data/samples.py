"""A labelled data set before it is dealt out to devices."""

from dataclasses import dataclass
from typing import Protocol

from fedvit.data.images import Indices, Pixels


class Images(Protocol):
    """Pixels by row number: an array in memory, or a reader that decodes what is asked for.

    A reader raises DataError, naming the file, when an image asked for cannot be decoded.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Indices, /) -> Pixels: ...


@dataclass(frozen=True, kw_only=True)
class Samples:
    """`images[rows]` is (len(rows), size, size, 3) uint8; `labels` are indices into `classes`."""

    dataset: str  # a name for people and records, no path
    size: int
    images: Images
    labels: Indices
    classes: tuple[str, ...]
    unreadable: tuple[str, ...] = ()  # what was left out and why, one line each

    def __len__(self) -> int:
        return len(self.labels)
