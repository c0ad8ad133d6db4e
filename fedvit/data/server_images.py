"""Images that the server has itself; their labels are never read."""

from pathlib import Path

import numpy as np

from fedvit.data.folder import DeviceData
from fedvit.data.images import Floats, Indices, normalise, unfold
from fedvit.errors import DataError
from fedvit.program import Batch

MOST_IMAGES = 200_000
"""Headers of so many files are read within a minute or two."""


class ServerImages:
    """The images of a folder as a model reads them, in the order of their names. Letters: as in `fedvit.data.images`.

    Raises DataError if the folder cannot be read, holds text, or more than MOST_IMAGES images.
    """

    def __init__(self, folder: Path, batch: Batch) -> None:
        data = DeviceData.open(folder)
        data.check_fits(batch)
        self._parts = (data.train, data.test)
        self._folder, self._batch = folder, batch
        if len(self) > MOST_IMAGES:
            raise DataError("FV2132", f"{folder}: holds {len(self)} images, at most {MOST_IMAGES} may be there")

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def read(self, rows: Indices) -> Floats:
        """Return (B, N, V) patches; in place of an image that cannot be decoded, those of a black one."""
        first = len(self._parts[0])
        images = np.zeros((len(rows), self._batch.image_size, self._batch.image_size, 3), np.uint8)
        for part, mine, start in ((self._parts[0], rows < first, 0), (self._parts[1], rows >= first, first)):
            if mine.any():
                images[mine], _ = part.load(rows[mine] - start, self._batch.image_size)
        return unfold(normalise(images, self._batch), self._batch.patch_size)
