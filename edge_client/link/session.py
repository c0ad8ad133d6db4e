"""The session of a device with its coordinator: its hello, the welcome, and the refusals between them."""

import logging
import time

from edge_client.link.device_link import DeviceLink
from edge_client.link.resending import Resend
from edge_client.storage.device_storage import DeviceStorage
from fedvit.errors import BadPayload, DataError, PeerRefused, StorageFailed
from fedvit.transport.base import Disconnected
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import (
    MAX_EMPTY_FOLDERS,
    CoordinatorState,
    Hello,
    Manifest,
    Models,
    Refused,
    Task,
    Welcome,
    encode,
    encode_class_list,
    term_of,
)

log = logging.getLogger(__name__)

RETURN_SPREAD_S = 4.0
"""Devices that lost their broker reconnect at random times within this interval, or a longer one that the coordinator
of a large fleet announces."""
SAME_ID_PATIENCE_S = 75.0
"""Longest wait for the device's own last will when the coordinator reports that its id is in use: a little more than
1.5 keepalives."""
OTHER_VERSION_PATIENCE_S = 20.0
"""Longest wait for a welcome after a message in another wire version, so that a single stray message does not end the
device."""


class Session:
    """The state of a device toward its coordinator. Raises DataError for class names that cannot be announced."""

    def __init__(self, link: DeviceLink, storage: DeviceStorage) -> None:
        self.link = link
        self.connected = False  # to the broker
        self.trouble = ""  # reason why the broker is not connected; empty while it is
        self.refusal: str | None = None  # reason of the newest answer, while the device may still be accepted
        self.epoch: int | None = None  # of the coordinator that welcomed the device
        self._storage = storage
        self._term = 0  # the newest, of a coordinator that leads others
        self._hello: Resend | None = None  # set while a hello waits for its answer
        self._refused_since: float | None = None
        self._other_version: tuple[PeerRefused, float] | None = None  # received since the last welcome, and when
        self._wait_logged = False  # the log has reported that no coordinator answers
        self.update_class_list()

    @property
    def is_joined(self) -> bool:
        """Return True if a coordinator has answered the newest hello."""
        return self.connected and self.epoch is not None and self._hello is None

    def is_for_this_process(self, message: Welcome | Refused | Task | Models) -> bool:
        """Return False for a message to an earlier process with this name, or of an earlier coordinator."""
        if isinstance(message, Task | Models) and message.epoch != self.epoch:
            return False
        return message.instance == self.link.instance

    # --- the connection -------------------------------------------------------------------------------

    def on_connected(self) -> None:
        self.connected = True
        self._wait_logged = False
        self.trouble = ""
        log.info("connected to the broker")

    def on_disconnected(self, event: Disconnected) -> bool:
        """Note that the link is down; False if the reason is that of the last attempt."""
        is_new = event.reason != self.trouble
        if is_new:
            remedy = "" if self.connected else ". 'edge-client doctor' looks for the cause"
            log.warning(f"no connection to the broker; trying again{remedy}", extra={"reason": event.reason})
        self.trouble = event.reason
        self.connected = False
        self.refusal = None
        return is_new

    def tick(self) -> bool:
        """Return True if the hello is due again. Raises PeerRefused for a coordinator of another version."""
        if self._other_version and time.monotonic() - self._other_version[1] > OTHER_VERSION_PATIENCE_S:
            raise self._other_version[0]
        if not (self.connected and self._hello and self._hello.due()):
            return False
        if self._hello.is_overdue() and not self._wait_logged and self.refusal is None:
            self._wait_logged = True
            log.warning(
                "no coordinator answers; retrying. 'edge-client doctor' looks for the cause",
                extra={"federation": self.link.identity.federation},
            )
        return True

    # --- the hello ------------------------------------------------------------------------------------

    def announce(self, *, again: bool = False) -> None:
        """Send a hello; `again`: the same one, whose wait goes on."""
        if not (again and self._hello):
            self._hello = Resend()
        hello = self._make_hello()
        try:
            self._storage.ledger.note_hello(hello)
        except StorageFailed as error:  # a device with a full disk stays online
            log.warning("hello not in the ledger", extra={"reason": str(error)})
        self.link.send(hello)

    def update_class_list(self) -> None:
        """Put the class names into a blob if they do not fit into a hello.

        Raises DataError if they do not fit into a blob either, and StorageFailed.
        """
        self.link.class_list = None
        try:
            encode(self._make_hello())
        except BadPayload:
            self.link.class_list = self._store_class_list(self._storage.data.classes)

    def _make_hello(self) -> Hello:
        link, data = self.link, self._storage.data
        return Hello(
            instance=link.instance,
            software=link.identity.software,
            profile=link.identity.profile,
            classes=() if link.class_list else data.classes,
            train_samples=len(data.train),
            test_samples=len(data.test),
            labels=dict(link.identity.labels),
            connection=link.transport.connection,
            class_list=link.class_list,
            empty_folders=data.empty[:MAX_EMPTY_FOLDERS],
            denies=link.identity.denies,
            least_mask=link.identity.least_mask,
            publisher=link.identity.publisher,
            models=link.identity.models,
        )

    def _store_class_list(self, classes: tuple[str, ...]) -> Manifest:
        try:
            return self._storage.blobs.put(encode_class_list(classes))
        except BadPayload as error:
            raise DataError("FV1406", f"{len(classes)} class folders cannot be announced: {error}") from error

    # --- its answers ----------------------------------------------------------------------------------

    def on_coordinator(self, state: CoordinatorState) -> bool:
        """Take the state of a coordinator into account; True if another one is there now."""
        if self._is_outdated(state.epoch):
            return False
        if not state.alive:
            self.refusal = None
            log.info("the coordinator left; waiting for it")
        elif state.epoch != self.epoch:
            # a hello on its way may be answered before the next one is due
            self._hello = self._hello or Resend()
            self._hello.hasten(state.spread_s)
            return True
        return False

    def on_welcome(self, welcome: Welcome) -> None:
        if self._is_outdated(welcome.epoch):
            return
        link = self.link
        if self.epoch != welcome.epoch:
            log.info("joined", extra={"device": link.identity.device, "next": welcome.waiting_for})
            if link.renewal:
                link.renewal.ask_soon()
        if welcome.store not in ("", link.exchange.store_origin):
            log.info("large blobs come from an object store", extra={"store": welcome.store})
        link.exchange.store_origin = welcome.store
        link.use_limits(welcome.limits or BrokerLimits())
        self.epoch = welcome.epoch
        link.transport.spread_return(max(RETURN_SPREAD_S, welcome.spread_s))
        self._hello = None
        self._refused_since = self.refusal = None
        self._other_version = None
        link.answers.send_all(welcome.epoch)

    def on_refused(self, refused: Refused) -> None:
        """Wait for a later acceptance. Raises PeerRefused when the refusal is final."""
        device = self.link.identity.device
        now, self.refusal = time.monotonic(), refused.reason
        self._refused_since = now if self._refused_since is None else self._refused_since
        if refused.final or now - self._refused_since > SAME_ID_PATIENCE_S:
            raise PeerRefused("FV1409", f"the coordinator refused device {device!r}: {refused.reason}")
        log.warning("not accepted yet; retrying", extra={"device": device, "reason": refused.reason})

    def on_other_version(self, error: PeerRefused) -> bool:
        """Note a message of another version, or a damaged one; True if the answer to a hello shall show which."""
        if self._other_version is not None:
            return False
        log.warning("message dropped", extra={"reason": str(error)})
        self._other_version = error, time.monotonic()
        return self._hello is None

    def _is_outdated(self, epoch: int) -> bool:
        """Return True if an epoch belongs to a coordinator that led before the present one."""
        term = term_of(epoch)
        if 0 < term < self._term:
            log.info("a coordinator that no longer leads is ignored", extra={"term": term, "leads": self._term})
            return True
        self._term = max(self._term, term)
        return False
