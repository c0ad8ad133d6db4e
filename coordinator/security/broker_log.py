"""Reads mosquitto's log of a deployment's broker: connections, misuse, and when the broker has reloaded its lists.

mosquitto neither counts nor lists a user's connections and sessions. Its log names the user of each connection, from
the certificate, at the end of a line whose beginning no client can choose; so no device can incriminate another. Lines
are cut at 1000 bytes, so that a long client id hides the user: then `overlooked` is true.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MOST_CONNECTIONS = 32
"""Most connections of one device. It has two, and for a minute those of an earlier process that lost power."""
MOST_ACCEPTED = 4096
"""Most accepted connections without a client id yet that are remembered."""
READ_BYTES = 1024 * 1024
"""Bytes of the log that are read at a time."""

_TIME = r"[0-9T:-]+: "
_ACCEPTED = re.compile(_TIME + r"New connection from (\S+) on port \d+\.")
_NEW = re.compile(_TIME + r"New client connected from (\S+) as ")
_CONNECTED = re.compile(_TIME + r"New client connected from (\S+) as (.*) \(p\d, c([01]), k\d+, u'([^']*)'\)\.")
# reasons contain no comma, unlike the line "... already connected, closing old connection."
_ENDED = re.compile(
    _TIME + r"(?:Client (.*) (?:disconnected(?:\.|, not authorised\.|[: ][^,]*)|closed its connection\.|"
    r"has exceeded timeout, disconnecting\.)|Bad socket read/write on client (.*): [^:,]*)"
)
_PEER = re.compile(r" \[\S+\]$")
"""Newer versions of mosquitto add the address to the client's id."""
_STARTED = re.compile(_TIME + r"mosquitto version \S+ starting")
_RELOADED = re.compile(_TIME + r"Reloading config\.")


class Misuse(NamedTuple):
    """Something that a device did, and our software never does."""

    device: str
    what: str
    shut_out: bool  # it harms other clients of the broker, and has to be revoked


class BrokerLog:
    """Follows the growing log of a broker from `position` on.

    `expect_reload` names devices with revoked certificates. Once the broker has reloaded its lists, their older
    connections are in `to_end`, by client id.
    """

    def __init__(self, log_file: Path, position: int) -> None:
        self._log_file = log_file
        self._position = position
        self._rest = b""
        self._expected_from: int | None = None  # position of the log
        self._expected: list[str] = []
        self._began()

    def _began(self) -> None:
        """Reset: a broker that has just started has no connections, and has read its lists."""
        self.to_end: set[str] = set()
        self.overlooked = False
        """True if a connection with an unknown user or client id may be open."""
        self._reloads = 0
        self._revoked_at_reload: dict[str, int] = {}  # by user: number of the reload that revoked its older connections
        self._accepted: dict[str, int] = {}  # by address: number of reloads before a connection without a client id yet
        self._user_of: dict[str, str] = {}  # by client id
        self._clients_of: dict[str, set[str]] = {}
        self._reported: set[tuple[str, bool]] = set()

    def expect_reload(self, devices: Iterable[str]) -> None:
        """To be called after the broker's lists were written, before it is told to reload them."""
        try:
            self._expected_from = self._log_file.stat().st_size
        except OSError:
            self._expected_from = 0
        self._expected = list(devices)

    @property
    def has_reloaded(self) -> bool:
        """Return whether the broker has reloaded its lists, as far as the log was read."""
        return self._expected_from is None

    def look(self) -> list[Misuse]:
        """Read new lines; returns new misuse, each kind once per device after each start of the broker."""
        try:
            with self._log_file.open("rb") as log:
                if log.seek(0, 2) < self._position:  # it was rotated, perhaps with unread lines
                    self._position, self._rest, self.overlooked = 0, b"", True
                    self._expected_from = None if self._expected_from is None else 0
                log.seek(self._position)
                read = log.read(READ_BYTES)
        except OSError:  # it was removed; the next broker creates a new one
            self.overlooked = True
            return []
        end = self._position - len(self._rest)
        self._position += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        found = []
        for line in lines:
            end += len(line) + 1
            found.append(self._line(line.decode(errors="replace"), end))
        return [misuse for misuse in found if misuse]

    def _line(self, line: str, end: int) -> Misuse | None:
        if accepted := _ACCEPTED.fullmatch(line):
            self._accepted[accepted[1]] = self._reloads
            if len(self._accepted) > MOST_ACCEPTED:
                del self._accepted[next(iter(self._accepted))]  # it then counts as accepted long ago
        elif connected := _CONNECTED.fullmatch(line):
            return self._on_connected(*connected.groups())
        elif _NEW.match(line):
            self.overlooked = True
        elif ended := _ENDED.fullmatch(line):
            named = ended[1] or ended[2]
            self._forget(named if named in self._user_of else _PEER.sub("", named))
        elif _RELOADED.fullmatch(line):
            self._reloads += 1
            self._on_lists_read(end)
        elif _STARTED.fullmatch(line):
            self._began()
            self._on_lists_read(end)
        return None

    def _on_connected(self, address: str, client_id: str, clean: str, user: str) -> Misuse | None:
        self._forget(client_id)
        self._user_of[client_id] = user
        clients = self._clients_of.setdefault(user, set())
        clients.add(client_id)
        if client_id.endswith("]"):  # its end could be confused with that of another client
            self.overlooked = True
        if self._accepted.pop(address, 0) < self._revoked_at_reload.get(user, 0):
            self.to_end.add(client_id)
        if clean == "0":
            return self._new(user, "keeps a session at the broker, which the device's software never does", False)
        if len(clients) > MOST_CONNECTIONS:
            what = f"opened {len(clients)} connections at once, at most {MOST_CONNECTIONS} are allowed"
            return self._new(user, what, True)
        return None

    def _on_lists_read(self, end: int) -> None:
        if self._expected_from is None or end <= self._expected_from:
            return
        self._expected_from = None
        for device in self._expected:
            self._revoked_at_reload[device] = self._reloads
            self.to_end |= self._clients_of.get(device, set())

    def _forget(self, client_id: str) -> None:
        """Remove a connection that has ended or was replaced."""
        self.to_end.discard(client_id)
        user = self._user_of.pop(client_id, None)
        if user is not None:
            clients = self._clients_of[user]
            clients.discard(client_id)
            if not clients:
                del self._clients_of[user]

    def _new(self, device: str, what: str, shut_out: bool) -> Misuse | None:
        if (device, shut_out) in self._reported:
            return None
        self._reported.add((device, shut_out))
        return Misuse(device, what, shut_out)
