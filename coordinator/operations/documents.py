"""Answers of operations. The commands print them, and the HTTP API sends them as JSON."""

from typing import Any

from msgspec import Struct

from coordinator.record.leadership import ServiceHost
from coordinator.rounds.service.status import ServiceStatus
from coordinator.rounds.status import LiveStatus
from coordinator.run_view import RunHead


class SubmittedRun(Struct, frozen=True, kw_only=True):
    """A run that was put into the queue."""

    run: str
    status: str
    warning: str | None = None


class ChangedRun(Struct, frozen=True, kw_only=True):
    """A run after an operator's request."""

    run: str
    status: str
    paused_at: str | None  # ISO 8601, UTC; None: it is not paused
    done: str  # what happens, for people


class RunActivity(Struct, frozen=True, kw_only=True):
    """A run, and what its coordinator does."""

    head: RunHead
    submitted: bool  # for a service
    live: LiveStatus | None  # None: it is queued
    stale: bool = False  # nobody serves it, or its coordinator hangs


class BegunRun(Struct, frozen=True, kw_only=True):
    """A run that a service serves, or will resume."""

    run: str
    doing: str


class ServiceOverview(Struct, frozen=True, kw_only=True):
    """A service, its queue, and the processes that serve it."""

    status: ServiceStatus | None  # None: no service has served these runs
    alive: bool
    queued: list[str]  # in the order in which they begin
    begun: list[BegunRun]
    hosts: list[ServiceHost]  # connected to the database, the leader first; none with a record in a file

    def exists(self) -> bool:
        """Return whether there is a service, or a run for one."""
        return bool(self.alive or self.queued or self.begun or self.hosts)


class DeviceLabels(Struct, frozen=True, kw_only=True):
    """Labels that an operator set."""

    device: str
    labels: dict[str, str]


class OpenInvitation(Struct, frozen=True, kw_only=True):
    """A token for a device that nobody has used yet."""

    device: str
    expires: str  # ISO 8601, UTC


class DeviceList(Struct, frozen=True, kw_only=True):
    """The devices of a deployment, by name."""

    devices: list[dict[str, Any]]  # as `coordinator devices --json` prints them
    waiting: list[OpenInvitation]
    doubt: str | None  # of the clock of the server
    run: str | None  # whose standings the devices have


class Invitation(Struct, frozen=True, kw_only=True):
    """A token with which one device can join."""

    device: str
    token: str
    publisher: str  # whose graphs it will run; "": anybody's
    expires: str  # ISO 8601, UTC


class Done(Struct, frozen=True, kw_only=True):
    """Lines for the operator: the result, and what is left to do."""

    lines: list[str]
