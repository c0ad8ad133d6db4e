"""The device's part in secure sums: its results are in the vault, and leave it with masks only.

Every answer follows from the vault, so that the device answers in the same way after `kill -9`. A mask over a large
update takes seconds, so that it is computed in a thread.
"""

import logging
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edge_client.link.device_link import DeviceLink
from edge_client.link.identity import Identity
from edge_client.storage.device_storage import DeviceStorage
from edge_client.trust.policy import check_bytes_of_day
from edge_client.work.task_executor import BackgroundWork
from fedvit.errors import FedvitError, NotAllowed
from fedvit.policy import SendPolicy
from fedvit.quantities import format_bytes
from fedvit.secure.attempt import Attempt, begin_attempt
from fedvit.secure.layout import Layout, find_rounding_seeds, make_vector
from fedvit.secure.vectors import count_bytes
from fedvit.tensors import Tensors
from fedvit.wire.messages import (
    SumAsk,
    SumId,
    SumInbox,
    SumInvite,
    SumMasked,
    SumPeers,
    SumQuestion,
    SumRefused,
    SumSurvivors,
    inline_room,
)

if TYPE_CHECKING:  # imports cryptography, which other runs do not need
    from fedvit.secure.device import DeviceSum
    from fedvit.secure.signing import Credentials

log = logging.getLogger(__name__)


class Masked(NamedTuple):
    """The event that a result has its masks, or why not."""

    sum: SumId
    content: bytes
    cohort: int
    error: Exception | None = None


