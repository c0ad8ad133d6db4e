"""A broker as a child process: started, watched, restarted on the same port, and never left behind."""

import contextlib
import ctypes
import errno
import functools
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import psutil

from fedvit.errors import ConfigError
from fedvit.files import name_failure
from fedvit.quantities import format_bytes, format_seconds
from fedvit.transport.address import Address

FLEET_USER = "fedvit"
"""The one user name of a fleet; its secret is the password that the operator chose."""
START_S = 300.0
"""Longest time that a broker may take to accept connections, while its process lives."""
SLOW_S = 5.0
"""After this time it is reported to be slow; a restart does not wait longer."""
POLL_S = 0.02
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
STOP_S = 3.0
MOST_LOG_BYTES = 16 * 1024 * 1024
"""A larger log is rotated to one old file: a client that reconnects again and again must not fill the disk."""
PICKED_PORTS = range(20_000, 32_000)
MOST_PICKS = 100
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class BrokerProgram(NamedTuple):
    """The command line of a broker's process."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log_file: Path


class Broker:
    """Our running broker. Raises ConfigError if it cannot be started, or accepts no connection within START_S.

    `kind` is for messages; `address` is for clients on this machine, with the fleet's credentials. `tend` must
    be called often: it restarts a broker that died, or that uses more than `most_bytes` of resident memory.
    `operator_log` is called if the first start is slow.
    """

    def __init__(
        self,
        kind: str,
        address: Address,
        program: BrokerProgram,
        *,
        most_bytes: float = math.inf,
        operator_log: Callable[[str], None] = log.warning,
    ) -> None:
        self.kind = kind
        self.address = address
        self._command = program.command
        self._environment = program.environment
        self.log_file = program.log_file
        self.log_position = 0
        """Position in the log at which the lines of the current process begin."""
        self.up = False
        """True if the current process has accepted a connection."""
        self._most_bytes = most_bytes
        self._started_at = 0.0  # time.monotonic()
        self._retry_at = 0.0
        self._pause_s = FIRST_RETRY_S
        self._start()
        self._wait_until_up(operator_log)

    @property
    def pid(self) -> int:
        return self._child.pid

    def alive(self) -> bool:
        return self._child.poll() is None

    def rss_bytes(self) -> int:
        """Resident memory; 0 if it is not running."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def tend(self) -> str | None:
        """Restart it if it died or uses too much memory. Returns what was done, as text; None if nothing."""
        with contextlib.suppress(OSError):  # it was moved away, or the disk is full
            if self.log_file.stat().st_size > MOST_LOG_BYTES:
                shutil.copyfile(self.log_file, self.log_file.with_suffix(".old"))
                os.truncate(self.log_file, 0)  # the broker appends to it
        if not self.up:
            return self._tend_start()
        if not self.alive():
            return f"it had died and {self._start_again()}"
        if (rss_bytes := self.rss_bytes()) > self._most_bytes:
            return f"it had grown to {format_bytes(rss_bytes)}, more than a fleet needs, and {self.restart()}"
        return None

    def _tend_start(self) -> str | None:
        """Watch a restarted broker that has not accepted a connection yet."""
        now_s = time.monotonic()
        if not self.alive():
            return None if now_s < self._retry_at else f"it {self._start_again()}"
        if self._accepts():
            return f"it accepts connections again, after {format_seconds(now_s - self._started_at)}"
        if now_s - self._started_at > START_S:
            return f"it accepted no connection within {START_S:.0f} s and {self.restart()}"
        return None

    def reload(self) -> None:
        """Let mosquitto reload passwords, rules, its certificate and revoked ones; connections stay open."""
        self._child.send_signal(signal.SIGHUP)

    def restart(self) -> str:
        """Restart the process, which ends all connections; permitted clients reconnect. Returns the outcome as text."""
        self.stop()
        return self._start_again()

    def stop(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _start_again(self) -> str:
        """Start it on the same port; on failure `tend` retries in growing intervals. Returns the outcome as text."""
        try:
            self._start()
            until = time.monotonic() + SLOW_S
            while not self._accepts():
                self._check_alive()
                if time.monotonic() > until:
                    return f"was started again, but is slow: no connection accepted after {SLOW_S:.0f} s"
                time.sleep(POLL_S)
        except ConfigError as error:
            self._retry_at, pause_s = time.monotonic() + self._pause_s, self._pause_s
            self._pause_s = min(LAST_RETRY_S, 2 * self._pause_s)
            return f"could not be started again (next attempt in {format_seconds(pause_s)}): {error}"
        return "was started again"

    def _start(self) -> None:
        self.up = False
        # otherwise another program that took the port meanwhile would be mistaken for our broker
        claim_port(self.address.host, self.address.port)
        self.log_position = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._child = _spawn(self._command, self._environment, self.log_file)
        self._started_at = time.monotonic()

    def _wait_until_up(self, operator_log: Callable[[str], None]) -> None:
        slow_at, late_at = self._started_at + SLOW_S, self._started_at + START_S
        while not self._accepts():
            self._check_alive()
            if time.monotonic() > late_at:
                self.stop()
                raise ConfigError(
                    "FV1203", f"{self.kind} accepted no connection within {START_S:.0f} s (log: {self.log_file})"
                )
            if time.monotonic() > slow_at:
                operator_log(
                    f"{self.kind} is slow to start; waiting up to {START_S:.0f} s for it (log: {self.log_file})"
                )
                slow_at = math.inf
            time.sleep(POLL_S)

    def _check_alive(self) -> None:
        if not self.alive():
            raise ConfigError("FV1203", f"{self.kind} ended at once: {self._describe_end()} (log: {self.log_file})")

    def _accepts(self) -> bool:
        try:
            socket.create_connection((self.address.host, self.address.port), 1.0).close()
        except OSError:
            return False
        if not self._listens():
            return False
        self.up, self._pause_s = True, FIRST_RETRY_S
        return True

    def _listens(self) -> bool:
        """Return whether our process listens at the port, and not one that took it since it was claimed."""
        try:
            sockets = psutil.Process(self.pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:  # macOS shows them to root alone
            return True
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == self.address.port for one in sockets)

    def _describe_end(self) -> str:
        """Return the last line that this process wrote to its log; without one, how it ended."""
        lines = self.log_file.read_bytes()[self.log_position :].decode(errors="replace").strip().splitlines()
        code = self._child.returncode
        return lines[-1] if lines else f"signal {-code}" if code < 0 else f"exit code {code}"


def claim_port(listen: str = "127.0.0.1", port: int = 0) -> int:
    """Check that `port` is free; 0 picks a free one. Raises ConfigError, naming the port.

    A picked port is below those that systems give to outgoing connections and to servers that leave the choice to
    them, so that none of these has it before our server listens.
    """
    with name_failure(f"cannot listen on port {port} of {listen}", ConfigError, "FV1201"):
        family, _, _, _, address = socket.getaddrinfo(listen, port, type=socket.SOCK_STREAM)[0]
        for pick in [port] if port else secrets.SystemRandom().sample(PICKED_PORTS, MOST_PICKS):
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address[0], pick, *address[2:]))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    return pick
    raise ConfigError(
        "FV1201",
        f"port {port} on {listen} is in use by another program; "
        "choose another with --broker.port (0: a free one), or use that broker with --broker mqtt://HOST:PORT",
    )


def _spawn(command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start a child that ends when this process ends, whatever ends it.

    Linux sends the death signal when the *thread* that forked ends, so the fork is made in a thread that lives as
    long as the child.
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
                    # Ctrl-C in the terminal must not end the broker before the coordinator has disconnected
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
        raise ConfigError("FV1203", f"cannot start {command[0]}: {child.strerror or child}") from child
    return child


def _die_with(parent: int) -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
