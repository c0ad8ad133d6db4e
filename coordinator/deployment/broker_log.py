"""What mosquitto's log says of a deployment's broker: its connections, its misuse, and when it has read its lists.

mosquitto counts neither a user's connections nor its sessions, and lists none. Its log names the user of each
connection, from the certificate, at the end of a line whose beginning no client chooses; so no device can be made to
look guilty. It cuts lines at 1000 bytes, so a client with a long id hides its user: then `overlooked` is true.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MOST_CONNECTIONS = 32
"""Of one device at once. It has two, and for a minute those of a process before it whose power failed."""
MOST_ACCEPTED = 4096
"""Connections that have not said their client id yet, of which is kept when they were accepted."""
READ_BYTES = 1024 * 1024
"""Of the log at a time."""

_TIME = r"[0-9T:-]+: "
_ACCEPTED = re.compile(_TIME + r"New connection from (\S+) on port \d+\.")
_NEW = re.compile(_TIME + r"New client connected from (\S+) as ")
_CONNECTED = re.compile(_TIME + r"New client connected from (\S+) as (.*) \(p\d, c([01]), k\d+, u'([^']*)'\)\.")
# a comma is in no reason; another line, which ends in "already connected, closing old connection.", has one
_ENDED = re.compile(
    _TIME + r"(?:Client (.*) (?:disconnected(?:\.|, not authorised\.|[: ][^,]*)|closed its connection\.|"
    r"has exceeded timeout, disconnecting\.)|Bad socket read/write on client (.*): [^:,]*)"
)
_PEER = re.compile(r" \[\S+\]$")
"""Newer versions of mosquitto add the address to the client's id."""
_STARTED = re.compile(_TIME + r"mosquitto version \S+ starting")
_RELOADED = re.compile(_TIME + r"Reloading config\.")


class Misuse(NamedTuple):
    """What a device did that no software of ours does."""

    device: str
    what: str
    shut_out: bool  # it keeps others from the broker: it has to be revoked


class BrokerLog:
    """Reads a broker's log as it grows, from `position` on, where the log of this broker begins.

    Some certificates of a device may become invalid, with `expect_reload`. Once the broker has read its lists anew,
    connections under that device's name that were accepted before are in `to_end`, by client id.
    """

    def __init__(self, log_file: Path, position: int) -> None:
        self._log_file = log_file
        self._position = position
        self._rest = b""
        self._expected_from: int | None = None  # position of the log
        self._expected: list[str] = []
        self._began()

    def _began(self) -> None:
        """A broker that has just started knows nobody, and has read its lists."""
        self.to_end: set[str] = set()
        self.overlooked = False
        """Whether a connection may be open whose user or client id is not known."""
        self._reloads = 0
        self._cut: dict[str, int] = {}  # the reload after which connections of a user are accepted again
        self._accepted: dict[str, int] = {}  # by address: reloads before it, of connections without a client id yet
        self._user_of: dict[str, str] = {}  # by client id
        self._clients_of: dict[str, set[str]] = {}
        self._reported: set[tuple[str, bool]] = set()

    def expect_reload(self, devices: Iterable[str]) -> None:
        """To be called when the broker's lists are written, before it is told to read them."""
        try:
            self._expected_from = self._log_file.stat().st_size
        except OSError:
            self._expected_from = 0
        self._expected = list(devices)

    @property
    def reloaded(self) -> bool:
        """Whether the broker has read the lists that it had to, as far as `look` has come."""
        return self._expected_from is None

    def look(self) -> list[Misuse]:
        """What is new; each device's sessions and its connections are named once after each start of the broker."""
        try:
            with self._log_file.open("rb") as log:
                if log.seek(0, 2) < self._position:  # it was put aside, perhaps with lines that were not read
                    self._position, self._rest, self.overlooked = 0, b"", True
                    self._expected_from = None if self._expected_from is None else 0
                log.seek(self._position)
                read = log.read(READ_BYTES)
        except OSError:  # somebody took it away; the next broker makes a new one
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
                del self._accepted[next(iter(self._accepted))]  # it counts as accepted long ago
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
        if client_id.endswith("]"):  # its end could not be told from that of another client
            self.overlooked = True
        if self._accepted.pop(address, 0) < self._cut.get(user, 0):
            self.to_end.add(client_id)
        if clean == "0":
            return self._new(user, "keeps a session at the broker, which the device's software never does", False)
        if len(clients) > MOST_CONNECTIONS:
            what = f"opened {len(clients)} connections at once, at most {MOST_CONNECTIONS} are borne"
            return self._new(user, what, True)
        return None

    def _on_lists_read(self, end: int) -> None:
        if self._expected_from is None or end <= self._expected_from:
            return
        self._expected_from = None
        for device in self._expected:
            self._cut[device] = self._reloads
            self.to_end |= self._clients_of.get(device, set())

    def _forget(self, client_id: str) -> None:
        """It has ended, or another connection has taken its place."""
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
