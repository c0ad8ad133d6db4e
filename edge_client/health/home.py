"""Shows the device on the home's own broker, by Home Assistant's MQTT discovery, if its owner wants that.

The connection has a thread of its own, and keeps the newest values only: a home broker that is slow, away or wrong
never delays the device.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTMessageInfo, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion

from edge_client.health.history import AgentState
from edge_client.health.home_entities import (
    OFFLINE,
    ONLINE,
    HomeTopics,
    HomeValues,
    describe_entity,
    list_entities,
)
from edge_client.link.device_link import DeviceIdentity
from fedvit.errors import LinkDown
from fedvit.transport.address import Address, describe_error, tls_context
from fedvit.transport.backoff import Backoff
from profiles.probes.meter import Sensors

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Between two looks at the agent."""
REPEAT_EVERY_S = 30.0
"""Between two messages whose only news is a measured value."""
KEEPALIVE_S = 60
TURN_S = 0.5
PATIENCE_S = 10.0
"""Longest wait for an answer of the broker."""
FAREWELL_S = 1.0
"""Longest wait for the last messages of a device that leaves."""
MEASURED = ("temperature", "battery")


class HomePublisher:
    """Entries on the home's broker, from `start` to `close`: their discovery, and the newest values by `show`."""

    def __init__(self, address: Address, configs: list[tuple[str, bytes]], *, availability: str, state: str) -> None:
        self._address = address
        self._configs = configs
        self._availability, self._state = availability, state
        self._newest: dict[str, Any] | None = None  # replaced by another thread, read by ours
        self._sent: dict[str, Any] | None = None
        self._sent_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="home", daemon=True)
        self._failed = False

    def start(self) -> None:
        """Begin to connect, again after each loss."""
        self._thread.start()

    def show(self, values: dict[str, Any]) -> None:
        """Publish these values next; returns at once."""
        self._newest = values

    def close(self) -> None:
        """Publish the last values and the end, and end the connection."""
        self._stop.set()
        self._thread.join(TURN_S + FAREWELL_S)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            up_at: list[float] = []
            try:
                self._serve_connection(up_at)
            except (OSError, ValueError, LinkDown) as error:
                if not self._failed:
                    reason = describe_error(error)
                    log.warning("no connection to the home's broker", extra={"broker": self._address, "reason": reason})
                self._failed = True
            except Exception:
                log.exception("the home's broker is not served any more")
                return
            self._stop.wait(backoff.wait_s(time.monotonic() - up_at[0] if up_at else None))

    def _serve_connection(self, up_at: list[float]) -> None:
        """Connect, and publish until the end; `up_at` gets the time of the answer. Raises LinkDown, OSError."""
        will = (self._availability, OFFLINE)
        with HomeConnection(self._address, will) as link:
            up_at.append(time.monotonic())
            if self._failed:
                log.info("the home's broker is connected again")
            self._failed, self._sent = False, None
            for topic, content in self._configs:
                link.publish(topic, content)
            link.publish(self._availability, ONLINE)
            while not self._stop.is_set():
                self._publish_news(link)
                link.turn(TURN_S)
            self._publish_news(link)
            link.publish(self._availability, OFFLINE)
            link.settle(FAREWELL_S)

    def _publish_news(self, link: "HomeConnection") -> None:
        newest, now = self._newest, time.monotonic()
        if newest is None or newest == self._sent or link.is_behind:
            return
        if self._sent is not None and now < self._sent_at + REPEAT_EVERY_S:
            changed = {key for key, value in newest.items() if value != self._sent.get(key)}
            if changed <= set(MEASURED):
                return
        link.publish(self._state, msgspec.json.encode(newest), qos=0)
        self._sent, self._sent_at = newest, now


