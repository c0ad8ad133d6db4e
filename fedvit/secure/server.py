"""The coordinator of a secure sum: it asks step by step, and learns the sum of the devices that went through all steps.

Keys, shares, masked numbers, agreement on who is in the sum, and reveals are the five steps. Devices may drop out in
each. A sum that too few devices complete fails with a reason, and then nothing is revealed.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from msgspec import Struct

from fedvit.errors import BadPayload, EmptyCohort
from fedvit.secure.device import LEAST_DEVICES, commit_to, derive_mask, describe_keys, describe_survivors
from fedvit.secure.keys import Binding, KeyPair
from fedvit.secure.masks import add_masks
from fedvit.secure.neighbours import (
    count_holders,
    count_needed_holders,
    digest_roster,
    find_least_reserve,
    find_neighbours,
    pack_devices,
)
from fedvit.secure.shamir import join_shares
from fedvit.secure.signing import check_signature
from fedvit.secure.vectors import Vector, unpack_vector
from fedvit.wire.messages import (
    SumAnswer,
    SumAsk,
    SumId,
    SumInbox,
    SumInvite,
    SumKeys,
    SumPeers,
    SumQuestion,
    SumReveal,
    SumShares,
    SumSigned,
    SumSurvivors,
    SumTerms,
)

STEPS = ("keys", "shares", "masked", "agree", "reveal")


class SumState(Struct, kw_only=True):
    """Memory of a coordinator, from which it can ask for the reveals again after a restart."""

    sum: SumId
    terms: SumTerms
    step: str = STEPS[0]
    keys: dict[str, SumKeys] = {}  # by device
    shares: dict[str, SumShares] = {}
    masked: list[str] = []  # devices whose masked numbers are in the total
    signed: dict[str, bytes] = {}  # signatures of the list of these


class SumServer:
    """One attempt at a sum over `devices`, of vectors with so many words and exact integers.

    The `question` of each device in `waiting` is to be sent until it is answered. `close_step` begins the next step:
    when `is_step_complete`, or when the time of the step is over.
    """

    def __init__(self, state: SumState, devices: Iterable[str], *, words: int, exact: int) -> None:
        self.state = state
        self.waiting = set(devices)  # for the answer of the current step
        self.refused: dict[str, str] = {}  # devices that left, and why
        self._total = Vector.zeros(words, exact)
        self._reveals: dict[str, SumReveal] = {}
        self._roster: dict[str, bytes] = {}
        self._neighbours: dict[str, list[str]] = {}
        self._survived = set(state.masked)
        self._unrevealed: dict[str, int] = {}  # how many shares of a device are still needed
        if state.step != STEPS[0]:
            self._find_neighbours()
        if state.step == STEPS[-1]:
            self._begin_reveal()

    def question(self, device: str) -> SumQuestion:
        """Return the message of the current step for a device."""
        state = self.state
        if state.step == "keys":
            return SumInvite(state.sum, state.terms)
        neighbours = self._neighbours[device]
        if state.step == "shares":
            return SumPeers(state.sum, self._roster, {peer: state.keys[peer].keys for peer in neighbours})
        if state.step == "masked":
            sealed = {peer: state.shares[peer].sealed[device] for peer in neighbours if peer in state.shares}
            return SumInbox(state.sum, sealed)
        if state.step == "agree":
            return SumSurvivors(state.sum, self._survivors)
        return SumAsk(state.sum, {peer: state.signed[peer] for peer in neighbours if peer in state.signed})

    def take(self, device: str, answer: SumAnswer) -> bool:
        """Take an answer; False if it is not awaited (any more). Raises BadPayload for an invalid one."""
        state = self.state
        if device not in self.waiting or answer.sum != state.sum:
            return False
        match state.step, answer:
            case "keys", SumKeys(keys=keys, authority=authority):
                if authority:
                    signed = describe_keys(SumInvite(state.sum, state.terms), device, keys)
                    check_signature(device, keys.certificate, signed, keys.signature)
                state.keys[device] = answer
            case "shares", SumShares():
                if answer.sealed.keys() != set(self._neighbours[device]):
                    raise BadPayload("FV2312", "shares for other devices than its neighbours")
                state.shares[device] = answer
            case "agree", SumSigned():
                if certificate := state.keys[device].keys.certificate:
                    signed = describe_survivors(self._survivors, self._binding())
                    check_signature(device, certificate, signed, answer.signature)
                state.signed[device] = answer.signature
            case "reveal", SumReveal():
                if answer.shares.keys() != {device, *self._neighbours[device]} & state.shares.keys():
                    raise BadPayload("FV2312", "shares of other devices than those that were asked for")
                self._reveals[device] = answer
                for named in self._unrevealed.keys() & answer.shares.keys():
                    self._unrevealed[named] -= 1
                    if self._unrevealed[named] == 0:
                        del self._unrevealed[named]
            case _:
                return False
        self.waiting.discard(device)
        return True

    def take_masked(self, device: str, content: bytes) -> None:
        """Add a device's masked numbers. Raises BadPayload for another size."""
        bits = self.state.terms.bits
        vector = unpack_vector(content, len(self._total.words), len(self._total.exact), bits)
        if device in self.waiting and self.state.step == "masked":
            self._total.add(vector, bits)
            self.state.masked.append(device)
            self._survived.add(device)
            self.waiting.discard(device)

    def count_left(self) -> dict[str, int]:
        """Count the devices that left in each step."""
        state = self.state
        answers: list[Collection[str]] = [state.keys, state.shares, state.masked, state.signed, self._reveals]
        went_on = [state.terms.devices, *(len(answered) for answered in answers)]
        return {step: before - after for step, before, after in zip(STEPS, went_on, went_on[1:], strict=False)}

    def restore_masked(self, device: str, content: bytes) -> None:
        """Add the masked numbers of a device again, after a restart."""
        bits = self.state.terms.bits
        self._total.add(unpack_vector(content, len(self._total.words), len(self._total.exact), bits), bits)

    def drop(self, device: str, reason: str) -> None:
        """Do not wait for a device any longer."""
        if device in self.waiting:
            self.waiting.discard(device)
            self.refused[device] = reason

    @property
    def is_step_complete(self) -> bool:
        """Return whether no answer of the step is missing, or the reveals are enough."""
        return not self.waiting or (self.state.step == "reveal" and not self._unrevealed)

    def close_step(self, *, may_repeat: bool = False) -> list[str]:
        """Go on without the devices that have not answered.

        With `may_repeat`, return the devices with which another attempt should begin instead; empty: this one goes on.
        Nobody has revealed anything then. Raises EmptyCohort if too few devices have answered.
        """
        state, step = self.state, self.state.step
        answered: dict[str, Collection[str]] = {
            "shares": state.shares, "masked": state.masked, "agree": state.signed,
        }  # fmt: skip
        try:
            self._close_step()
        except EmptyCohort:
            if may_repeat and len(answered.get(step, ())) >= LEAST_DEVICES:
                return sorted(answered[step])
            raise
        return sorted(answered[step]) if may_repeat and self._lacks_reserve(step) else []

    def _close_step(self) -> None:
        state = self.state
        match state.step:
            case "keys":
                _drop_strangers(state, self.refused)
                self._check_left(state.keys, "have sent keys")
                self._find_neighbours()
                self.waiting = set(state.keys)
            case "shares":
                self._check_left(state.shares, "have sent shares")
                self.waiting = set(state.shares)
            case "masked":
                self._check_left(state.masked, "have sent their numbers")
                self.waiting = set(state.masked)
            case "agree":
                self._check_left(_list_agreed(state, self._neighbours), "have agreed on who is in it")
                self._begin_reveal()
            case "reveal":
                if self._unrevealed:
                    missing = min(self._unrevealed)
                    raise EmptyCohort("FV1521", f"too few shares of {missing} were revealed{_describe_left(self)}")
        state.step = STEPS[min(STEPS.index(state.step) + 1, len(STEPS) - 1)]

    def unmask(self) -> Vector:
        """Return the sum of all devices in `state.masked`. Raises EmptyCohort if revealed shares are wrong."""
        state, bits = self.state, self.state.terms.bits
        binding, masks = self._binding(), list[tuple[bytes, bool]]()
        for device in state.masked:
            seed = self._join(device)
            if commit_to(seed, binding) != state.shares[device].commitment:
                raise EmptyCohort("FV1521", f"wrong shares of {device} were revealed")
            masks.append((binding.derive(seed, "self", device), True))
        for device in self._list_dropped():
            peers = [peer for peer in self._neighbours[device] if peer in self._survived]
            if not peers:
                continue
            pair = KeyPair(self._join(device))
            if pair.public != state.keys[device].keys.mask_key:
                raise EmptyCohort("FV1521", f"wrong shares of {device} were revealed")
            for peer in peers:
                key = derive_mask(binding, pair, state.keys[peer].keys.mask_key, device, peer)
                masks.append((key, peer < device))  # as the peer did, in reverse
        add_masks(self._total, masks, bits)
        return self._total

    # --- inside ---------------------------------------------------------------------------------------

    def _binding(self) -> Binding:
        state = self.state
        authority = next(iter(state.keys.values())).authority
        return Binding.of(authority, state.sum, state.terms, digest_roster(self._roster))

    def _find_neighbours(self) -> None:
        self._roster = {device: answer.keys.nonce for device, answer in sorted(self.state.keys.items())}
        self._neighbours = find_neighbours(self._roster, self.state.terms.neighbours)

    @cached_property
    def _survivors(self) -> bytes:
        """The list of the devices whose masked numbers are here, once the step is over."""
        return pack_devices(self._roster, self.state.masked)

    def _list_dropped(self) -> list[str]:
        """Devices that have masks in common with others, and did not send their numbers."""
        return [device for device in self.state.shares if device not in self._survived]

    def _holders(self, device: str) -> list[str]:
        return sorted([device, *self._neighbours[device]])

    def _check_left(self, devices: Iterable[str], what: str) -> None:
        """Raise EmptyCohort if too few devices are left, or too few neighbours of one to reveal its secrets."""
        left = set(devices)
        if len(left) < LEAST_DEVICES:
            raise EmptyCohort("FV1521", f"{len(left)} of {LEAST_DEVICES} devices {what}{_describe_left(self)}")
        if not self._neighbours:
            return
        reserve, device = find_least_reserve(self._neighbours, left, self.state.shares)
        if reserve < 0:
            neighbours = self._neighbours[device]
            count = f"{len(left.intersection(neighbours))} of {len(neighbours)}"
            raise EmptyCohort("FV1521", f"only {count} neighbours of {device} {what}{_describe_left(self)}")

    def _lacks_reserve(self, step: str) -> bool:
        """Return whether another attempt would be safer than this one, whose `step` is closed.

        Devices that left count against the threshold of their neighbours until an attempt begins without them. After
        the shares that costs a message, so that it is worth half of the reserve. After the masked numbers it costs
        another upload, so that only a third of the reserve may be left.
        """
        if step not in ("shares", "masked"):
            return False
        holders = count_holders(len(self.waiting), self.state.terms.neighbours)
        again = holders - count_needed_holders(holders)
        reserve, _ = find_least_reserve(self._neighbours, self.waiting, self.state.shares)
        return reserve < (again / 2 if step == "shares" else again / 3)

    def _begin_reveal(self) -> None:
        """Count the shares that are needed: of each device in the sum, and of those that others have masks with."""
        self.waiting = set(_list_agreed(self.state, self._neighbours))
        dropped = [device for device in self._list_dropped() if self._survived.intersection(self._neighbours[device])]
        self._unrevealed = {
            device: count_needed_holders(len(self._holders(device))) for device in (*self.state.masked, *dropped)
        }

    def _join(self, device: str) -> bytes:
        holders = self._holders(device)
        shares = {
            place: self._reveals[holder].shares[device]
            for place, holder in enumerate(holders, 1)
            if holder in self._reveals
        }
        needed = count_needed_holders(len(holders))
        try:
            return join_shares(dict(list(shares.items())[:needed]))
        except BadPayload as error:
            raise EmptyCohort("FV1521", f"{device}: {error}") from error


def _drop_strangers(state: SumState, refused: dict[str, str]) -> None:
    """Go on with the deployment that most devices belong to: nobody may end a sum by naming another one."""
    authorities = Counter(answer.authority for answer in state.keys.values())
    [(most, _)] = authorities.most_common(1) or [(b"", 0)]
    for device in [device for device, answer in state.keys.items() if answer.authority != most]:
        refused[device] = "it belongs to another deployment"
        del state.keys[device]


def _list_agreed(state: SumState, neighbours: Mapping[str, Collection[str]]) -> list[str]:
    """Devices that have signed the list, as have enough holders of their shares: these will reveal."""
    agreed = []
    for device in state.signed:
        holders = {device, *neighbours[device]}
        if len(holders & state.signed.keys()) >= count_needed_holders(len(holders)):
            agreed.append(device)
    return agreed


def _describe_left(server: SumServer) -> str:
    left = [f"{device}: {reason}" for device, reason in sorted(server.refused.items())]
    left += [f"{device}: no answer" for device in sorted(server.waiting)]
    return f" ({'; '.join(left[:5])}{'; ...' if len(left) > 5 else ''})" if left else ""
