"""The folder of a device with features of frozen layers: which files there are, and how large they may become."""

import contextlib
import logging
import os
from pathlib import Path

from edge_client.storage.feature_file import count_record_bytes
from fedvit.files import folder_bytes

log = logging.getLogger(__name__)

FEATURES = "features"
MOST_FILES = 2
"""Files that are kept: a phase has one, and a device's runs often have the same frozen layers."""


class FeatureFolder:
    """Files of features, which can all be made again. `key`: of 32 bytes, with which records are encrypted."""

    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        self.folder = folder
        self.key = key

    def find_file(self, digest: str, numbers: int, records: int, spare_bytes: int | None) -> Path | None:
        """Return the file for features of a graph, which may be a new one; None if so many records have no room.

        `spare_bytes`: room that the device's budget leaves for all files, with those that are there; None: any.
        """
        file = self.folder / f"{digest[:32]}-{numbers}.features"
        size = records * count_record_bytes(numbers, sealed=self.key is not None)
        if spare_bytes is not None and size > spare_bytes:
            log.info("features of frozen layers have no room", extra={"bytes": size, "room": spare_bytes})
            return None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            os.utime(file)
            self._remove_older(file, None if spare_bytes is None else spare_bytes - size)
        except OSError as error:  # training works without them
            log.warning("features of frozen layers cannot be kept", extra={"reason": error.strerror})
            return None
        return file

    def remove_all(self) -> int:
        """Remove all files; return their bytes."""
        removed_bytes = self.used_bytes()
        for file in self._list_files():
            file.unlink(missing_ok=True)
        return removed_bytes

    def used_bytes(self) -> int:
        return folder_bytes(self.folder) if self.folder.is_dir() else 0

    def _remove_older(self, newest: Path, room_bytes: int | None) -> None:
        kept = 1
        for file in self._list_files():
            if file == newest:
                continue
            size = file.stat().st_size
            if kept >= MOST_FILES or (room_bytes is not None and size > room_bytes):
                file.unlink(missing_ok=True)
                continue
            kept += 1
            room_bytes = None if room_bytes is None else room_bytes - size

    def _list_files(self) -> list[Path]:
        """Return the files, the newest first."""
        if not self.folder.is_dir():
            return []
        return sorted(self.folder.glob("*.features"), key=lambda file: file.stat().st_mtime, reverse=True)
