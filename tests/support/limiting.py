"""A small MQTT proxy in front of real brokers. It keeps the limits of a cloud's broker: a client that breaks one is
disconnected. With several brokers behind it, it is a load balancer: a client gets the first that answers."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from coordinator.security.broker.process import claim_port
from fedvit.transport.address import Address
from fedvit.wire.limits import BrokerLimits
from tests.support.waiting import WAIT_S

STALL_S = 2.0
"""A connection may publish what it saved up in this time at once: this machine may be busy."""
CONNECT, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x30, 0x40, 0x80, 0x90
"""Kinds of packets: the upper half of the first byte."""
FAILURE = 0x80
"""Of a subscription."""


class BrokenLimit(Exception):
    """The message says which, and what came."""


class _Connection:
    """What a broker keeps of a client."""

    def __init__(self, limits: BrokerLimits, retains: bool) -> None:
        self._limits = limits
        self._retains = retains
        self._version = 4
        self._inflight = 0
        self._published = 0.0  # beyond the limit's pace
        self._published_at = time.monotonic()

    def from_client(self, first: int, body: bytes) -> bytes:
        kind = first & 0xF0
        if kind == CONNECT:
            self._version = body[6]
            self._check_retained(body[7] & 0x20)
        elif kind == PUBLISH:
            self._check_publish(first, body)
        elif kind == SUBSCRIBE and (topics := self._topics(body)) > self._limits.topics_per_subscribe:
            raise BrokenLimit(f"topics_per_subscribe: {topics}")
        return body

    def from_broker(self, first: int, body: bytes) -> bytes:
        if first & 0xF0 == PUBACK:
            self._inflight -= 1
        return body

    def _check_publish(self, first: int, body: bytes) -> None:
        self._check_retained(first & 1)
        position = 2 + int.from_bytes(body[:2]) + (2 if first & 0x06 else 0)
        if self._version == 5:
            position = self._after_properties(body, position)
        if len(body) - position > self._limits.max_payload_bytes:
            raise BrokenLimit(f"max_payload_bytes: {len(body) - position}")
        if first & 0x06:
            self._inflight += 1
            if self._inflight > self._limits.max_inflight:
                raise BrokenLimit(f"max_inflight: {self._inflight}")
        if per_s := self._limits.publishes_per_s:
            now = time.monotonic()
            self._published = max(0.0, self._published - per_s * (now - self._published_at)) + 1
            self._published_at = now
            if self._published > per_s * STALL_S:
                raise BrokenLimit(f"publishes_per_s: {self._published:.0f} at once")

    def _check_retained(self, retained: int) -> None:
        if retained and not self._retains:
            raise BrokenLimit("retained messages")

    def _topics(self, body: bytes) -> int:
        position, topics = 2, 0
        if self._version == 5:
            position = self._after_properties(body, position)
        while position < len(body):
            position += 3 + int.from_bytes(body[position : position + 2])
            topics += 1
        return topics

    @staticmethod
    def _after_properties(body: bytes, position: int) -> int:
        assert body[position] < 0x80, "our clients send few properties"
        return position + 1 + body[position]


class LimitingProxy:
    """See above. `broken` lists the limits that clients broke."""

    def __init__(self, brokers: Sequence[Address], limits: BrokerLimits, retains: bool = True) -> None:
        self.address = Address("127.0.0.1", claim_port())
        self.broken: list[str] = []
        self.refuse = 0  # number of further subscriptions that are refused
        self._brokers = brokers
        self._limits = limits
        self._retains = retains
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._serves.wait(WAIT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._on_client, self.address.host, self.address.port)
        self._serves.set()
        await self._ended.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = _Connection(self._limits, self._retains)
        for broker in self._brokers:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection(broker.host, broker.port)
                break
        else:
            writer.close()
            return
        ways = [
            asyncio.ensure_future(_forward(reader, back, kept.from_client)),
            asyncio.ensure_future(_forward(there, writer, lambda first, body: self._answer(kept, first, body))),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            self.broken += [str(error) for way in done if isinstance(error := way.exception(), BrokenLimit)]
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, back):
                end.transport.abort()

    def _answer(self, kept: _Connection, first: int, body: bytes) -> bytes:
        if first & 0xF0 == SUBACK and self.refuse:
            self.refuse -= 1
            return body[:-1] + bytes([FAILURE])
        return kept.from_broker(first, body)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, check: Callable[[int, bytes], bytes]
) -> None:
    """Pass on whole packets until one side ends."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readexactly(2)
            while head[-1] & 0x80:
                head += await reader.readexactly(1)
            body = await reader.readexactly(sum((byte & 0x7F) << 7 * place for place, byte in enumerate(head[1:])))
            writer.write(head + check(head[0], body))
            await writer.drain()


@contextmanager
def limiting(*brokers: Address, limits: BrokerLimits | None = None, retains: bool = True) -> Iterator[LimitingProxy]:
    proxy = LimitingProxy(brokers, limits or BrokerLimits(max_inflight=65_535, topics_per_subscribe=1000), retains)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
