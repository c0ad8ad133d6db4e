"""A device in a secure sum: it answers each message of the coordinator, always in the same way.

Everything that an answer follows from is kept before it is given: the secrets, and the coordinator's messages. A
second, different message for the same step is refused, so that one mask never covers two payloads, and of a neighbour
only one of both secrets is revealed.
"""

import hashlib
from collections.abc import Callable
from functools import cached_property

import msgspec

from fedvit.errors import BadPayload, NotAllowed
from fedvit.secure.attempt import Attempt, replace_step
from fedvit.secure.keys import Binding, KeyPair, MaskStream, seal, unseal
from fedvit.secure.masks import add_masks
from fedvit.secure.neighbours import count_needed_holders, digest_roster, list_neighbours, unpack_devices
from fedvit.secure.noise import LEAST_STEPS, NoiseShare, count_noise_steps, find_ratio
from fedvit.secure.shamir import SHARE_BYTES, split_secret
from fedvit.secure.signing import Credentials
from fedvit.secure.vectors import Vector, pack_vector
from fedvit.wire.messages import (
    SumAsk,
    SumInbox,
    SumInvite,
    SumKeys,
    SumPeers,
    SumPublicKeys,
    SumReveal,
    SumShares,
    SumSigned,
    SumSurvivors,
)

LEAST_DEVICES = 3
"""Devices of the smallest sum: of two, each would learn the other's part."""


def describe_keys(invite: SumInvite, device: str, keys: SumPublicKeys) -> bytes:
    """Return what a device signs: its keys, for this sum only."""
    signed = ("fedvit sum keys 1", invite.sum, invite.terms, device, keys.mask_key, keys.share_key, keys.nonce)
    return msgspec.msgpack.encode(signed)


def describe_survivors(survived: bytes, binding: Binding) -> bytes:
    """Return what a device signs: the list of the devices whose masked numbers are here, for this sum only."""
    return msgspec.msgpack.encode(("fedvit sum survivors 1", binding.context, survived))


def commit_to(seed: bytes, binding: Binding) -> bytes:
    """Return the commitment to a seed, which shows that shares were joined to the right one."""
    return hashlib.sha256(b"fedvit sum seed 1" + binding.context + seed).digest()


