"""Secure sums of a run: its devices' results are added up before the server step, and nobody sees a single one.

A sum that fails is repeated with a higher attempt and new keys. When reveals are asked for, that is on the disk first:
devices reveal once only, so that a coordinator that was killed then asks them again for the same sum.
"""

import logging
import math
import time
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.record.backups import Accepted, Backups
from coordinator.record.tables import SUM
from coordinator.rounds.inbox import Inbox
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.state import RunState
from coordinator.rounds.sum_terms import describe_training, find_denominator, find_largest, find_noise, make_terms
from fedvit.errors import BadPayload, EmptyCohort
from fedvit.files import atomic_write
from fedvit.program import Program
from fedvit.quantities import format_count
from fedvit.resources import ResourceUse
from fedvit.secure.layout import Layout, read_evaluation, read_training
from fedvit.secure.server import STEPS, SumServer, SumState
from fedvit.secure.vectors import Vector, count_bytes
from fedvit.tensors import pack
from fedvit.transport.blob_receiver import Finished
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import (
    ClassCount,
    Manifest,
    Result,
    SumAnswer,
    SumId,
    SumMasked,
    SumRefused,
    TaskKind,
)

log = logging.getLogger(__name__)

FILE = "sum.msgpack"
"""In a run's folder: the newest sum."""
RESEND_S = 10.0
"""A question without an answer is sent again after this time."""
ATTEMPTS = 3
"""A sum that loses devices begins again with those that are left, until it has begun so often."""
AT_ONCE = 8
"""Masked results that are fetched at the same time."""


class KeptSum(Struct, kw_only=True):
    """Memory of the newest sum, for a coordinator that was restarted."""

    sum: SumId
    state: SumState | None = None  # once reveals are asked for
    masked: dict[str, str] = {}  # device -> digest of its masked result


