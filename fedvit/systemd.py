"""Messages to systemd for units with `Type=notify`: the program is ready, alive, or stopping."""

import os
import socket
import time
from contextlib import suppress

PATIENCE_S = 1.0
"""Longest wait for a systemd that does not read."""


class Notifier:
    """Sends to the socket that systemd names; without one nothing is sent. `alive` is to be called often."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._alive_every_s = watchdog_s / 3 if watchdog_s else None
        self._alive_at = 0.0

    @classmethod
    def from_environment(cls) -> "Notifier":
        """Take the variables that systemd sets out of the environment: child processes must not use them."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        meant_for = os.environ.pop("WATCHDOG_PID", str(os.getpid()))
        watched = microseconds.isdigit() and meant_for == str(os.getpid())
        return cls(address, int(microseconds) / 1e6 if watched else None)

    def ready(self) -> None:
        self._send(b"READY=1")

    def alive(self) -> None:
        """Three times in each interval of the watchdog, tell systemd that the program's loop turns."""
        now = time.monotonic()
        if self._alive_every_s and now - self._alive_at >= self._alive_every_s:
            self._alive_at = now
            self._send(b"WATCHDOG=1", wait_s=0.0)  # the next one follows soon

    def stopping(self) -> None:
        self._send(b"STOPPING=1")

    def _send(self, message: bytes, wait_s: float = PATIENCE_S) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.settimeout(wait_s)
            link.sendto(message, self._address)
