"""Sources of the metrics for Prometheus, which need no prometheus_client."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.record.leadership import Leadership
from coordinator.record.record import Record
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.service.regular import CleanUps
from coordinator.security.expiry import CertificateEnds
from fedvit.errors import NoRoom
from fedvit.timings import LoopWatch
from fedvit.transport.base import Transport


class Served(NamedTuple):
    """A run that is being served."""

    coordinator: Coordinator
    loop: LoopWatch

    @property
    def run(self) -> str:
        return self.coordinator.state.run


class ObservedService(NamedTuple):
    """Sources that a service has beside those of its runs."""

    federation: str
    leadership: Leadership | None  # None: the record is a file, which no other service can use
    clean_ups: CleanUps | None  # None: it makes none
    find_trouble: Callable[[], NoRoom | None]  # why it begins no run


class Observed(NamedTuple):
    """Sources of a collector. `loops`: further loops of the process by name, each with its inbox's transport."""

    link: Transport
    is_connected: Callable[[], bool]
    store: Record
    folder: Path  # of all runs
    served: Callable[[], Sequence[Served]]
    loops: dict[str, LoopWatch]
    backup_age_s: Callable[[], float] | None = None  # of the newest backup; None: none are made here
    service: ObservedService | None = None  # None: the process serves one run
    certificates: Callable[[], CertificateEnds | None] | None = None  # None: there is no deployment
