"""Short messages over a TCP connection: 4 bytes of length before each, and a time by which each must have come."""

import socket
import time

from fedvit.errors import BadPayload, LinkDown
from fedvit.transport.address import describe_error

_LENGTH_BYTES = 4


def send_frame(link: socket.socket, content: bytes) -> None:
    """Send a message. Raises LinkDown."""
    try:
        link.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    except OSError as error:
        raise LinkDown("FV1209", f"the other side cannot be reached: {describe_error(error)}") from error


def receive_frame(link: socket.socket, limit_bytes: int, patience_s: float) -> bytes:
    """Wait for a message. Raises LinkDown if the connection ends or the time is over, BadPayload if it is too long."""
    until = time.monotonic() + patience_s
    size = int.from_bytes(_receive(link, _LENGTH_BYTES, until), "big")
    if size > limit_bytes:
        raise BadPayload("FV2301", f"a message of {size} bytes exceeds the limit of {limit_bytes} bytes")
    return _receive(link, size, until)


def is_open(link: socket.socket) -> bool:
    """Tell whether the other side still holds the connection, from which nothing is expected now."""
    try:
        link.settimeout(0)
        return link.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _receive(link: socket.socket, size: int, until: float) -> bytes:
    content = bytearray()
    while len(content) < size:
        try:
            link.settimeout(max(0.001, until - time.monotonic()))
            piece = link.recv(size - len(content))
        except OSError as error:
            raise LinkDown("FV1209", f"no answer came: {describe_error(error)}") from error
        if not piece:
            raise LinkDown("FV1209", "the other side ended the connection")
        content += piece
    return bytes(content)
