"""A board's disk with a cache that a power cut empties: an NBD server of one image.

    python -m tests.boards.volatile_disk IMAGE LAYER SOCKET [--seed N]

Written blocks go into the sparse file LAYER, and IMAGE stays as it is. A block that was written but not flushed is only
in memory. When the emulator is killed, a random half of these blocks is written, in no order, and the others are lost:
the worst that a disk may do. SIGUSR1 lets the disk fail within a flush that it draws among the next ones: a random half
is written, and the emulator never gets its answer, so the cut is inside of what a program syncs.

For the emulator: -drive file=nbd+unix:///?socket=SOCKET,format=raw,cache=writeback
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import struct
import sys
from pathlib import Path

BLOCK = 4096
FLUSH, FUA = 4, 8
"""Flags of the protocol: the disk knows flushes, and writes that are flushed at once."""
GREETING = b"NBDMAGICIHAVEOPT"
OPTION_REPLY, REQUEST_REPLY = 0x3E889045565A9, 0x67446698
EXPORT_NAME, ABORT, INFO, GO = 1, 2, 6, 7
ACKNOWLEDGED, INFORMATION, UNKNOWN = 1, 3, 0x80000001
READ, WRITE, DISCONNECT, FLUSH_NOW = 0, 1, 2, 3
MOST_FLUSHES = 6
"""A cut within a flush comes at most so many flushes after it was asked for."""


class PowerCut(Exception):
    """The disk lost its power within a flush."""


class Disk:
    """Blocks of an image, of the layer above it, and of the cache above that."""

    def __init__(self, image: Path, layer: Path, seed: int) -> None:
        self._image = os.open(image, os.O_RDONLY)
        self._layer = os.open(layer, os.O_RDWR | os.O_CREAT)
        self.size = os.fstat(self._image).st_size
        os.ftruncate(self._layer, self.size)
        self._written: set[int] = set()  # blocks of the layer
        self._cache: dict[int, bytearray] = {}  # blocks that were not flushed
        self._drawn = random.Random(seed)
        self._flushes_left: int | None = None  # until the cut that was asked for

    def read(self, offset: int, length: int) -> bytes:
        first, last = offset // BLOCK, (offset + length - 1) // BLOCK
        if not any(block in self._written or block in self._cache for block in range(first, last + 1)):
            return os.pread(self._image, length, offset)
        data = b"".join(bytes(self._cache.get(block) or self._read_stored(block)) for block in range(first, last + 1))
        return data[offset - first * BLOCK :][:length]

    def write(self, offset: int, data: bytes) -> None:
        at = 0
        while at < len(data):
            block, inside = divmod(offset + at, BLOCK)
            count = min(BLOCK - inside, len(data) - at)
            if block not in self._cache:
                self._cache[block] = bytearray(BLOCK if count == BLOCK else self._read_stored(block))
            self._cache[block][inside : inside + count] = data[at : at + count]
            at += count

    def flush(self) -> None:
        """Store the cache. Raises PowerCut, after a part of it, if this flush was drawn for a cut."""
        if self._flushes_left is not None:
            self._flushes_left -= 1
            if self._flushes_left < 0:
                raise PowerCut
        self._store(list(self._cache))
        self._cache.clear()

    def cut_soon(self) -> None:
        """Fail within one of the next flushes."""
        self._flushes_left = self._drawn.randrange(MOST_FLUSHES)

    def lose_power(self) -> tuple[int, int]:
        """Store a random half of the cache and lose the rest: (lost blocks, blocks)."""
        blocks = [block for block in self._cache if self._drawn.random() < 0.5]
        self._store(blocks)
        lost, self._flushes_left = len(self._cache) - len(blocks), None
        total = len(self._cache)
        self._cache.clear()
        return lost, total

    def _read_stored(self, block: int) -> bytes:
        return os.pread(self._layer if block in self._written else self._image, BLOCK, block * BLOCK)

    def _store(self, blocks: list[int]) -> None:
        for block in blocks:
            os.pwrite(self._layer, self._cache[block], block * BLOCK)
        self._written.update(blocks)


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly so many bytes. Raises EOFError when the emulator is gone."""
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def agree(connection: socket.socket, size: int) -> bool:
    """Agree with the emulator on the disk; False if it goes away again."""
    connection.sendall(GREETING + struct.pack(">H", 3))
    receive(connection, 4)
    flags = 1 | FLUSH | FUA
    while True:
        _, option, length = struct.unpack(">QII", receive(connection, 16))
        receive(connection, length)
        if option == EXPORT_NAME:
            connection.sendall(struct.pack(">QH", size, flags))
            return True
        replies = {INFO: [INFORMATION, ACKNOWLEDGED], GO: [INFORMATION, ACKNOWLEDGED], ABORT: [ACKNOWLEDGED]}
        for kind in replies.get(option, [UNKNOWN]):
            data = struct.pack(">HQH", 0, size, flags) if kind == INFORMATION else b""
            connection.sendall(struct.pack(">QIII", OPTION_REPLY, option, kind, len(data)) + data)
        if option in (GO, ABORT):
            return bool(option == GO)


def serve(connection: socket.socket, disk: Disk) -> None:
    """Serve one start of a board until it is switched off. Raises EOFError or PowerCut when its power is cut."""
    if not agree(connection, disk.size):
        return
    while True:
        _, flags, kind, handle, offset, length = struct.unpack(">IHHQQI", receive(connection, 28))
        data = b""
        if kind == READ:
            data = disk.read(offset, length)
        elif kind == WRITE:
            disk.write(offset, receive(connection, length))
            if flags & 1:  # it wants this write on the disk before the answer; the others may follow
                disk.flush()
        elif kind == FLUSH_NOW:
            disk.flush()
        elif kind == DISCONNECT:
            disk.flush()
            return
        connection.sendall(struct.pack(">IIQ", REQUEST_REPLY, 0, handle) + data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("layer", type=Path)
    parser.add_argument("socket", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    disk = Disk(arguments.image, arguments.layer, arguments.seed)
    signal.signal(signal.SIGUSR1, lambda *_: disk.cut_soon())
    arguments.socket.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(arguments.socket))
    server.listen()
    while True:
        connection, _ = server.accept()
        try:
            serve(connection, disk)
        except (EOFError, ConnectionError):
            report("power cut", disk)
        except PowerCut:
            report("power cut within a flush", disk)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 20):  # the emulator waits for its answer until it is killed
                    pass
        connection.close()


def report(what: str, disk: Disk) -> None:
    lost, total = disk.lose_power()
    sys.stdout.write(f"{what}: {lost} of {total} unflushed blocks were lost\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
