"""Memory of a device in a secure sum, without the library for its keys."""

import secrets

import msgspec
from msgspec import Struct

from fedvit.errors import NotAllowed
from fedvit.wire.messages import SumAsk, SumInbox, SumInvite, SumPeers, SumSurvivors


class Attempt(Struct, frozen=True, kw_only=True):
    """An attempt at a sum: the device's secrets, and the coordinator's messages that it has answered."""

    invite: SumInvite
    mask_secret: bytes
    share_secret: bytes
    self_seed: bytes  # of its own mask
    polynomial: bytes  # seed of the shares
    nonce: bytes
    noise_seed: bytes  # never revealed
    rounding_seed: int = 0  # of the run, when the attempt began
    peers: SumPeers | None = None
    inbox: SumInbox | None = None
    survivors: SumSurvivors | None = None
    ask: SumAsk | None = None


def begin_attempt(invite: SumInvite, before: Attempt | None, rounding_seed: int = 0) -> Attempt:
    """Return what the device remembers of an attempt: new secrets, or those that it has. `before`: the newest attempt
    at this sum. Raises NotAllowed."""
    if before is not None:
        if before.invite == invite:
            return before
        if before.ask is not None:  # the difference of two sums could be one device
            raise NotAllowed("FV1451", "its numbers are in a sum already, and are not added a second time")
        if before.invite.sum.attempt >= invite.sum.attempt:
            raise NotAllowed("FV1451", f"attempt {invite.sum.attempt} of a sum is over")
    drawn = [secrets.token_bytes(32) for _ in range(5)]
    return Attempt(
        invite=invite,
        mask_secret=drawn[0],
        share_secret=drawn[1],
        self_seed=drawn[2],
        polynomial=drawn[3],
        nonce=secrets.token_bytes(16),
        noise_seed=drawn[4],
        rounding_seed=rounding_seed,
    )


def replace_step(attempt: Attempt, step: str, message: SumPeers | SumInbox | SumSurvivors | SumAsk) -> Attempt:
    """Return the attempt with the message of a step. Raises NotAllowed if it had another one."""
    if getattr(attempt, step) not in (None, message):
        raise NotAllowed("FV1451", f"two different messages for one step of a sum ({step})")
    return msgspec.structs.replace(attempt, **{step: message})
