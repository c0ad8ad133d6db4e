"""Misuse of a deployment's broker by devices that were let in, seen in mosquitto's log.

mosquitto counts neither a user's connections nor its sessions. Its log names the user of each connection, from the
certificate, at the end of a line whose beginning no client chooses; so no device can be made to look guilty.
"""

import re
from pathlib import Path
from typing import NamedTuple

MOST_CONNECTIONS = 32
"""Of one device at once. It has two, and for a minute those of a process before it whose power failed."""
READ_BYTES = 1024 * 1024
"""Of the log at a time."""

_CONNECTED = re.compile(r"[0-9T:-]+: New client connected from \S+ as (.*) \(p\d, c([01]), k\d+, u'([^']*)'\)\.")
_ENDED = re.compile(r"[0-9T:-]+: Client (.*) (?:disconnected|closed its connection|has exceeded timeout)\b.*")
_PEER = re.compile(r" \[\S+\]$")
"""Newer versions of mosquitto add the address to the client's id."""
_STARTED = re.compile(r"[0-9T:-]+: mosquitto version \S+ starting")


class Misuse(NamedTuple):
    """What a device did that no software of ours does."""

    device: str
    what: str
    shut_out: bool  # it keeps others from the broker: it has to be revoked


class MisuseWatch:
    """Reads a broker's log as it grows."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._position = log_file.stat().st_size
        self._rest = b""
        self._user_of: dict[str, str] = {}  # by client id, of connections that are open
        self._reported: set[tuple[str, bool]] = set()

    def look(self) -> list[Misuse]:
        """What is new; each device's sessions and its connections are named once after each start of the broker."""
        try:
            with self._log_file.open("rb") as log:
                if log.seek(0, 2) < self._position:  # it began anew
                    self._position, self._rest = 0, b""
                log.seek(self._position)
                read = log.read(READ_BYTES)
        except OSError:
            return []
        self._position += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        found = [self._line(line.decode(errors="replace")) for line in lines]
        return [misuse for misuse in found if misuse]

    def _line(self, line: str) -> Misuse | None:
        if _STARTED.fullmatch(line):
            self._user_of.clear()
            self._reported.clear()
        elif ended := _ENDED.fullmatch(line):
            self._user_of.pop(_PEER.sub("", ended[1]), None)
        elif connected := _CONNECTED.fullmatch(line):
            client_id, clean, user = connected.groups()
            self._user_of[client_id] = user
            if clean == "0":
                return self._new(user, "keeps a session at the broker, which the device's software never does", False)
            open_now = sum(each == user for each in self._user_of.values())
            if open_now > MOST_CONNECTIONS:
                what = f"opened {open_now} connections at once, at most {MOST_CONNECTIONS} are borne"
                return self._new(user, what, True)
        return None

    def _new(self, device: str, what: str, shut_out: bool) -> Misuse | None:
        if (device, shut_out) in self._reported:
            return None
        self._reported.add((device, shut_out))
        return Misuse(device, what, shut_out)
