"""A device's folder of images that grows while the device takes part in runs."""

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from fedvit.data.folder import DeviceData
from fedvit.data.images import DECODED_BYTES
from fedvit.data.split import KeptSplit, RandomSplit
from fedvit.errors import StorageFailed
from fedvit.resources import IMAGE_CACHE_BYTES

log = logging.getLogger(__name__)

MOST_LOGGED = 5
"""Unusable files that are named in the log each time; `edge-client status` counts all."""


class Growing(Protocol):
    """Images that may change."""

    data: DeviceData  # as of the last `look`

    def look(self, classes: Collection[str] | None = None) -> bool:
        """Take changes into `data`, of these classes only; False if there are none. Raises DataError."""

    def log_problems(self) -> None:
        """Name the files that cannot be used in the log, each once."""


class GrowingFolder:
    """The images of a folder: `data` as it was when `look` was last called.

    Which image tests is kept in `split_file` from the first start on, so that images that come or go never move
    another one from training to testing. Raises DataError as `DeviceData.open`, StorageFailed, and Damaged if that file
    and its copy are.
    """

    def __init__(
        self,
        folder: Path,
        *,
        split_file: Path,
        test_share: float = 0.2,
        cache_bytes: int = IMAGE_CACHE_BYTES,
        decoded_bytes: int = DECODED_BYTES,
    ) -> None:
        self._folder = folder
        self._split_file = split_file
        self._test_share = test_share
        self._cache_bytes = cache_bytes
        self._decoded_bytes = decoded_bytes
        self.damaged: list[str] = []  # files of the split
        self._split = KeptSplit.load(split_file, test_share, self.damaged.append)
        if self._split:
            with contextlib.suppress(StorageFailed):  # a device with a full disk starts, too
                self._split.save(split_file)  # that of an older version has no digest and no copy
        self._logged: set[tuple[Path, str]] = set()
        self.data = self._open(None, None)

    def look(self, classes: Collection[str] | None = None) -> bool:
        """Take new, changed and removed files into `data`; False if there are none.

        Images of other than the given `classes` are not used. Names, sizes and times of all files are read, and the
        headers of new ones. Raises DataError as `DeviceData.open`, after which `data` is as before.
        """
        data = self._open(classes, self.data)
        changed, self.data = data is not self.data, data
        return changed

    def _open(self, classes: Collection[str] | None, before: DeviceData | None) -> DeviceData:
        data = DeviceData.open(
            self._folder,
            split=self._split or RandomSplit(self._test_share),
            cache_bytes=self._cache_bytes,
            decoded_bytes=self._decoded_bytes,
            classes=classes,
            before=before,
        )
        if self._split is None and not data.has_test_folder:
            train, test = (
                [str(path.relative_to(self._folder)) for path in part.paths] for part in (data.train, data.test)
            )
            self._split = KeptSplit.of(train, test, self._test_share)
            self._split.save(self._split_file)
        return data

    def log_problems(self) -> None:
        """Name the files that cannot be used in the log, each once."""
        problems = self.data.problems()
        new = [problem for problem in problems if problem not in self._logged]
        self._logged = set(problems)
        for path, reason in new[:MOST_LOGGED]:
            log.warning("file not used", extra={"file": str(path), "reason": reason})
        if len(new) > MOST_LOGGED:
            log.warning("more files not used", extra={"count": len(new) - MOST_LOGGED})
