"""A broker as a child process: started, watched, started again on the same port, and never left behind."""

import contextlib
import ctypes
import errno
import functools
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

import psutil

from fedvit.errors import ConfigError
from fedvit.quantities import format_bytes
from fedvit.transport.mqtt import Address

FLEET_USER = "fedvit"
"""The one user name of a fleet; its secret is the password that the operator chose."""
START_S = 10.0
STOP_S = 3.0
MOST_LOG_BYTES = 16 * 1024 * 1024
"""A log that is longer takes the place of the one before: who connects again and again must not fill the disk."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Broker:
    """A running broker of ours. Raises ConfigError when it does not come up.

    `kind` is for people; `address` is where clients of this machine find it, with the fleet's credentials. `tend` bears
    `most_bytes` of resident memory.
    """

    def __init__(
        self,
        kind: str,
        address: Address,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path,
        *,
        most_bytes: float = math.inf,
    ) -> None:
        self.kind = kind
        self.address = address
        self._command = command
        self._environment = environment
        self.log_file = log_file
        self._most_bytes = most_bytes
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def alive(self) -> bool:
        return self._child.poll() is None

    def rss_bytes(self) -> int:
        """Resident memory; 0 when it is not there."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def tend(self) -> str | None:
        """Start it again where it died or has grown beyond what it may have; what was done, for people."""
        with contextlib.suppress(OSError):  # somebody else put it away, or there is no room
            if self.log_file.stat().st_size > MOST_LOG_BYTES:
                shutil.copyfile(self.log_file, self.log_file.with_suffix(".old"))
                os.truncate(self.log_file, 0)  # the broker appends to it
        if self.restart_if_dead():
            return "it had died and was started again"
        if (rss_bytes := self.rss_bytes()) > self._most_bytes:
            self.restart()
            return f"it had grown to {format_bytes(rss_bytes)}, more than a fleet needs, and was started again"
        return None

    def restart_if_dead(self) -> bool:
        """True when it had died and was started again on the same port."""
        if self.alive():
            return False
        self._start()
        return True

    def reload(self) -> None:
        """Let mosquitto read its lists of passwords, rules and revoked certificates anew; connections stay."""
        self._child.send_signal(signal.SIGHUP)

    def restart(self) -> None:
        """End all connections; whoever is still let in comes back by itself."""
        self.stop()
        self._start()

    def stop(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _start(self) -> None:
        # else whoever took the port meanwhile would pass for our broker
        claim_port(self.address.host, self.address.port)
        self._child = _spawn(self._command, self._environment, self.log_file)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if not self.alive():
                raise ConfigError(f"{self.kind} ended at once: {self._last_words()} (log: {self.log_file})")
            try:
                socket.create_connection((self.address.host, self.address.port), 1.0).close()
                return
            except OSError:
                time.sleep(0.02)
        self.stop()
        raise ConfigError(f"{self.kind} accepted no connection within {START_S:.0f} s (log: {self.log_file})")

    def _last_words(self) -> str:
        lines = self.log_file.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def claim_port(listen: str, port: int) -> int:
    """Make sure that `port` can be listened on; 0 picks a free one. Raises ConfigError, naming the port."""
    try:
        family, _, _, _, where = socket.getaddrinfo(listen, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            chosen: int = probe.getsockname()[1]
            return chosen
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {listen} is in use by another program; "
                "choose another with --port (0 takes a free one), or use that broker with --broker mqtt://HOST:PORT"
            ) from error
        raise ConfigError(f"cannot listen on port {port} of {listen}: {error.strerror or error}") from error


def _spawn(command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start a child that ends when this process ends, however that happens.

    Linux sends the death signal when the *thread* that forked ends, so a thread that lives as long as the
    child does it.
    """
    handed_over: SimpleQueue[subprocess.Popen[bytes] | OSError] = SimpleQueue()

    def keep() -> None:
        try:
            with open(log_file, "ab") as log:
                child = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C in the terminal must not end the broker before the coordinator said goodbye
                    start_new_session=True,
                    preexec_fn=functools.partial(_die_with, os.getpid()),
                )
        except OSError as error:
            handed_over.put(error)
            return
        handed_over.put(child)
        child.wait()

    threading.Thread(target=keep, name="broker-keeper", daemon=True).start()
    child = handed_over.get()
    if isinstance(child, OSError):
        raise ConfigError(f"cannot start {command[0]}: {child.strerror or child}") from child
    return child


def _die_with(parent: int) -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
