"""Enrolment: answers devices that present a token, and renews certificates."""

import base64
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from queue import SimpleQueue
from typing import TypeGuard

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.security.authority import DEVICE_DAYS
from coordinator.security.clock import ServerClock
from coordinator.security.folder import Deployment
from coordinator.security.registry import Certificate, JoinedDevice, OpenToken, Rows, now
from coordinator.security.rotations import Rotation, RotationRows
from fedvit.errors import BadPayload, FedvitError, PeerRefused
from fedvit.transport.address import Address
from fedvit.transport.base import Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.enrolment import (
    FROM_COORDINATOR,
    FROM_DEVICE,
    JoinGranted,
    JoinRefused,
    JoinRequest,
    Renewed,
    RenewRequest,
    decode_enrolment,
    encode_enrolment,
    seal,
    unseal,
)
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

TICK_S = 0.5
NOTE_SEEN_EVERY_S = 5.0
"""Interval between writes of when devices were seen, and between looks at the clock."""
RENEW_BELOW = 1 / 3
"""A certificate is renewed when less than this share of its validity is left."""


class EnrolmentService:
    """A thread with its own connection to the broker; `news` holds lines for the operator."""

    def __init__(self, deployment: Deployment, address: Address, *, device_days: float = DEVICE_DAYS) -> None:
        self.news: SimpleQueue[str] = SimpleQueue()
        self._deployment = deployment
        self._device_days = device_days
        self._topics = Topics(deployment.settings.federation)
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._transport = MqttTransport(self._inbox, address, client_id=f"enrolment-{secrets.token_hex(4)}")
        self._seen: dict[str, float] = {}
        self._clock = ServerClock(deployment)
        self._doubt: str | None = None  # reason to doubt the clock
        self._seen_elsewhere: SimpleQueue[Mapping[str, float]] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="enrolment", daemon=True)

    def open(self) -> None:
        self._transport.subscribe(self._topics.enrolment("+"), 1)
        self._transport.subscribe(self._topics.renewal("+"), 1)
        self._transport.open()
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._transport.close()

    def note_seen(self, seen: Mapping[str, float]) -> None:
        """Store when devices were last seen, in seconds since 1970. May be called from any thread."""
        self._seen_elsewhere.put(seen)

    def _serve(self) -> None:
        noted = -math.inf
        while not self._closing.is_set():
            try:
                event = self._inbox.get(timeout=TICK_S)
            except queue.Empty:
                event = None
            if isinstance(event, Received):
                self._answer(event)
            if time.monotonic() - noted > NOTE_SEEN_EVERY_S:
                noted = time.monotonic()
                self._note_seen()
                self._note_clock()
        self._note_seen()

    def _answer(self, event: Received) -> None:
        """Answer a message; no message of a stranger ends the enrolment service."""
        sender = self._topics.device_of(event.topic)
        try:
            if event.topic == self._topics.enrolment(sender):
                self._on_join(sender, event.payload)
            else:
                self._on_renewal(sender, event.payload)
        except (BadPayload, PeerRefused) as error:
            log.warning("enrolment message dropped", extra={"from": sender, "reason": str(error)})
        except (FedvitError, OSError) as error:
            log.error("enrolment failed", extra={"from": sender, "reason": str(error)})
            self.news.put(f"enrolment of {sender} failed: {error}")

    # --- the first certificate ------------------------------------------------------------------------

    def _on_join(self, token_id: str, raw: bytes) -> None:
        with self._deployment.registry.read() as rows:
            token = rows.tokens.find(token_id)
        if token is None:
            raise BadPayload("FV1304", f"token {token_id} is unknown")
        message = unseal(raw, token.secret_bytes, FROM_DEVICE)
        if not isinstance(message, JoinRequest):
            raise BadPayload("FV2311", f"a {type(message).__name__} is not a request to join")
        answer: JoinGranted | JoinRefused
        try:
            with self._deployment.change() as rows:
                certificate = self._grant(rows, token_id, message)
            answer = JoinGranted(message.nonce, token.device, certificate, self._deployment.authority.der)
        except PeerRefused as refusal:
            log.warning("device not enrolled", extra={"device": token.device, "reason": str(refusal)})
            self.news.put(f"{token.device} was not enrolled: {refusal}")
            answer = JoinRefused(message.nonce, str(refusal))
        sealed = seal(answer, token.secret_bytes, FROM_COORDINATOR)
        self._transport.publish(self._topics.enrolment_reply(token_id), sealed, qos=1)

    def _grant(self, rows: Rows, token_id: str, message: JoinRequest) -> bytes:
        """The certificate for a request, DER; the same again for the same request. Raises PeerRefused."""
        token = rows.tokens.find(token_id)
        if token is None:
            raise BadPayload("FV1304", f"token {token_id} is no longer known")
        digest = sha256(message.request).hexdigest()
        known = rows.find_device(token.device)
        if token.request == digest and token.certificate and known and known.revoked_at is None:
            return base64.b64decode(token.certificate)
        _check_token(token, message, known)
        if known is not None:
            rows.revocations.revoke_certificates(known.name)
        if doubt := self._check_clock():
            raise PeerRefused("FV1303", f"the clock of the server is in doubt: {doubt}")
        certificate = self._deployment.authority.device(token.device, message.request, now(), self._device_days)
        rows.put_device(token.device, _record(certificate), now())
        RotationRows(rows).forget_device(token.device)
        der = certificate.public_bytes(Encoding.DER)
        rows.tokens.use(token.id, digest, base64.b64encode(der).decode())
        rows.tokens.withdraw(token.device)  # otherwise another device could take its place with one of them
        log.info("device enrolled", extra={"device": token.device})
        self.news.put(f"{token.device} has joined this deployment")
        return der

    # --- renewal -------------------------------------------------------------------------------------

    def _on_renewal(self, device: str, raw: bytes) -> None:
        message = decode_enrolment(raw)
        if not isinstance(message, RenewRequest):
            raise BadPayload("FV2311", f"a {type(message).__name__} is not a request for renewal")
        self._seen[device] = now()
        with self._deployment.registry.read() as rows:
            known, rotations = rows.find_device(device), RotationRows(rows)
            rotation, noted = rotations.find_newest(), rotations.find_authority(device)
        if known is None or known.revoked_at is not None:
            return
        if rotation and _has_new_authority(rotation, message):
            self._note_move(device, rotation, noted)
        if not _gets_certificate(known, rotation, message):
            return
        if self._check_clock():
            log.warning("certificate not renewed: the clock may be wrong", extra={"device": device})
            return
        with self._deployment.change() as rows:
            known, rotation = rows.find_device(device), RotationRows(rows).find_newest()
            if not _gets_certificate(known, rotation, message):  # it was revoked or renewed meanwhile
                return
            answer = self._renew(rows, known, rotation, message)
        log.info("certificate renewed", extra={"device": device})
        self.news.put(f"{device} got its next certificate")
        self._transport.publish(self._topics.certificate_for(device), encode_enrolment(answer), qos=1)

    def _note_move(self, device: str, rotation: Rotation, noted: str | None) -> None:
        """Store that a device has the new authority; `noted` is the one that the registry has for it."""
        digest = rotation.authority.digest.hex()
        if noted == digest or (noted is None and not rotation.is_open):
            return
        with self._deployment.change() as rows:
            RotationRows(rows).note_authority(device, digest)
        log.info("device moved to the new authority", extra={"device": device})
        self.news.put(f"{device} has moved to the new authority")

    def _renew(self, rows: Rows, device: JoinedDevice, rotation: Rotation | None, message: RenewRequest) -> Renewed:
        """Issue the next certificate of a device, by the new authority if a rotation is under way."""
        if rotation is None or not _may_move(rotation, message):
            certificate = self._deployment.authority.device(device.name, message.request, now(), self._device_days)
            _replace_certificate(rows, device.name, certificate)
            return Renewed(certificate.public_bytes(Encoding.DER))
        signer, newest = rotation.authority, _newest(device)
        if newest.issued_at >= rotation.begun_at and not _is_due(device):
            # the same again: it has not arrived, or is not in use yet
            serial, end_s = int(newest.serial, 16), newest.expires_at
            certificate = signer.device(device.name, message.request, end_s, 0.0, serial=serial)
        else:
            certificate = signer.device(device.name, message.request, now(), self._device_days)
            _replace_certificate(rows, device.name, certificate)
        return Renewed(certificate.public_bytes(Encoding.DER), signer.der, rotation.endorsement_der)

    def _note_seen(self) -> None:
        """Store the times together, since a whole fleet reconnects at once."""
        with suppress(queue.Empty):
            while True:
                self._seen |= self._seen_elsewhere.get_nowait()
        seen, self._seen = self._seen, {}
        if not seen:
            return
        try:
            with self._deployment.change() as rows:
                rows.note_seen(seen)
        except (FedvitError, OSError) as error:
            log.error("registry cannot be written", extra={"reason": str(error)})

    def _note_clock(self) -> None:
        try:
            self._check_clock()
        except (FedvitError, OSError) as error:
            log.error("registry cannot be read or written", extra={"reason": str(error)})

    def _check_clock(self) -> str | None:
        """Reason to doubt the clock; the operator is told of each change."""
        doubt = self._clock.check()
        if (doubt is None) != (self._doubt is None):
            news = doubt or "this machine's clock is plausible again: certificates are issued"
            log.warning("clock", extra={"reason": news})
            self.news.put(news)
        self._doubt = doubt
        return doubt


