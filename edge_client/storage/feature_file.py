"""A file of features: one record for each view of an image, which is made again if it is missing or damaged.

A record is its id, and the numbers with a digest, or sealed with a key. The id says of which image, graph and tensors
the features are, so that a record of anything else is never read.
"""

import hashlib
import logging
import os
from collections.abc import Collection

import numpy as np

from edge_client.storage.vault_key import VaultKey
from fedvit.errors import ConfigError
from fedvit.tensors import Array

log = logging.getLogger(__name__)

ID_BYTES = 16
_DIGEST_BYTES = 16
_PLAIN_EXTRA_BYTES = ID_BYTES + _DIGEST_BYTES
_SEALED_EXTRA_BYTES = ID_BYTES + 44
"""Id, and what `VaultKey.seal` adds: its mark, a nonce and a tag."""


def count_record_bytes(numbers: int, *, sealed: bool) -> int:
    """Return the size of a record of so many float32 numbers."""
    return 4 * numbers + (_SEALED_EXTRA_BYTES if sealed else _PLAIN_EXTRA_BYTES)


class FeatureFile:
    """An open file of records of `numbers` float32 numbers each, at most `most` of them.

    `ids`: all that are needed now; places of other records are used for new ones. It closes `handle`.
    """

    def __init__(self, handle: int, numbers: int, most: int, ids: Collection[bytes], key: VaultKey | None) -> None:
        self._handle = handle
        self._key = key
        self._size = count_record_bytes(numbers, sealed=key is not None)
        self._places: dict[bytes, int] = {}
        self._free: list[int] = []
        needed, records = set(ids), min(os.fstat(handle).st_size // self._size, most)
        for place in range(records):
            name = os.pread(handle, ID_BYTES, place * self._size)
            if name in needed and name not in self._places:
                self._places[name] = place
            else:
                self._free.append(place)
        self._free = [*range(most - 1, records - 1, -1), *reversed(self._free)]  # the last one is used first

    def read(self, name: bytes) -> Array | None:
        """Return a record's numbers; None if there is none, or if it is damaged."""
        if (place := self._places.get(name)) is None:
            return None
        try:
            record = os.pread(self._handle, self._size, place * self._size)
        except OSError as error:
            log.warning("features cannot be read; they are made again", extra={"reason": error.strerror})
            record = b""
        content = self._open(name, record) if len(record) == self._size and record.startswith(name) else None
        if content is None:
            self._free.append(self._places.pop(name))
            return None
        return np.frombuffer(content, np.float32)

    def write(self, name: bytes, numbers: Array) -> None:
        """Keep a record if there is a place for it; without room on the disk nothing more is kept."""
        if name in self._places or not self._free:
            return
        content = np.ascontiguousarray(numbers, np.float32).tobytes()
        sealed = self._key.seal(content, name.hex()) if self._key else _digest(name, content) + content
        place = self._free.pop()
        try:
            written = os.pwrite(self._handle, name + sealed, place * self._size)
        except OSError as error:
            written = 0
            log.warning("features are not kept any more", extra={"reason": error.strerror})
        if written < self._size:
            self._free.clear()
        else:
            self._places[name] = place

    def close(self) -> None:
        os.close(self._handle)

    def _open(self, name: bytes, record: bytes) -> bytes | None:
        if self._key is None:
            end = ID_BYTES + _DIGEST_BYTES
            return record[end:] if record[ID_BYTES:end] == _digest(name, record[end:]) else None
        try:
            return self._key.open(record[ID_BYTES:], name.hex())
        except ConfigError:
            return None


def _digest(name: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, key=name, digest_size=_DIGEST_BYTES).digest()
