"""One coordinator a federation: each tells on the federation's topic what it is, and the one that came later ends.

Two of them would make devices drop one's results for the other's. How long each has held the federation is what they
compare, so that clocks need not agree.
"""

import logging
import secrets
import socket
import time
from collections.abc import Callable

from fedvit.errors import ConfigError
from fedvit.quantities import format_seconds
from fedvit.transport.base import Transport, Will
from fedvit.wire.messages import CoordinatorState, encode
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

LONGEST_NAME = 64


class FederationTaken(ConfigError):
    """Another coordinator serves the federation."""


class Lease:
    """Of one process; `run` is empty where it is a service with several; `say(line)` is for the operator."""

    def __init__(self, transport: Transport, topics: Topics, run: str, say: Callable[[str], None]) -> None:
        self.owner = secrets.token_hex(8)
        self.is_held = True  # until another coordinator is found to have the federation
        self._transport = transport
        self._topics = topics
        self._run = run
        self._say = say
        self._since = time.monotonic()
        self._epoch = 0
        self._warned: set[str] = set()  # owners that the operator was told of

    @property
    def will(self) -> Will:
        """What the broker says when this process is gone."""
        return Will(self._topics.coordinator_state, encode(CoordinatorState(0, alive=False, owner=self.owner)))

    def renew(self) -> int:
        """The link is up: a new epoch, which makes every device say hello, since wills may have been missed."""
        self._epoch = self._transport.shared_epoch or secrets.randbits(48) + 1
        self._tell()
        return self._epoch

    def end(self) -> None:
        """This process leaves."""
        self._transport.publish(*self.will, qos=1)

    def heard(self, other: CoordinatorState) -> None:
        """What a coordinator of this federation tells. Raises FederationTaken where this one has to end."""
        if not self.is_held or not other.alive or other.owner in ("", self.owner):
            return
        mine = (time.monotonic() - self._since, self.owner)
        first = (other.held_s, other.owner) > mine
        if other.run == self._run != "":  # it was taken up elsewhere: the older process is one that everybody gave up
            first = not first
        if first:
            self.is_held = False
            raise FederationTaken(
                f"federation {self._topics.federation!r} is served by another coordinator: {_named(other)}, for "
                f"{format_seconds(other.held_s)}. "
                "Stop that one, or take another --federation"
            )
        if other.owner not in self._warned:
            self._warned.add(other.owner)
            self._say(f"another coordinator ({_named(other)}) began to serve this federation, and ends")
            log.warning("another coordinator", extra={"run": other.run, "host": other.host})
        self._tell()

    def state(self) -> CoordinatorState:
        """What this process says of itself."""
        return CoordinatorState(
            self._epoch,
            alive=True,
            owner=self.owner,
            run=self._run[:LONGEST_NAME],
            host=socket.gethostname()[:LONGEST_NAME],
            held_s=time.monotonic() - self._since,
        )

    def _tell(self) -> None:
        self._transport.publish(self._topics.coordinator_state, encode(self.state()), qos=1)


def _named(other: CoordinatorState) -> str:
    what = f"run {other.run!r}" if other.run else "a service (`coordinator serve`)"
    return f"{what} on {other.host or 'a host without a name'}"
