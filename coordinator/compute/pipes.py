"""Length-prefixed frames on the pipes between a process and its child processes."""

import contextlib
import os
import signal
import struct
import threading
from queue import SimpleQueue
from typing import IO

import msgspec
from msgspec import Struct

from fedvit.descriptors import raise_limit
from fedvit.logs import configure_logging

_LENGTH = struct.Struct("<Q")


def write_frame(pipe: IO[bytes], message: Struct) -> None:
    write_raw(pipe, msgspec.msgpack.encode(message))


def write_raw(pipe: IO[bytes], raw: bytes) -> None:
    pipe.write(_LENGTH.pack(len(raw)))
    pipe.write(raw)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """Return the next frame, or None at the end of the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    [length] = _LENGTH.unpack(head)
    raw = pipe.read(length)
    return raw if len(raw) == length else None


def close(pipe: IO[bytes]) -> None:
    """Close the pipe of a process that has ended."""
    with contextlib.suppress(OSError):  # buffered bytes can no longer be written
        pipe.close()


def open_pipes(log_fields: dict[str, object] | None = None) -> tuple["SimpleQueue[bytes]", IO[bytes]]:
    """Return a queue of the frames from standard input, and the pipe for replies.

    The process ends when its standard input ends. To be called first in a child process. `log_fields` are part of every
    line of its log in JSON, also those that are added later.
    """
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # sent to the whole group or service; the parent ends this process itself
        signal.signal(number, signal.SIG_IGN)
    raise_limit()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    configure_logging(fields=log_fields)
    waiting: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests, waiting), name="requests", daemon=True).start()
    return waiting, replies


def _listen(requests: IO[bytes], waiting: "SimpleQueue[bytes]") -> None:
    while raw := read_frame(requests):
        waiting.put(raw)
    os._exit(0)