class SecureSums:
    """The secure sums of one device. `identity`: its certificate; None without a deployment."""

    def __init__(
        self,
        link: DeviceLink,
        storage: DeviceStorage,
        policy: SendPolicy,
        identity: Identity | None,
        begin: Callable[[Callable[[], None], str], BackgroundWork],
    ) -> None:
        self._link = link
        self._storage = storage
        self._policy = policy
        self._identity = identity
        self._begin = begin
        self._at_work: SumId | None = None
        self._part: DeviceSum | None = None  # of the newest attempt

    def answer(self, question: SumQuestion) -> None:
        """Answer a message of the coordinator, or refuse it with the reason."""
        try:
            with self._storage.sums.lock:  # a task may store another result meanwhile
                self._answer(question)
        except (FedvitError, OSError) as error:
            self._refuse(question.sum, error)

    def send_masked(self, masked: Masked) -> None:
        """Send a result with its masks, after its line in the ledger."""
        self._at_work = None
        try:
            if masked.error:
                raise masked.error
            manifest = self._storage.blobs.put(masked.content)
            self._storage.ledger.note_sum(masked.sum, masked.cohort, manifest)
            message = SumMasked(masked.sum, manifest)
            if manifest.size <= inline_room(message):
                message = msgspec.structs.replace(message, inline=masked.content)
            self._link.masked = manifest.digest
            self._link.send(message)
        except (FedvitError, OSError) as error:
            self._refuse(masked.sum, error)

    def _answer(self, question: SumQuestion) -> None:
        sum_id = question.sum
        kept = self._read_attempt(sum_id)
        if isinstance(question, SumInvite):
            self._read_payload(question)
            note = self._storage.vault.notes.find_newest(sum_id.run)
            seed = note.seed if note else 0
            kept = begin_attempt(question, kept, seed)
        elif kept is None or kept.invite.sum != sum_id:
            raise NotAllowed("FV1451", f"attempt {sum_id.attempt} of a sum is not known here")
        if self._part is None or self._part.attempt != kept:  # the vault counts: its attempts go with their results
            self._part = self._make_part(kept)
        part = self._part
        match question:
            case SumInvite():
                self._link.send(part.answer_invite())
            case SumPeers():
                self._link.send(part.answer_peers(question))
            case SumInbox() if self._at_work is None:  # else it comes again
                self._mask(part, question)
            case SumSurvivors():
                self._link.send(part.answer_survivors(question))
            case SumAsk():
                self._link.send(part.answer_ask(question))

    def _read_attempt(self, sum_id: SumId) -> Attempt | None:
        return self._storage.sums.read_attempt(sum_id.run, sum_id.round, sum_id.kind)

    def _read_payload(self, invite: SumInvite) -> Tensors:
        """Return the result that is to be added up. Raises NotAllowed if it is not here, or of another Program."""
        payload = self._storage.sums.read_payload(invite.sum)
        if payload is None:
            raise NotAllowed("FV1451", f"no result of round {invite.sum.round} waits for a sum here")
        if Layout.of_payload(invite.sum.kind, payload).digest != invite.terms.layout:
            raise NotAllowed("FV1451", "its result has other tensors than the sum")
        if self._policy.updates == "sum" and self._identity is None:
            raise NotAllowed("FV1451", 'policy: updates = "sum" needs a device that has joined a deployment')
        noise, least = invite.terms.noise, self._policy.min_noise
        if invite.sum.kind == "train" and (multiplier := noise.multiplier if noise else 0.0) < least:
            raise NotAllowed(
                "FV1451", f"policy: min_noise = {least:g}, and the noise of this sum is {multiplier:g} times its clip"
            )
        return payload

    def _make_part(self, attempt: Attempt) -> "DeviceSum":
        from fedvit.secure.device import DeviceSum

        return DeviceSum(
            self._link.identity.device,
            attempt,
            self._storage.sums.keep_attempt,
            credentials=self._read_credentials(),
            min_cohort=self._policy.min_cohort,
        )

    def _read_credentials(self) -> "Credentials | None":
        """Read the certificate of this device and its authority, which change while a fleet is served."""
        identity = self._identity if self._has_certificate else None
        if identity is None:
            return None
        files = (identity.certificate, identity.key, identity.authority)
        return _make_credentials(*(file.read_bytes() for file in files))

    @cached_property
    def _has_certificate(self) -> bool:
        if self._identity is None:
            log.warning("secure sum without certificates: nobody vouches for its devices")
        return self._identity is not None

    def _mask(self, part: "DeviceSum", inbox: SumInbox) -> None:
        """Begin to add the masks to a result."""
        invite, events = part.attempt.invite, self._link.transport.inbox
        sum_id = invite.sum
        payload = self._read_payload(invite)
        if part.attempt.inbox is None:  # else it had room before, and is given again
            self._make_room(invite, payload)
        part.take_inbox(inbox)  # from now on the payload stays
        noise = part.share_noise()
        # not that of the newest task: another rounding would be another payload
        seeds = find_rounding_seeds(part.attempt.rounding_seed, sum_id.round, self._link.identity.device)
        self._at_work = sum_id

        def work() -> None:
            try:
                vector = make_vector(sum_id.kind, payload, invite.terms, seeds, noise)
                events.put(Masked(sum_id, part.mask(vector), part.cohort))
            except Exception as error:  # noqa: BLE001 - reported to the coordinator
                events.put(Masked(sum_id, b"", 0, error))

        self._begin(work, f"mask-{sum_id.kind}-{sum_id.round}")

    def _make_room(self, invite: SumInvite, payload: Tensors) -> None:
        """Remove what other attempts have sent. Raise NotAllowed or OverBudget if this one is beyond the limits."""
        storage, most = self._storage, self._policy.upload
        layout = Layout.of_payload(invite.sum.kind, payload)
        size = count_bytes(layout.words, layout.exact, invite.terms.bits)
        if most is not None and size > most:
            why = f"policy: upload = {format_bytes(most)}, and the result has {format_bytes(size)} with its masks"
            raise NotAllowed("FV1432", why)
        check_bytes_of_day(self._policy, storage.ledger, size)
        for digest in storage.ledger.list_other_attempts(invite.sum):
            self._link.exchange.stop_sending(digest)
            storage.blobs.path(digest).unlink(missing_ok=True)
        storage.disk.make_room(invite.sum.run, lambda: size)

    def _refuse(self, sum_id: SumId, error: Exception) -> None:
        log.warning("not in a secure sum", extra={"round": sum_id.round, "kind": sum_id.kind, "reason": str(error)})
        self._link.send(SumRefused(sum_id, str(error)[:500]))


@lru_cache(maxsize=1)
def _make_credentials(certificate: bytes, key: bytes, authority: bytes) -> "Credentials":
    from fedvit.secure.signing import Credentials

    return Credentials(certificate, key, authority)