class Home:
    """The agent's entries on the home's broker, from `start` to `close`. `look` is to be called often."""

    def __init__(self, address: Address, identity: DeviceIdentity, sensors: Sensors) -> None:
        topics, entities = HomeTopics(identity.federation, identity.device), list_entities(sensors)
        self._values = HomeValues(sensors, entities)
        configs = [(topics.config(entity), describe_entity(entity, topics, identity)) for entity in entities]
        self._publisher = HomePublisher(address, configs, availability=topics.availability, state=topics.state)
        self._next_look = 0.0

    def start(self) -> None:
        """Begin to connect, again after each loss."""
        self._publisher.start()

    def look(self, state: Callable[[], AgentState]) -> None:
        """Take the newest values, at most once a second; returns at once."""
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self._publisher.show(self._values.read(state()))

    def close(self, state: AgentState) -> None:
        """Publish the last values and that the device leaves, and end the connection."""
        self._publisher.show(self._values.read(state))
        self._publisher.close()


class HomeConnection:
    """One connection to the home's broker, served by the caller's thread."""

    def __init__(self, address: Address, will: tuple[str, bytes] | None = None) -> None:
        self._address = address
        name = f"fedvit-{secrets.token_hex(6)}"
        self._client = client = Client(CallbackAPIVersion.VERSION2, name, protocol=MQTTv311)
        if address.user is not None:
            client.username_pw_set(address.user, address.password)
        if address.tls:
            client.tls_set_context(tls_context(address))
        if will is not None:
            client.will_set(*will, qos=1, retain=True)
        client.connect_timeout = PATIENCE_S
        client.on_connect = self._note_answer
        self._answer: str | None = None
        self._waiting: list[MQTTMessageInfo] = []

    def __enter__(self) -> "HomeConnection":
        """Connect. Raises LinkDown if the broker refuses or does not answer, OSError."""
        self._client.connect(self._address.host, self._address.port, KEEPALIVE_S)
        until = time.monotonic() + PATIENCE_S
        while self._answer is None and time.monotonic() < until:
            self.turn(TURN_S)
        if self._answer != "Success":
            raise LinkDown("FV1471", f"{self._address} refused: {(self._answer or 'no answer').lower()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop(TURN_S)

    @property
    def is_behind(self) -> bool:
        """True while the broker does not take what was published before."""
        return self._client.want_write()

    def publish(self, topic: str, content: bytes, *, qos: int = 1) -> None:
        """Publish a message that the broker keeps; an empty one removes the kept one."""
        sent = self._client.publish(topic, content, qos=qos, retain=True)
        if qos:
            self._waiting = [info for info in (*self._waiting, sent) if not info.is_published()]

    def settle(self, seconds: float) -> bool:
        """Wait for the broker's acknowledgements; return whether all came. Raises LinkDown."""
        until = time.monotonic() + seconds
        while not (done := all(info.is_published() for info in self._waiting)) and time.monotonic() < until:
            self.turn(TURN_S)
        return done

    def turn(self, seconds: float) -> None:
        """Send and receive for at most so long. Raises LinkDown when the connection has ended."""
        if (code := self._client.loop(seconds)) != MQTT_ERR_SUCCESS and self._answer in (None, "Success"):
            raise LinkDown("FV1471", f"{self._address}: the connection ended ({code.name})")

    def _note_answer(self, _client: Client, _data: object, _flags: object, reason: object, _more: object) -> None:
        self._answer = str(reason)


def remove_entities(address: Address, topics: HomeTopics) -> None:
    """Remove everything that a device has published at the home's broker. Raises LinkDown."""
    try:
        with HomeConnection(address) as link:
            for topic in topics.list_all():
                link.publish(topic, b"")
            if not link.settle(PATIENCE_S):
                raise LinkDown("FV1471", f"{address} has not acknowledged everything; try again")
    except OSError as error:
        raise LinkDown("FV1471", f"{address} cannot be reached: {describe_error(error)}") from error


def try_connection(address: Address) -> None:
    """Connect once. Raises LinkDown if that fails."""
    try:
        with HomeConnection(address):
            pass
    except OSError as error:
        raise LinkDown("FV1471", f"{address} cannot be reached: {describe_error(error)}") from error
