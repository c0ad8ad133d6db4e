"""The state of one run while it is served, shared by its parts."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from coordinator.compute.integrity import VerifiedBlobs
from coordinator.config import RunConfig
from coordinator.record.record import Record
from coordinator.record.tables import RefusalRecord, ResultRecord, SavedState
from coordinator.rounds.deadlines import Links
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.presence import Presence, hello_spread_s
from coordinator.rounds.spans import RunSpans
from coordinator.rounds.tasks import Tasks
from coordinator.security.signing import GraphSigner, are_own
from fedvit.errors import LinkDown
from fedvit.policy import Needs, find_needs
from fedvit.program import Program, decode_program
from fedvit.resources import BudgetKind
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import REASON_LETTERS, FromCoordinator, Result, TaskKind
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

REFUSALS_KEPT = 2000
"""Refusals of one device that one process records: more would let the device fill the disk."""


PauseCause = Literal["operator", "disk", "files", "record", "object_store"]


class Pause(NamedTuple):
    """The reason of a paused run."""

    cause: PauseCause
    reason: str  # for people


@dataclass
class RunState:
    """`operator_log(line)` prints a line for the operator; `send(device, message)` publishes a message to a device.

    `unsent_bytes()` is what this process has not handed to the broker yet; `doing` is shown by `coordinator status`."""

    run: str
    config: RunConfig
    store: Record
    blobs: VerifiedBlobs
    topics: Topics
    operator_log: Callable[[str], None]
    send: Callable[[str, FromCoordinator], None]
    classes: tuple[str, ...]  # empty until the first devices have announced theirs
    unsent_bytes: Callable[[], int] = field(default=lambda: 0)
    limits: BrokerLimits = field(default_factory=BrokerLimits)  # of the broker
    signer: GraphSigner | None = None  # of graphs; None: nobody signs them
    needs: Needs | None = None  # of devices' policies; None: unknown until the Program is made
    offers_refused: bool = False  # a device that the run refuses is offered to another run
    not_allowing: dict[str, str] = field(default_factory=dict)  # devices whose policy does not allow the run -> its key
    number: int = 1  # the current or last round
    best: int = 0  # the best round, which is kept; 0: none
    doing: str = ""
    pause: Pause | None = None  # None: the run is not paused
    spans: RunSpans = field(default_factory=lambda: RunSpans("", None))
    epoch: int = 0  # of the link to the broker
    saved: SavedState | None = None  # the newest
    presence: Presence = field(default_factory=Presence)
    revoked: set[str] = field(default_factory=set)  # devices that may not take part, unless they send a hello again
    tasks: Tasks = field(default_factory=Tasks)
    links: Links = field(default_factory=Links)
    opened: OpenRound | None = None  # None between rounds
    counts_in: int = 1  # the round whose server step uses the results that are accepted now
    counted: set[str] = field(default_factory=set)  # devices with a result for that round
    # by the round that uses them and kind, then by round and device: so that they are read from the record once
    _results: dict[tuple[int, TaskKind], dict[tuple[int, str], ResultRecord]] = field(default_factory=dict)
    mirror: Callable[[Iterable[str]], None] | None = None  # see `RunMirror.put`; None: the run has none
    alert: Callable[[str, str, str | None], None] = lambda event, text, device: None  # see `Alerts.send`
    _programs: dict[str, Program] = field(default_factory=dict)  # by digest
    refusals: Counter[str] = field(default_factory=Counter)  # since this process began, by a word for the reason
    _refused: Counter[str] = field(default_factory=Counter)  # by device

    @property
    def spread_s(self) -> float:
        """The time over which this fleet sends its hellos."""
        return hello_spread_s(max(self.config.devices, len(self.presence)))

    def newest(self) -> SavedState:
        if self.saved is None:
            raise LinkDown("FV1512", "the run is not prepared yet")
        return self.saved

    def program(self, digest: str) -> Program:
        """Load a Program from the blobs. Raises DamagedBlob."""
        if digest not in self._programs:
            self._programs[digest] = decode_program(self.blobs.get(digest))
        return self._programs[digest]

    def find_signatures(self, program: Program) -> tuple[bytes, ...]:
        """Return a signature for each graph of a Program; none if one is missing, or all graphs are fedvit's own."""
        if self.signer is None or are_own(graphs := program.digests_by_graph()):
            return ()
        return self.signer.find_signatures(graphs) or ()

    def find_needs(self, program: Program) -> Needs:
        """Return what a Program needs of the policies of devices."""
        needs = find_needs(program)
        if are_own(program.digests_by_graph()):
            return needs
        publisher = self.signer.publisher if self.signer and self.find_signatures(program) else ""
        return msgspec.structs.replace(needs, publisher=publisher)

    def set_doing(self, text: str) -> None:
        self.doing = text

    def open(self, opened: OpenRound) -> None:
        """Open a round. Results that the store already has are accepted at once."""
        self.opened = opened
        if opened.kind == "train":
            self.count_in(opened.number)
        else:
            self._load_results(opened.number, opened.kind)
        for device in self.store.tasks.find_answered(self.run, opened.number, opened.kind):
            if device in opened.cohort:
                opened.accept(device)

    def count_in(self, number: int) -> None:
        """From now on training results count in the server step of this round."""
        self.counts_in = number
        self._results = {key: results for key, results in self._results.items() if key[0] >= number - 1}
        self.counted = {device for _, device in self._load_results(number, "train")}

    def results(self, number: int, kind: TaskKind) -> list[ResultRecord]:
        """Accepted results that the server step, or the evaluation, of a round uses, by round and device.

        Each is in the record. Those of earlier processes were read from it when the round was opened.
        """
        if (known := self._results.get((number, kind))) is None:
            known = self._load_results(number, kind)
        return [known[key] for key in sorted(known)]

    def add_results(self, accepted: Iterable[ResultRecord]) -> None:
        """Results were accepted, and are in the record."""
        for result in accepted:
            if (known := self._results.get((result.used_in, result.kind))) is not None:
                known.setdefault((result.round, result.device), result)  # as in the record, the first one counts

    def _load_results(self, number: int, kind: TaskKind) -> dict[tuple[int, str], ResultRecord]:
        found = self.store.tasks.read_used_in(self.run, number, kind)
        self._results[number, kind] = loaded = {(result.round, result.device): result for result in found}
        return loaded

    def why_too_late(self, result: Result) -> str | None:
        """Return the reason why a result is too late for the round in which it would count; None if it is not."""
        config, counts_in = self.config, self.counts_in
        if result.kind != "train" or result.round == counts_in:
            return None
        if counts_in > config.rounds:
            return f"late: round {result.round} is closed for train results, and it was the last one"
        staleness, most = counts_in - result.round, config.max_staleness
        if staleness > most:
            return f"late: made for round {result.round}, {staleness} rounds ago; at most {most} are allowed"
        return None

    def waits_for_late(self, kind: str) -> bool:
        """Return whether a device continues its task after its round has closed."""
        return kind == "train" and self.config.asks_cohorts() and self.config.late != "refuse"

    def refuse(
        self,
        device: str,
        kind: str,
        reason: str,
        round_number: int | None = None,
        broke: BudgetKind | None = None,
        *,
        lost: bool = False,
        attempt: int = 0,
    ) -> None:
        """Record a refusal, or with `lost` something that never arrived; `broke`: the budget that was exceeded;
        `attempt`: at the task, 0 if it is not known."""
        self.refusals["no_result" if lost else f"{broke}_budget" if broke else kind] += 1
        self._refused[device] += 1
        reason = reason[:REASON_LETTERS]  # it may quote a device
        if self._refused[device] > REFUSALS_KEPT:
            return
        if self._refused[device] == REFUSALS_KEPT:
            reason = f"{reason[:400]} (later refusals of this device are not recorded)"
        number = round_number if round_number is not None else (self.opened.number if self.opened else None)
        self.store.devices.add_refusal(self.run, RefusalRecord(number, device, kind, reason, broke=broke, lost=lost))
        of_attempt = {"attempt": attempt} if attempt else {}
        log.warning("refused", extra={"device": device, "round": number, "kind": kind, "reason": reason, **of_attempt})
