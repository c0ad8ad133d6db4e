"""The device's side of an adoption: it agrees on a code with a coordinator, and waits for its token."""

import socket
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from fedvit.errors import BadPayload, LinkDown, PeerRefused
from fedvit.secure.adopting import make_key_pair, make_number, unseal_token
from fedvit.transport.address import describe_error
from fedvit.transport.frames import receive_frame, send_frame
from fedvit.wire.adoption import (
    ADOPTION_VERSION,
    MAX_ADOPTION_BYTES,
    AnyAdoption,
    AskAdoption,
    GrantToken,
    OfferAdoption,
    RefuseAdoption,
    RevealNumber,
    decode_adoption,
    encode_adoption,
    make_code,
    make_transcript,
)

_Message = TypeVar("_Message", bound=AnyAdoption)

CONNECT_S = 10.0
TURN_S = 120.0
"""Longest wait for one's turn, while another device is being adopted."""
PERSON_S = 600.0
"""Longest wait for the person who types the code."""


class Agreed(NamedTuple):
    """A code that the device shows."""

    coordinator: str  # its name for people
    code: str


def ask_adoption(
    host: str, port: int, device: str, show: Callable[[Agreed], None], confirm: Callable[[Agreed], bool]
) -> str:
    """Return the token that a coordinator sends after a person typed the code there.

    `show` gets the code; `confirm` asks the person whether the coordinator has accepted it. Raises LinkDown,
    PeerRefused, BadPayload.
    """
    pair, number = make_key_pair(), make_number()
    ask = AskAdoption(ADOPTION_VERSION, device, pair.public)
    try:
        link = socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        raise LinkDown(
            "FV1342", f"{host}:{port}: {describe_error(error)}; is `coordinator adopt` running there?"
        ) from error
    with link:
        send_frame(link, encode_adoption(ask))
        offer = _receive(link, OfferAdoption, TURN_S)
        send_frame(link, encode_adoption(RevealNumber(number)))
        theirs = _receive(link, RevealNumber, CONNECT_S).number
        transcript = make_transcript(ask, offer, number, theirs)
        agreed = Agreed(offer.coordinator, make_code(transcript))
        show(agreed)
        sealed = _receive(link, GrantToken, PERSON_S).sealed
    token = unseal_token(pair, offer.key, transcript, sealed)
    if not confirm(agreed):
        raise PeerRefused(
            "FV1341",
            "the coordinator did not accept this device's code, so somebody may relay between both: the token was not "
            "used. Join by a token that you copy: coordinator enroll",
        )
    return token


def _receive(link: socket.socket, kind: type[_Message], patience_s: float) -> _Message:
    """Wait for a message of this kind. Raises PeerRefused, LinkDown, BadPayload."""
    message = decode_adoption(receive_frame(link, MAX_ADOPTION_BYTES, patience_s))
    if isinstance(message, RefuseAdoption):
        raise PeerRefused("FV1342", f"the coordinator refused: {message.reason}")
    if not isinstance(message, kind):
        raise BadPayload("FV2301", f"a {type(message).__name__} came in place of a {kind.__name__}")
    return message