class SumFile:
    """Keeps the newest sum on the disk. Raises StorageFailed."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, kept: KeptSum) -> None:
        atomic_write(self._file, msgspec.msgpack.encode(kept))

    def read(self, number: int, kind: TaskKind) -> KeptSum | None:
        """Read the newest sum; None if it is not of this round, or its file is damaged."""
        try:
            kept = msgspec.msgpack.decode(self._file.read_bytes(), type=KeptSum)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("damaged file", extra={"path": str(self._file), "reason": str(error)})
            return None
        return kept if (kept.sum.round, kept.sum.kind) == (number, kind) else None

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)


class SumRounds:
    """The sums of one run, one at a time. Messages come while `add_up` waits for them."""

    def __init__(self, state: RunState, inbox: Inbox, exchange: BlobExchange, backups: Backups, folder: Path) -> None:
        self._state = state
        self._inbox = inbox
        self._exchange = exchange
        self._backups = backups
        self._file = SumFile(folder / FILE)
        self._server: SumServer | None = None
        self._layout = Layout({}, 0)
        self._kept = KeptSum(sum=SumId("", 0, "train", 0))
        self._waiting: dict[str, Manifest] = {}  # masked results that are to be fetched
        self._fetching: set[str] = set()
        self._until = math.inf  # monotonic; when the step ends at the latest
        self._sent_at = -math.inf
        self._abandoned_since: float | None = None

    # --- one sum ----------------------------------------------------------------------------------------

    def add_up(self, opened: OpenRound) -> None:
        """Add up the results of a closed round, and store the sum as one more result of it.

        Raises EmptyCohort if that failed; nothing is revealed then.
        """
        state, number, kind = self._state, opened.number, opened.kind
        results = {result.device: result for result in state.results(number, kind)}
        if SUM in results or not (results or opened.cohort):
            return
        program = self._find_program(opened, number, kind)
        self._layout = Layout.of_program(program, kind)
        server, devices = self._resume(number, kind), sorted(results)
        for left in reversed(range(ATTEMPTS)):
            devices = self._attempt(server or self._begin(devices, number, kind), program, is_last=not left)
            if not devices:
                return
            server = None
            count = format_count(len(devices), "device")
            state.operator_log(f"round {number}: secure sum again ({kind}), with the {count} that are left")

    def _attempt(self, server: SumServer, program: Program, *, is_last: bool) -> list[str]:
        """Add up and store the sum, or return the devices for another attempt. Raises EmptyCohort."""
        self._server = server
        try:
            while not (server.state.step == STEPS[-1] and server.is_step_complete):
                self._run_step(server)
                if server.state.step == STEPS[-1]:
                    break
                if devices := server.close_step(may_repeat=not is_last):
                    return devices
                if server.state.step == STEPS[-1]:  # before the first request to reveal is sent
                    self._kept.state = server.state
                    self._file.write(self._kept)
            server.close_step()
            self._store(server, program, self._inbox.in_background(server.unmask))
            return []
        finally:
            self._server = None
            for device in self._fetching:
                self._exchange.cancel(device)
            self._waiting, self._fetching = {}, set()

    def _find_program(self, opened: OpenRound, number: int, kind: TaskKind) -> Program:
        if work := next(iter(opened.work.values()), None):
            return work.program
        newest = self._state.store.runs.read(self._state.run).program
        if newest is None:
            raise EmptyCohort("FV1521", f"round {number}: the Program of the {kind} results is unknown")
        return self._state.program(newest)

    def _begin(self, devices: list[str], number: int, kind: TaskKind) -> SumServer:
        """Begin a new attempt with the devices that are online."""
        state, config = self._state, self._state.config.sums
        until = time.monotonic() + min(state.config.rejoin_grace_s, config.step_s)
        self._inbox.pump(lambda: all(map(state.presence.is_online, devices)), deadline=until)
        invited = [device for device in devices if state.presence.is_online(device) and device not in state.revoked]
        before = self._file.read(number, kind)
        sum_id = SumId(state.run, number, kind, before.sum.attempt + 1 if before else 1)
        self._kept = KeptSum(sum=sum_id)
        self._file.write(self._kept)
        images = [state.presence[device].hello.train_samples for device in invited]
        make = partial(make_terms, self._layout, state.config, len(invited), max([1, *images]))
        find = state.store, state.run, state.config, number
        terms = make(find_noise(*find), find_largest(*find)) if kind == "train" else make()
        return self._make_server(SumState(sum=sum_id, terms=terms), invited)

    def _resume(self, number: int, kind: TaskKind) -> SumServer | None:
        """Continue a sum whose reveals were asked for by an earlier process, or in an earlier attempt of this one."""
        state, kept = self._state, self._file.read(number, kind)
        if kept is None or kept.state is None:
            return None
        self._kept = kept
        server = self._make_server(kept.state, kept.state.masked)
        for device in kept.state.masked:
            server.restore_masked(device, state.blobs.get(kept.masked[device]))
        state.operator_log(f"round {number}: the secure sum continues")
        return server

    def _make_server(self, sum_state: SumState, devices: list[str]) -> SumServer:
        return SumServer(sum_state, devices, words=self._layout.words, exact=self._layout.exact)

    # --- steps ------------------------------------------------------------------------------------------

    def _run_step(self, server: SumServer) -> None:
        """Ask the devices of a step until all have answered, or its time is over."""
        state, sum_id = self._state, server.state.sum
        state.doing = (
            f"round {sum_id.round}/{state.config.rounds}: secure sum, {server.state.step}, attempt {sum_id.attempt}"
        )
        self._until = time.monotonic() + state.config.sums.step_s
        self._sent_at, self._abandoned_since = -math.inf, None
        self._inbox.pump(lambda: self._is_over(server))

    def _is_over(self, server: SumServer) -> bool:
        now, presence = time.monotonic(), self._state.presence
        if server.is_step_complete or now >= self._until:
            return True
        if now >= self._sent_at + RESEND_S:
            self._sent_at = now
            for device in list(server.waiting):
                self._ask(device)
        for device in self._fetching:
            if self._exchange.take_progress(device)[1]:
                self._until = max(self._until, now + self._state.config.sums.step_s)
        if any(map(presence.is_online, server.waiting)):
            self._abandoned_since = None
            return False
        self._abandoned_since = self._abandoned_since or now
        return now >= self._abandoned_since + self._state.config.rejoin_grace_s

    def _ask(self, device: str) -> None:
        """Send a device the question of the current step, if its answer is missing."""
        server = self._server
        if server is None or device not in server.waiting or not self._state.presence.is_online(device):
            return
        if device in self._fetching or device in self._waiting:
            return
        try:
            self._state.send(device, server.question(device))
        except BadPayload as error:  # too many devices for a message
            server.drop(device, str(error))

    # --- messages ---------------------------------------------------------------------------------------

    def on_answer(self, device: str, answer: SumAnswer) -> None:
        """Take the answer of a device. One that is wrong ends its part in the sum."""
        server = self._server
        if server is None or answer.sum != server.state.sum:
            return
        try:
            match answer:
                case SumRefused():
                    self._drop(device, answer.reason)
                case SumMasked():
                    self._take_masked(device, answer)
                case _:
                    server.take(device, answer)
        except BadPayload as error:
            self._drop(device, str(error))

    def on_arrival(self, device: str) -> None:
        """A device sent a hello: it gets its question again."""
        self.stop_fetching(device)
        self._ask(device)

    def stop_fetching(self, device: str) -> None:
        """Do not fetch what a device announced; those that wait get its place."""
        if device in self._fetching:
            self._exchange.cancel(device)
            self._fetching.discard(device)
        self._waiting.pop(device, None)
        self._fetch_waiting()

    def expel(self, device: str) -> None:
        """Go on without a device that may not take part any longer."""
        if self._server:
            self._drop(device, "it is revoked")

    def _drop(self, device: str, reason: str) -> None:
        assert self._server is not None  # checked by the callers
        if device in self._server.waiting:
            self._server.drop(device, reason)
            self.stop_fetching(device)
            self._state.refuse(device, "sum", reason)
            self._state.operator_log(f"{device} leaves the secure sum: {reason}")

    def _take_masked(self, device: str, answer: SumMasked) -> None:
        server, vector = self._server, answer.vector
        if server is None or server.state.step != "masked" or device not in server.waiting:
            return
        expected = count_bytes(self._layout.words, self._layout.exact, server.state.terms.bits)
        if vector.size != expected:
            raise BadPayload("FV2312", f"a masked result of {vector.size} bytes, expected {expected}")
        if answer.inline:
            if (digest := self._state.blobs.put(answer.inline).digest) != vector.digest:
                raise BadPayload("FV2312", f"a masked result has digest {digest}, expected {vector.digest}")
            self._add_masked(device, vector.digest)
        elif device not in self._fetching:
            self._waiting[device] = vector
            self._fetch_waiting()

    def _fetch_waiting(self) -> None:
        while self._waiting and len(self._fetching) < AT_ONCE:
            device = next(iter(self._waiting))
            vector = self._waiting.pop(device)
            self._fetching.add(device)
            topic = self._state.topics.upload(device, vector.digest)
            self._exchange.fetch(vector, device, topic, self._make_continuation(device, self._server))

    def _make_continuation(self, device: str, server: SumServer | None) -> Finished:
        def go_on(manifest: Manifest, error: Exception | None) -> None:
            if self._server is not server or device not in self._fetching:
                return
            self._fetching.discard(device)
            if error is None:
                self._add_masked(device, manifest.digest)
            elif isinstance(error, BadPayload):
                self._drop(device, str(error))
            else:
                raise error
            self._fetch_waiting()

        return go_on

    def _add_masked(self, device: str, digest: str) -> None:
        assert self._server is not None  # checked by the callers
        self._kept.masked[device] = digest
        self._server.take_masked(device, self._state.blobs.get(digest))

    # --- the outcome ------------------------------------------------------------------------------------

    def _store(self, server: SumServer, program: Program, total: Vector) -> None:
        """Store the sum as one result of the round."""
        state, sum_id, terms, devices = self._state, server.state.sum, server.state.terms, len(server.state.masked)
        metrics, upload, by_class = {"devices": float(devices)}, None, tuple[ClassCount, ...]()
        metrics |= {"attempt": float(sum_id.attempt)}
        metrics |= {f"left_{step}": float(count) for step, count in server.count_left().items()}
        if sum_id.kind == "train":
            denominator = find_denominator(state.config)
            trained = read_training(self._layout, total, terms, denominator)
            samples = trained.samples
            upload = state.blobs.put(pack(trained.mean))
            metrics |= describe_training(trained, terms, denominator, began=len(server.state.keys), summed=devices)
        else:
            evaluated = read_evaluation(total, devices)
            samples = evaluated.samples
            metrics["correct"] = float(evaluated.correct)
            if program.evaluate.counts_classes:
                by_class = tuple(
                    ClassCount(label, right, images)
                    for label, (images, right) in enumerate(evaluated.by_class)
                    if images
                )
        result = Result(
            sum_id.run, sum_id.round, sum_id.kind, samples, metrics, ResourceUse(), upload, by_class=by_class
        )
        accepted = [(SUM, result, sum_id.round if sum_id.kind == "train" else None)]
        self._backups.note(Accepted(sum_id.round, None, None, accepted))
        state.add_results(state.store.tasks.add_results(accepted))
        self._file.remove()
        left = len(server.state.keys) - devices
        without = f", {left} left during the sum" if left else ""
        state.operator_log(
            f"round {sum_id.round}: secure sum of {format_count(devices, 'device')}{without} ({sum_id.kind})"
        )
