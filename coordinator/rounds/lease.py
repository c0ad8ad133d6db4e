"""One coordinator per federation: each publishes its state on the federation's topic, and the later one ends.

With two coordinators, devices would drop the results of one for the other. They compare how long each has held the
federation, so that clocks need not agree. Of two services with one record in PostgreSQL the database decides which one
leads; see `coordinator.record.leadership`.
"""

import logging
import secrets
import socket
import time
from collections.abc import Callable

from coordinator.rounds.presence import hello_spread_s
from fedvit.errors import ConfigError
from fedvit.quantities import format_seconds
from fedvit.transport.base import Transport, Will
from fedvit.wire.messages import CoordinatorState, encode, leading_epoch, term_of
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

LONGEST_NAME = 64


class FederationTaken(ConfigError):
    """Another coordinator serves the federation."""


class Lease:
    """The lease of one process; `run` is empty for a service; `operator_log(line)` prints a line for the operator.
    `term`: in which a service leads others that use the same database; 0: the database does not decide."""

    def __init__(
        self, transport: Transport, topics: Topics, run: str, operator_log: Callable[[str], None], term: int = 0
    ) -> None:
        self.owner = secrets.token_hex(8)
        self.is_held = True  # until another coordinator turns out to hold the federation
        self._transport = transport
        self._topics = topics
        self._run = run
        self._term = term
        self._operator_log = operator_log
        self._since = time.monotonic()
        self._epoch = 0
        self._spread_s = hello_spread_s(0)
        self._warned: set[str] = set()  # owners that were reported to the operator

    @property
    def will(self) -> Will:
        """The last will: this process has ended."""
        return Will(self._topics.coordinator_state, encode(CoordinatorState(0, alive=False, owner=self.owner)))

    def renew(self, spread_s: float) -> int:
        """The link is up: a new epoch makes every device send its hello, since last wills may have been missed.

        The hellos are spread over `spread_s`."""
        self._spread_s = spread_s
        self._epoch = self._transport.shared_epoch or self._new_epoch()
        self._publish_state()
        return self._epoch

    def _new_epoch(self) -> int:
        return leading_epoch(self._term, secrets.randbits(32)) if self._term else secrets.randbits(48) + 1

    def end(self) -> None:
        """Publish that this process ends."""
        self._transport.publish(*self.will, qos=1)

    def on_coordinator(self, other: CoordinatorState) -> None:
        """Handle the state of a coordinator of this federation. Raises FederationTaken if this process has to end."""
        if not self.is_held or not other.alive or other.owner in ("", self.owner):
            return
        mine = (time.monotonic() - self._since, self.owner)
        first = (other.held_s, other.owner) > mine
        if other.run == self._run != "":  # the run was resumed elsewhere: the older process hangs or was given up
            first = not first
        if self._term and (theirs := term_of(other.epoch)):
            if theirs > self._term:  # this process no longer leads, as it will hear from the database
                return
            first = False
        if first:
            self.is_held = False
            raise FederationTaken(
                "FV1215",
                f"federation {self._topics.federation!r} is served by another coordinator: {_named(other)}, for "
                f"{format_seconds(other.held_s)}. "
                "Stop it, or choose another --federation",
            )
        if other.owner not in self._warned:
            self._warned.add(other.owner)
            self._operator_log(f"another coordinator ({_named(other)}) tried to serve this federation, and ends")
            log.warning("another coordinator", extra={"run": other.run, "host": other.host})
        self._publish_state()

    def state(self) -> CoordinatorState:
        """The published state of this process."""
        return CoordinatorState(
            self._epoch,
            alive=True,
            owner=self.owner,
            run=self._run[:LONGEST_NAME],
            host=socket.gethostname()[:LONGEST_NAME],
            held_s=time.monotonic() - self._since,
            spread_s=self._spread_s,
            clock_s=max(0.0, time.time()),
        )

    def _publish_state(self) -> None:
        self._transport.publish(self._topics.coordinator_state, encode(self.state()), qos=1)


def _named(other: CoordinatorState) -> str:
    what = f"run {other.run!r}" if other.run else "a service (`coordinator serve`)"
    return f"{what} on {other.host or 'a host without a name'}"
