"""The embedded broker: amqtt in a process of its own, so that it never stalls the coordinator.

amqtt 0.12 leaves open what a fleet needs; `FleetBroker` closes it:

- It never drops a silent client, so the last will of a device that lost power is never published.
- If a client reconnects under its id before its old connection is known to be dead, the client itself is declared
  dead when the old connection is.
- Every new client receives the retained messages of all subscriptions, and a subscription that arrives
  meanwhile breaks the new client's session. So nothing is retained; none of our programs needs it.
- It parses a CONNECT of MQTT 5 as one of 3.1.1 before it checks the version, and waits for bytes that never come.
- It drops messages that a client sent just before it left, though it has acknowledged them (on Python 3.12 and later).
- It formats every payload for a debug log that is switched off, which takes two thirds of its time.
"""

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import signal
from dataclasses import dataclass
from typing import Any

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker
from amqtt.plugins.base import BaseAuthPlugin

from coordinator.security.broker import FLEET_USER, PASSWORD_VARIABLE

LINGER_S = 0.3
"""Time to deliver the last messages of the coordinator before the broker ends."""
TAKE_OVER_S = 5.0
FIRST_BYTES_S = 10.0
DELIVERY_LOOK_S = 0.001
"""Interval of looking whether all messages of a client that has left are passed on."""
UNKNOWN_VERSION = b"\x20\x02\x00\x01"
"""CONNACK of a 3.1.1 broker to a client of another version; the client then retries with 3.1.1."""


class FleetPassword(BaseAuthPlugin):  # type: ignore[misc]
    """Lets in clients that know the fleet's password."""

    @dataclass
    class Config:
        password: str

    async def authenticate(self, *, session: Any) -> bool:
        given = (session.password or "").encode()
        return session.username == FLEET_USER and hmac.compare_digest(given, self.config.password.encode())


class _Payload(bytes):
    """A message body that is cheap to write into a log."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


class _Socket(StreamWriterAdapter):  # type: ignore[misc]
    """A client's socket that can be closed at once; amqtt's own `close` waits until the peer has read."""

    def abort(self) -> None:
        self._writer.transport.abort()


class _Reader(StreamReaderAdapter):  # type: ignore[misc]
    """A stream whose first bytes were already read."""

    def __init__(self, reader: asyncio.StreamReader, seen: bytes) -> None:
        super().__init__(reader)
        self._seen = seen

    async def read(self, n: int = -1) -> bytes:
        if not self._seen:
            data: bytes = await super().read(n)
            return data
        seen, self._seen = self._seen[:n], self._seen[n:]
        return seen if len(seen) == n else seen + await super().read(n - len(seen))


async def _first_bytes(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    """The first bytes of a client, up to the MQTT version in its CONNECT; and that version, 0 if there is none."""
    seen = b""
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        async with asyncio.timeout(FIRST_BYTES_S):
            seen += await reader.readexactly(2)
            while seen[-1] >= 0x80 and len(seen) < 5:
                seen += await reader.readexactly(1)
            seen += await reader.readexactly(7)  # the protocol's name with its length, and the version
            return seen, seen[-1]
    return seen, 0


class FleetBroker(Broker):  # type: ignore[misc]
    """amqtt with keep-alive and take-over as MQTT 3.1.1 has them, and without retained messages."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._links: dict[str, tuple[_Socket, asyncio.Event]] = {}

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        seen, version = await _first_bytes(reader)
        if version == 5:
            writer.write(UNKNOWN_VERSION)
            writer.close()
            return
        await self._client_connected(listener_name, _Reader(reader, seen), _Socket(writer))

    async def _handle_client_session(
        self, reader: Any, writer: _Socket, client_session: Any, handler: Any, *rest: Any
    ) -> None:
        client = client_session.client_id
        if client in self._links:
            previous, ended = self._links[client]
            previous.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), TAKE_OVER_S)  # its will must precede the new session
        this = (writer, asyncio.Event())
        self._links[client] = this
        client_session.keep_alive = (3 * client_session.keep_alive + 1) // 2  # MQTT 3.1.1, section 3.1.2.10
        handler.handle_read_timeout = writer.abort
        wait_disconnect = handler.wait_disconnect

        async def wait_for_delivery() -> Any:
            farewell = await wait_disconnect()
            while not client_session.delivered_message_queue.empty():
                await asyncio.sleep(DELIVERY_LOOK_S)
            return farewell

        handler.wait_disconnect = wait_for_delivery
        try:
            await super()._handle_client_session(reader, writer, client_session, handler, *rest)
        finally:
            this[1].set()
            if self._links.get(client) is this:
                del self._links[client]

    async def _broadcast_message(
        self, session: Any, topic: str | None, data: bytes | None, force_qos: int | None = None
    ) -> None:
        await super()._broadcast_message(session, topic, _Payload(data or b""), force_qos)

    async def retain_message(
        self, source_session: Any, topic_name: str, data: bytes | bytearray, qos: int | None = None
    ) -> None:
        pass


async def serve(listen: str, port: int, password: str) -> None:
    """Run until the coordinator asks to end."""
    plugins: dict[str, Any] = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {}}
    if password:
        plugins = {"coordinator.security.broker.embedded.FleetPassword": {"password": password}}
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    broker = FleetBroker({"listeners": {"default": {"type": "tcp", "bind": f"{listen}:{port}"}}, "plugins": plugins})
    await broker.start()
    await ended.wait()
    await asyncio.sleep(LINGER_S)
    logging.disable()  # amqtt reports each of its tasks that ends now


def main() -> None:
    parser = argparse.ArgumentParser(description="The embedded MQTT broker; started by the coordinator.")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(options.listen, options.port, os.environ.pop(PASSWORD_VARIABLE, "")))


if __name__ == "__main__":
    main()
