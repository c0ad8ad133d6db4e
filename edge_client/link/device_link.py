"""The link of a device to its coordinator: messages, blobs, the certificate, and unacknowledged answers."""

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_client.link.answers import NO_TEXT, Answers, FailureText
from edge_client.link.identity import Renewal
from edge_client.storage.device_storage import DeviceStorage
from fedvit.errors import BadPayload, StorageFailed
from fedvit.resources import DeviceProfile
from fedvit.transport.base import Transport, Will
from fedvit.transport.blob_receiver import Finished
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import (
    AnyMessage,
    BlobAck,
    BlobNack,
    BlobUrl,
    DeviceState,
    FromDevice,
    Manifest,
    Progress,
    TransferMessage,
    UseDedicatedTopic,
    encode,
)
from fedvit.wire.topics import Topics, check_name
from fedvit.wire.transfer import chunk_bytes_within

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"


@dataclass(frozen=True, kw_only=True)
class DeviceIdentity:
    """The names and properties that a device announces."""

    device: str
    federation: str
    software: str
    profile: DeviceProfile
    labels: Mapping[str, str] = field(default_factory=dict)
    denies: tuple[str, ...] = ()  # keys of what its policy does not allow
    least_mask: float = 0.0  # share of patches that its policy requires features to leave out
    publisher: str = ""  # public key of the publisher that it trusts; "": none
    models: int = 0  # MODELS_VERSION; 0: its owner alone chooses which of its models is used

    def __post_init__(self) -> None:
        check_name(self.device, "device id")
        check_name(self.federation, "federation")


class DeviceLink:
    """One device's link. `exchange` makes the object that fetches and serves blobs.

    `renewal` asks for the next certificate; None: the device has none.
    """

    def __init__(
        self,
        identity: DeviceIdentity,
        transport: Transport,
        storage: DeviceStorage,
        *,
        renewal: Renewal | None = None,
        exchange: Callable[..., BlobExchange] = BlobExchange,
        failure_text: FailureText = NO_TEXT,
    ) -> None:
        self.identity = identity
        self.instance = secrets.token_hex(8)
        self.topics = Topics(identity.federation)
        self.transport = transport
        self.renewal = renewal
        self.masked = ""  # digest of the newest result with masks
        self.class_list: Manifest | None = None  # the blob with the class names, if a hello cannot hold them
        self.exchange = exchange(
            transport,
            storage.blobs,
            send=self._send_transfer_message,
            topics=ChunkTopics(lambda digest: self.topics.upload(identity.device, digest)),
            may_read=lambda peer, digest: digest in self.list_served(),
        )
        self.answers = Answers(storage, send=self.send, failure_text=failure_text)
        self._blobs = storage.blobs

    def open(self) -> None:
        """Start to connect."""
        self.transport.subscribe(self.topics.coordinator_state, 1)
        self.transport.subscribe(self.topics.to_device(self.identity.device), 1)
        if self.renewal:
            self.transport.subscribe(self.renewal.answers, 1)
        self.transport.open(self._make_will)

    def _make_will(self, connection: int) -> Will:
        farewell = DeviceState(self.instance, online=False, connection=connection)
        return Will(self.topics.device_state(self.identity.device), encode(farewell))

    def close(self, *, connected: bool) -> None:
        """Announce that the device leaves."""
        self.exchange.cancel()
        if connected:
            farewell = self._make_will(self.transport.connection)
            self.transport.publish(farewell.topic, farewell.payload, qos=1)
        self.transport.close()

    def resume(self, certificate: Path | None) -> None:
        """Continue transfers after a connection, for which the broker accepted `certificate`."""
        self.exchange.on_reconnect()
        if self.renewal:
            self.renewal.note_connected(self.transport, certificate)

    def tick(self) -> None:
        """Do what is due; call it a few times a second while the link is up."""
        self.exchange.tick()
        if self.renewal:
            self.renewal.tick(self.transport)

    # --- messages -------------------------------------------------------------------------------------

    def send(self, message: FromDevice) -> None:
        """Send with QoS 1. Messages that are lost while the link is down are sent again after the next welcome."""
        self.transport.publish(self.topics.from_device(self.identity.device), encode(message), qos=1)

    def report(self, progress: Progress) -> None:
        """Publish the progress of a task. May be called from any thread."""
        self.transport.publish(self.topics.from_device(self.identity.device), encode(progress), qos=0)

    def traffic_bytes(self) -> tuple[int, int]:
        """Return the bytes that the device received and sent so far."""
        return self.transport.received_bytes, self.transport.sent_bytes

    def take_bulk(self, topic: str, payload: bytes) -> bool:
        """Take a certificate or a piece of a blob; False for a message of the coordinator."""
        if self.renewal and topic == self.renewal.answers:
            self.renewal.on_answer(payload)
            return True
        if topic in (self.topics.coordinator_state, self.topics.to_device(self.identity.device)):
            return False
        self.exchange.heard(topic, payload)
        return True

    def on_blob_message(self, message: AnyMessage) -> None:
        """Handle a message about the transfer of a blob; others are for an earlier process with this name."""
        try:
            match message:
                case BlobNack():
                    self.exchange.on_nack(COORDINATOR, message)
                case BlobAck():
                    self.exchange.on_ack(COORDINATOR, message)
                case BlobUrl():
                    self.exchange.on_url(COORDINATOR, message)
                case UseDedicatedTopic():
                    self.exchange.on_use_dedicated_topic(COORDINATOR, message)
        except (BadPayload, StorageFailed) as error:  # the coordinator asks again, or sends chunks
            log.warning("blob message refused", extra={"kind": type(message).__name__, "reason": str(error)})

    # --- blobs ----------------------------------------------------------------------------------------

    def fetch(self, manifest: Manifest, finished: Finished) -> None:
        """Fetch a blob from the coordinator, and call `finished` then."""
        digest = manifest.digest
        dedicated_topic = self.topics.chunks_for(self.identity.device, digest)
        self.exchange.fetch(manifest, COORDINATOR, self.topics.broadcast(digest), finished, dedicated_topic)

    def cancel_fetches(self) -> None:
        self.exchange.cancel(COORDINATOR)

    def use_limits(self, limits: BrokerLimits) -> None:
        """Keep the broker's limits from now on."""
        self.transport.use_limits(limits)
        chunk_bytes = chunk_bytes_within(limits.max_payload_bytes)
        if chunk_bytes != self._blobs.chunk_bytes:
            self._blobs.chunk_bytes = chunk_bytes
            for digest in self.list_served():
                self.exchange.stop_sending(digest)  # it was being sent in chunks of another size

    def list_served(self) -> set[str]:
        """Return the digests of blobs that the coordinator may fetch from this device."""
        others = {self.masked} - {""} | ({self.class_list.digest} if self.class_list else set())
        return self.answers.uploads() | others

    def _send_transfer_message(self, peer: str, message: TransferMessage) -> None:
        assert not isinstance(message, UseDedicatedTopic | BlobUrl)  # only the coordinator sends them
        self.send(message)
