"""Adoption: a device on the network asks for its token, and a person compares a code of six digits.

The window is open only while an operator waits for devices. One device asks at a time: each attempt of a stranger who
relays, which is lost but once in a million times, needs a person who types a code.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

from fedvit.errors import BadPayload, ConfigError, FedvitError, LinkDown
from fedvit.secure.adopting import make_key_pair, make_number, seal_token
from fedvit.transport.address import describe_error
from fedvit.transport.frames import is_open, receive_frame, send_frame
from fedvit.wire.adoption import (
    MAX_ADOPTION_BYTES,
    AnyAdoption,
    AskAdoption,
    GrantToken,
    OfferAdoption,
    RefuseAdoption,
    RevealNumber,
    check_version,
    commit,
    decode_adoption,
    encode_adoption,
    is_code,
    make_code,
    make_transcript,
)
from fedvit.wire.topics import check_name

log = logging.getLogger(__name__)

_Message = TypeVar("_Message", bound=AnyAdoption)

MESSAGE_S = 10.0
"""Longest wait for a device's next message."""
WAITING_DEVICES = 4
LOOK_EVERY_S = 0.5


class Applicant:
    """A device that shows a code and waits for a person."""

    def __init__(self, link: socket.socket, device: str, address: str, code: str, seal: Callable[[str], bytes]) -> None:
        self.device, self.address = device, address
        self._link, self._code, self._seal = link, code, seal

    def is_there(self) -> bool:
        """Tell whether the device still waits."""
        return is_open(self._link)

    def has_code(self, typed: str) -> bool:
        """Tell whether this is the code of the device."""
        return is_code(self._code, typed)

    def grant(self, token: str) -> None:
        """Send the device its token. Raises LinkDown."""
        self._send(GrantToken(self._seal(token)))

    def refuse(self, reason: str) -> None:
        """Tell the device why it is not adopted."""
        with contextlib.suppress(LinkDown):
            self._send(RefuseAdoption(reason))

    def _send(self, message: AnyAdoption) -> None:
        self._link.settimeout(MESSAGE_S)
        with self._link:
            send_frame(self._link, encode_adoption(message))


class AdoptionWindow:
    """Listens for devices that want to be adopted; `coordinator` is the name that they show to their owner."""

    def __init__(self, coordinator: str, host: str, port: int) -> None:
        """Raises ConfigError if the port cannot be used."""
        self.coordinator = coordinator
        try:
            self._socket = socket.create_server((host, port), backlog=WAITING_DEVICES)
        except OSError as error:
            raise ConfigError(
                "FV1342", f"cannot listen at {host}:{port}: {describe_error(error)}; choose another --listen HOST:PORT"
            ) from error
        self.host, self.port = self._socket.getsockname()[:2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def wait(self, until: float) -> Iterator[Applicant | None]:
        """Yield each device that has agreed on a code, and None twice a second, until this monotonic time."""
        while time.monotonic() < until:
            self._socket.settimeout(LOOK_EVERY_S)
            try:
                link, (address, *_) = self._socket.accept()
            except TimeoutError:
                yield None
                continue
            try:
                yield self._agree(link, address)
            except FedvitError as error:  # a stranger must not end the window
                log.warning("a request for adoption was dropped", extra={"from": address, "reason": str(error)})
                with contextlib.suppress(FedvitError, OSError):
                    send_frame(link, encode_adoption(RefuseAdoption(str(error)[:200])))
                link.close()

    def _agree(self, link: socket.socket, address: str) -> Applicant:
        """Exchange keys and numbers with a device. Raises FedvitError."""
        ask = _receive(link, AskAdoption)
        check_version(ask)
        check_name(ask.device, "the device's name")
        pair, own_number = make_key_pair(), make_number()
        commitment = commit(ask, self.coordinator, pair.public, own_number)
        offer = OfferAdoption(self.coordinator, pair.public, commitment)
        send_frame(link, encode_adoption(offer))
        number = _receive(link, RevealNumber).number
        send_frame(link, encode_adoption(RevealNumber(own_number)))
        transcript = make_transcript(ask, offer, number, own_number)

        def seal(token: str) -> bytes:
            return seal_token(pair, ask.key, transcript, token)

        return Applicant(link, ask.device, address, make_code(transcript), seal)


def _receive(link: socket.socket, kind: type[_Message]) -> _Message:
    """Wait for a message of this kind. Raises LinkDown, BadPayload."""
    message = decode_adoption(receive_frame(link, MAX_ADOPTION_BYTES, MESSAGE_S))
    if not isinstance(message, kind):
        raise BadPayload("FV2301", f"a {type(message).__name__} came in place of a {kind.__name__}")
    return message