class DeviceSum:
    """A device's part in an attempt. `keep(attempt)` stores what it must remember; each answer is given afterwards.

    `credentials`: None if the device has no certificate; then it does not check those of others. `min_cohort`: fewest
    devices, this one included, among which it hides. Methods raise NotAllowed or BadPayload with the reason for which
    the device leaves the sum.
    """

    def __init__(
        self,
        device: str,
        attempt: Attempt,
        keep: Callable[[Attempt], None],
        *,
        credentials: Credentials | None = None,
        min_cohort: int = LEAST_DEVICES,
    ) -> None:
        self.attempt = attempt
        self._device = device
        self._keep = keep
        self._credentials = credentials
        self._least = max(min_cohort, LEAST_DEVICES)
        self._agreed: dict[str, bytes] = {}  # secrets in common with neighbours, from which keys of shares follow

    def answer_invite(self) -> SumKeys:
        """Return the device's public keys, signed if it has a certificate."""
        attempt, credentials = self.attempt, self._credentials
        if attempt.invite.terms.neighbours + 1 < self._least:
            raise NotAllowed(
                "FV1451",
                f"policy: min_cohort = {self._least}, and a device of this sum has {attempt.invite.terms.neighbours} "
                "neighbours",
            )
        keys = SumPublicKeys(self._mask_pair.public, self._share_pair.public, attempt.nonce)
        self._keep(attempt)
        if credentials is None:
            return SumKeys(attempt.invite.sum, keys)
        signature = credentials.sign(describe_keys(attempt.invite, self._device, keys))
        keys = msgspec.structs.replace(keys, certificate=credentials.certificate, signature=signature)
        return SumKeys(attempt.invite.sum, keys, credentials.authority_digest)

    def answer_peers(self, peers: SumPeers) -> SumShares:
        """Check the neighbours, and return shares of both secrets for each of them."""
        self.attempt = replace_step(self.attempt, "peers", peers)
        self._check_peers(peers)
        self._keep(self.attempt)
        attempt, sealed = self.attempt, {}
        holders = self._holders
        needed = count_needed_holders(len(holders))
        seeds = split_secret(attempt.self_seed, len(holders), needed, attempt.polynomial)
        keys = split_secret(attempt.mask_secret, len(holders), needed, attempt.polynomial)
        for holder, seed, key in zip(holders, seeds, keys, strict=True):
            if holder != self._device:
                sealed[holder] = seal(self._share_key(self._device, holder), seed + key)
        return SumShares(attempt.invite.sum, sealed, commit_to(attempt.self_seed, self._binding))

    def take_inbox(self, inbox: SumInbox) -> None:
        """Check and remember the neighbours with which this device will have masks in common."""
        if self.attempt.peers is None:
            raise NotAllowed("FV1451", "a step of the sum is missing")
        self.attempt = replace_step(self.attempt, "inbox", inbox)
        self._unseal_shares(inbox)
        self._check_hidden(len(inbox.sealed), "have sent shares")
        self._keep(self.attempt)

    def share_noise(self) -> NoiseShare | None:
        """Return the noise that the device adds to its numbers; after `answer_peers`. None without privacy.

        Raises NotAllowed if it were too small for the steps of the integers.
        """
        terms = self.attempt.invite.terms
        if terms.noise is None:
            return None
        if (steps := count_noise_steps(terms, self.cohort)) < LEAST_STEPS:
            raise NotAllowed("FV1451", f"the noise of a device has {steps:.2g} steps, and {LEAST_STEPS:g} are needed")
        key = self._binding.derive(self.attempt.noise_seed, "noise", self._device)
        return NoiseShare(find_ratio(self.cohort, terms.neighbours), MaskStream(key))

    def mask(self, payload: Vector) -> bytes:
        """Return the payload with the device's own mask, and those in common with neighbours; after `take_inbox`."""
        inbox, bits = self.attempt.inbox, self.attempt.invite.terms.bits
        assert inbox is not None  # it was taken
        masked = Vector(payload.words.copy(), payload.exact.copy())
        masks = [(self._binding.derive(self.attempt.self_seed, "self", self._device), False)]
        for peer in sorted(inbox.sealed):
            key = derive_mask(self._binding, self._mask_pair, self._peer(peer).mask_key, self._device, peer)
            masks.append((key, self._device > peer))
        add_masks(masked, masks, bits)
        return pack_vector(masked, bits)

    def answer_survivors(self, survivors: SumSurvivors) -> SumSigned:
        """Check and sign the list of the devices in the sum. The device reveals shares for this list only."""
        survived, _ = self._read_survivors(survivors)
        self._check_hidden(len(survived) - 1, "are in the sum")
        self.attempt = replace_step(self.attempt, "survivors", survivors)
        self._keep(self.attempt)
        signed, credentials = describe_survivors(survivors.survived, self._binding), self._credentials
        return SumSigned(survivors.sum, credentials.sign(signed) if credentials else b"")

    def answer_ask(self, ask: SumAsk) -> SumReveal:
        """Return a share for each device, once enough neighbours have signed the same list of survivors.

        A coordinator that names other survivors to others would learn the sum of fewer than each of them has agreed to
        (the consistency check of Bonawitz et al., CCS 2017, figure 4).
        """
        inbox, survivors = self.attempt.inbox, self.attempt.survivors
        if inbox is None or survivors is None:
            raise NotAllowed("FV1451", "a step of the sum is missing")
        survived, dropped = self._read_survivors(survivors)
        self._check_signatures(ask, survivors, survived)
        self.attempt = replace_step(self.attempt, "ask", ask)
        self._keep(self.attempt)
        opened, own = self._unseal_shares(inbox), self._holders.index(self._device)
        needed = count_needed_holders(len(self._holders))
        seed = split_secret(self.attempt.self_seed, len(self._holders), needed, self.attempt.polynomial)[own]
        shares = {peer: opened[peer][:SHARE_BYTES] if peer in opened else seed for peer in survived}
        shares |= {peer: opened[peer][SHARE_BYTES:] for peer in dropped}
        return SumReveal(self.attempt.invite.sum, shares)

    @property
    def cohort(self) -> int:
        """Devices that the sum began with; 0 before they are known."""
        return len(self.attempt.peers.roster) if self.attempt.peers else 0

    # --- checks ---------------------------------------------------------------------------------------

    def _check_peers(self, peers: SumPeers) -> None:
        invite = self.attempt.invite
        if peers.roster.get(self._device) != self.attempt.nonce or len(peers.roster) > invite.terms.devices:
            raise BadPayload("FV2312", "the devices of a sum are not those that it is for")
        neighbours = list_neighbours(peers.roster, invite.terms.neighbours, self._device)
        if neighbours != sorted(peers.peers) or any(
            keys.nonce != peers.roster[peer] for peer, keys in peers.peers.items()
        ):
            raise BadPayload("FV2312", "the neighbours in a sum do not follow from its devices")
        distinct = {keys.mask_key for keys in peers.peers.values()} | {self._mask_pair.public}
        if self._credentials is not None:
            certified = {
                self._credentials.check_peer(peer, keys.certificate, describe_keys(invite, peer, keys), keys.signature)
                for peer, keys in peers.peers.items()
            }
            if len(certified) < len(neighbours):
                raise BadPayload("FV2312", "neighbours in a sum have one key together")
        if len(distinct) < len(neighbours) + 1:
            raise BadPayload("FV2312", "devices in a sum have one key together")
        self._check_hidden(len(neighbours), "have keys")

    def _read_survivors(self, survivors: SumSurvivors) -> tuple[list[str], list[str]]:
        """Return the holders of this device's shares that are in the sum, and those that left after their shares."""
        attempt = self.attempt
        if attempt.peers is None or attempt.inbox is None:
            raise NotAllowed("FV1451", "a step of the sum is missing")
        here = unpack_devices(attempt.peers.roster, survivors.survived).intersection(self._holders)
        known = {*attempt.inbox.sealed, self._device}
        if self._device not in here or not here <= known:
            raise NotAllowed("FV1451", "the list of devices in the sum contradicts what the device knows of it")
        return sorted(here), sorted(known - here)

    def _check_signatures(self, ask: SumAsk, survivors: SumSurvivors, survived: list[str]) -> None:
        """Raise NotAllowed or BadPayload unless enough holders of this device's shares have signed its list."""
        if not set(survived).issuperset(ask.signatures) or self._device in ask.signatures:
            raise NotAllowed("FV1451", "the list of devices in the sum is signed by others than its neighbours")
        count, needed = len(ask.signatures) + 1, count_needed_holders(len(self._holders))
        if count < needed:
            raise NotAllowed("FV1451", f"{count} of {needed} devices have signed the list of devices in the sum")
        if self._credentials is not None:
            signed = describe_survivors(survivors.survived, self._binding)
            for peer, signature in ask.signatures.items():
                self._credentials.check_peer(peer, self._peer(peer).certificate, signed, signature)

    def _check_hidden(self, neighbours: int, what: str) -> None:
        """Raise NotAllowed if this device would hide among too few."""
        if neighbours + 1 < self._least:
            raise NotAllowed(
                "FV1451", f"{neighbours} of its neighbours {what}, and with this device {self._least} are needed"
            )
        if self.attempt.peers and neighbours + 1 < count_needed_holders(len(self._holders)):
            raise NotAllowed("FV1451", f"only {neighbours} of its neighbours {what}")

    # --- keys -----------------------------------------------------------------------------------------

    @cached_property
    def _binding(self) -> Binding:
        invite, peers = self.attempt.invite, self.attempt.peers
        assert peers is not None  # pinned before
        authority = self._credentials.authority_digest if self._credentials else b""
        return Binding.of(authority, invite.sum, invite.terms, digest_roster(peers.roster))

    @cached_property
    def _mask_pair(self) -> KeyPair:
        return KeyPair(self.attempt.mask_secret)

    @cached_property
    def _share_pair(self) -> KeyPair:
        return KeyPair(self.attempt.share_secret)

    @property
    def _holders(self) -> list[str]:
        """Holders of this device's shares, in the order of the shares."""
        assert self.attempt.peers is not None  # pinned before
        return sorted([self._device, *self.attempt.peers.peers])

    def _peer(self, device: str) -> SumPublicKeys:
        assert self.attempt.peers is not None  # pinned before
        return self.attempt.peers.peers[device]

    def _share_key(self, sender: str, receiver: str) -> bytes:
        peer = receiver if sender == self._device else sender
        if peer not in self._agreed:
            self._agreed[peer] = self._share_pair.agree(self._peer(peer).share_key)
        return self._binding.derive(self._agreed[peer], "shares", sender, receiver)

    def _unseal_shares(self, inbox: SumInbox) -> dict[str, bytes]:
        """Return both shares of each neighbour. Raises BadPayload."""
        assert self.attempt.peers is not None  # pinned before
        if strangers := inbox.sealed.keys() - self.attempt.peers.peers.keys():
            raise BadPayload("FV2312", f"shares of {min(strangers)!r}, which is not a neighbour in the sum")
        return {
            peer: unseal(self._share_key(peer, self._device), sealed, peer) for peer, sealed in inbox.sealed.items()
        }


def derive_mask(binding: Binding, pair: KeyPair, public: bytes, one: str, other: str) -> bytes:
    """Return the key of the mask that two devices have in common. The first by name adds it, the other subtracts."""
    return binding.derive(pair.agree(public), "mask", *sorted((one, other)))
