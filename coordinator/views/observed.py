"""Sources of the metrics for Prometheus, which need no prometheus_client."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.record.record import Record
from coordinator.rounds.coordinator import Coordinator
from coordinator.security.expiry import CertificateEnds
from fedvit.timings import LoopWatch
from fedvit.transport.base import Transport


class Served(NamedTuple):
    """A run that is being served."""

    coordinator: Coordinator
    loop: LoopWatch

    @property
    def run(self) -> str:
        return self.coordinator.state.run


class Observed(NamedTuple):
    """Sources of a collector. `loops`: further loops of the process by name, each with its inbox's transport."""

    link: Transport
    is_connected: Callable[[], bool]
    store: Record
    folder: Path  # of all runs
    served: Callable[[], Sequence[Served]]
    loops: dict[str, LoopWatch]
    backup_age_s: Callable[[], float] | None = None  # of the newest backup; None: none are made here
    certificates: Callable[[], CertificateEnds | None] | None = None  # None: there is no deployment
