"""Secure sums in memory: devices and a coordinator that answer each other, with devices that drop out."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from coordinator.rounds.sums import ATTEMPTS
from fedvit.errors import BadPayload, EmptyCohort, NotAllowed
from fedvit.secure.attempt import Attempt, begin_attempt
from fedvit.secure.device import DeviceSum
from fedvit.secure.neighbours import count_needed_holders
from fedvit.secure.server import STEPS, SumServer, SumState
from fedvit.secure.signing import Credentials
from fedvit.secure.vectors import Vector, pack_vector
from fedvit.wire.messages import (
    SumAnswer,
    SumId,
    SumInbox,
    SumInvite,
    SumKeys,
    SumPeers,
    SumPublicKeys,
    SumQuestion,
    SumReveal,
    SumShares,
    SumSigned,
    SumSurvivors,
    SumTerms,
    decode,
    encode,
)

SUM = SumId("run", 1, "train", 1)


def make_terms(devices: int, neighbours: int = 8, bits: int = 32) -> SumTerms:
    return SumTerms("blake3:00", devices, neighbours, bits, 4.0, 100)  # type: ignore[arg-type]


def make_vector(draw: np.random.Generator, words: int, exact: int, bits: int) -> Vector:
    return Vector(
        draw.integers(0, 1 << bits, words, np.uint32, endpoint=False)
        if bits < 32
        else draw.integers(0, 1 << 32, words, np.uint32),
        draw.integers(0, 1 << 40, exact, np.uint64),
    )


class MemoryDevice:
    """A device of a sum; each message makes it anew from what it kept, as after `kill -9`."""

    def __init__(self, name: str, payload: Vector, credentials: Credentials | None = None, min_cohort: int = 1) -> None:
        self.name, self.payload = name, payload
        self.kept: Attempt | None = None
        self.revealed: list[tuple[list[str], list[str]]] = []  # shares of own masks, and of keys
        self._credentials = credentials
        self._min_cohort = min_cohort

    def answer(self, question: SumQuestion) -> SumAnswer | bytes:
        question = decode(encode(question))  # type: ignore[assignment]
        before = self.kept
        attempt = begin_attempt(question, before) if isinstance(question, SumInvite) else before
        assert attempt is not None
        if attempt.invite.sum != question.sum:
            raise NotAllowed("FV1451", "another attempt")
        part = DeviceSum(self.name, attempt, self.keep, credentials=self._credentials, min_cohort=self._min_cohort)
        match question:
            case SumInvite():
                return decode(encode(part.answer_invite()))  # type: ignore[return-value]
            case SumPeers():
                return decode(encode(part.answer_peers(question)))  # type: ignore[return-value]
            case SumInbox():
                part.take_inbox(question)
                return part.mask(self.payload)
            case SumSurvivors():
                return decode(encode(part.answer_survivors(question)))  # type: ignore[return-value]
        answer = part.answer_ask(question)
        assert part.attempt.survivors
        self.revealed.append(part._read_survivors(part.attempt.survivors))
        return answer

    def keep(self, attempt: Attempt) -> None:
        self.kept = attempt


class HollowDevice:
    """A device that answers without keys, shares and masks: a sum of many of them shows only whether it fails."""

    payload = Vector.zeros(1, 0)

    def __init__(self, name: str) -> None:
        self._name = name
        self._shared = [name]  # devices of which it has shares

    def answer(self, question: SumQuestion) -> SumAnswer | bytes:
        match question:
            case SumInvite():
                nonce = hashlib.sha256(f"{self._name} {question.sum.attempt}".encode()).digest()[:16]
                return SumKeys(question.sum, SumPublicKeys(bytes(32), bytes(32), nonce))
            case SumPeers():
                return SumShares(question.sum, dict.fromkeys(question.peers, b""), bytes(32))
            case SumInbox():
                self._shared = [self._name, *question.sealed]
                return pack_vector(self.payload, 32)
            case SumSurvivors():
                return SumSigned(question.sum)
        return SumReveal(question.sum, dict.fromkeys(self._shared, b""))


class Played(NamedTuple):
    """The end of a sum: the total of these devices, or the reason for none; and all that the coordinator has seen."""

    server: SumServer
    total: Vector | None
    reason: str
    masked: dict[str, bytes]
    again: Sequence[str] = ()  # devices of another attempt


def play(
    devices: "Mapping[str, MemoryDevice | HollowDevice]",
    terms: SumTerms,
    *,
    sum_id: SumId = SUM,
    drops: Callable[[str, str], bool] = lambda device, step: False,
    may_repeat: bool = False,
    unmask: Callable[[SumServer], Vector] = SumServer.unmask,
) -> Played:
    """Play one attempt. `drops(device, step)`: whether the device does not answer in this step, nor later."""
    words, exact = (len(part) for part in next(iter(devices.values())).payload)
    server = SumServer(SumState(sum=sum_id, terms=terms), devices, words=words, exact=exact)
    gone, masked = set[str](), dict[str, bytes]()
    try:
        for step in STEPS:
            for device in sorted(server.waiting):
                if device in gone or drops(device, step):
                    gone.add(device)
                    continue
                try:
                    answer = devices[device].answer(server.question(device))
                    if isinstance(answer, bytes):
                        masked[device] = answer
                        server.take_masked(device, answer)
                    else:
                        server.take(device, answer)
                except (NotAllowed, BadPayload) as error:
                    server.drop(device, str(error))
            if again := server.close_step(may_repeat=may_repeat):
                return Played(server, None, "another attempt", masked, again)
        return Played(server, unmask(server), "", masked)
    except EmptyCohort as error:
        return Played(server, None, str(error), masked)


class Drawn(NamedTuple):
    """The outcome of a drawn sum."""

    has_sum: bool
    is_wrong: bool  # or without a reason
    revealed: int  # devices of which both secrets are known


def make_devices(
    count: int, *, words: int = 40, exact: int = 3, bits: int = 32, seed: int = 0
) -> dict[str, MemoryDevice]:
    """Make devices with drawn numbers."""
    draw = np.random.default_rng(seed)
    names = [f"pi-{number}" for number in range(count)]
    return {name: MemoryDevice(name, make_vector(draw, words, exact, bits)) for name in names}


def add_payloads(devices: Iterable[MemoryDevice], bits: int) -> Vector:
    """Add up numbers without masks."""
    parts = [device.payload for device in devices]
    total = Vector.zeros(len(parts[0].words), len(parts[0].exact))
    for part in parts:
        total.add(part, bits)
    return total


def count_revealed(devices: Mapping[str, MemoryDevice]) -> int:
    """Count the devices of which both secrets can be joined from all that was revealed."""
    revealed, both = [kinds for device in devices.values() for kinds in device.revealed], 0
    for name, device in devices.items():
        if device.kept and device.kept.peers:
            needed = count_needed_holders(len(device.kept.peers.peers) + 1)
            kinds = [sum(name in named[kind] for named in revealed) for kind in range(2)]
            both += min(kinds) >= needed
    return both


def play_attempts(
    devices: Mapping[str, MemoryDevice | HollowDevice],
    make_terms: Callable[[int], SumTerms],
    *,
    drops: Callable[[str, str], bool],
    most: int = ATTEMPTS,
    unmask: Callable[[SumServer], Vector] = SumServer.unmask,
) -> Played:
    """Play attempts at a sum as a coordinator does: each with the devices that are left of the one before."""
    for attempt in range(1, most + 1):
        sum_id = msgspec.structs.replace(SUM, attempt=attempt)
        may_repeat = attempt < most
        played = play(
            devices, make_terms(len(devices)), sum_id=sum_id, drops=drops, may_repeat=may_repeat, unmask=unmask
        )
        if not played.again:
            break
        devices = {name: devices[name] for name in played.again}
    return played


class Group(NamedTuple):
    """Sums of many devices, of which a share leaves in each step; in the last two, which are short, together."""

    devices: int
    neighbours: int
    leaving: float
    leave_again: bool = False  # in each further attempt, too; else nobody leaves twice


def has_hollow_sum(group: Group, seed: int, attempts: int = ATTEMPTS) -> bool:
    """Return whether a drawn sum of a group succeeds; nothing is computed."""
    draw = np.random.default_rng(seed)
    names = [f"pi-{number}" for number in range(group.devices)]
    leaving = dict.fromkeys(STEPS, group.leaving) | dict.fromkeys(STEPS[-2:], group.leaving / 2)
    gone = {(name, step) for name in names for step in STEPS if draw.random() < leaving[step]}

    def drops(device: str, step: str) -> bool:
        return draw.random() < leaving[step] if group.leave_again else (device, step) in gone

    played = play_attempts(
        {name: HollowDevice(name) for name in names},
        lambda left: make_terms(left, group.neighbours),
        drops=drops,
        most=attempts,
        unmask=lambda server: HollowDevice.payload,
    )
    return played.total is not None


def play_drawn(seed: int, neighbours: Sequence[int] = (4, 6, 8), attempts: int = ATTEMPTS) -> Drawn:
    """Play a sum of 3 to 60 devices, of which 0 to 30 % drop out in each step, and stay away."""
    draw = np.random.default_rng(seed)
    count, bits = int(draw.integers(3, 61)), int(draw.choice([16, 24, 32]))
    rates = dict(zip(STEPS, draw.uniform(0.0, 0.3, len(STEPS)) * draw.integers(0, 2, len(STEPS)), strict=True))
    devices = make_devices(count, bits=bits, seed=seed)
    gone = {(name, step) for name in devices for step in STEPS if draw.random() < rates[step]}
    degree = int(draw.choice(neighbours))
    played = play_attempts(
        devices,
        lambda left: make_terms(left, degree, bits),
        drops=lambda device, step: (device, step) in gone,
        most=attempts,
    )
    if played.total is None:
        return Drawn(False, not played.reason, count_revealed(devices))
    summed = [devices[name] for name in played.server.state.masked]
    right = add_payloads(summed, bits)
    is_right = len(summed) >= 3 and all(map(np.array_equal, played.total, right))
    return Drawn(True, not is_right, count_revealed(devices))