def _check_token(token: OpenToken, message: JoinRequest, known: JoinedDevice | None) -> None:
    """Raise PeerRefused, with a message for the person at the device."""
    if token.withdrawn:
        raise PeerRefused(
            "FV1302",
            f"this token was withdrawn: {token.device!r} has joined with another one or was revoked, or the deployment "
            f"has a new authority; ask for a new one (coordinator enroll {token.device} --replace)",
        )
    if token.request is not None:
        raise PeerRefused(
            "FV1302", "this token was used already, and works only once; ask for a new one (coordinator enroll)"
        )
    if token.expires_at <= now():
        raise PeerRefused("FV1302", "this token has expired; ask for a new one (coordinator enroll)")
    if message.device != token.device:
        raise PeerRefused("FV1304", f"this token is for {token.device!r}, not for {message.device!r}")
    if known is not None and not token.replaces:
        raise PeerRefused(
            "FV1304",
            f"a device called {token.device!r} has joined already; to replace it: "
            f"coordinator enroll {token.device} --replace",
        )


def _newest(device: JoinedDevice) -> Certificate:
    return max(device.certificates, key=lambda certificate: certificate.expires_at)


def _is_due(device: JoinedDevice) -> bool:
    """Tell whether a certificate is in its last third."""
    newest = _newest(device)
    return newest.expires_at - now() < RENEW_BELOW * (newest.expires_at - newest.issued_at)


def _has_new_authority(rotation: Rotation, message: RenewRequest) -> bool:
    """Tell whether a device trusts the new authority, and its certificate is from it."""
    return message.authorities[:1] == (rotation.authority.digest,)


def _may_move(rotation: Rotation, message: RenewRequest) -> bool:
    """Tell whether a device can use certificates of the new authority; software from before rotations cannot."""
    return rotation.is_open and bool(message.authorities)


def _gets_certificate(
    device: JoinedDevice | None, rotation: Rotation | None, message: RenewRequest
) -> TypeGuard[JoinedDevice]:
    """Tell whether a device gets its next certificate now."""
    if device is None or device.revoked_at is not None:
        return False
    moves = rotation is not None and _may_move(rotation, message) and not _has_new_authority(rotation, message)
    return moves or _is_due(device)


def _replace_certificate(rows: Rows, device: str, certificate: x509.Certificate) -> None:
    rows.drop_expired(device, now())
    rows.add_certificate(device, _record(certificate))


def _record(certificate: x509.Certificate) -> Certificate:
    return Certificate(f"{certificate.serial_number:x}", now(), certificate.not_valid_after_utc.timestamp())
