"""Bad networks on loopback: each device reaches the broker through a link that can be slow, lossy, cut or silent.

A link forwards TCP, so it delays segments and never drops them: a lost segment, and all behind it, arrive a round trip
later, and loss limits the rate as TCP's congestion control does, by the rule of Mathis et al., "The Macroscopic
Behavior of the TCP Congestion Avoidance Algorithm", 1997: MSS / RTT * sqrt(3/2) / sqrt(p).
"""

import asyncio
import math
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct

from fedvit.errors import ConfigError

SEGMENT_BYTES = 1448
QUEUED_SEGMENTS = 64
"""Segments that a link buffers in each direction; when they are used up, the sender waits."""
START_S = 10.0

Made = TypeVar("Made")


class Network(Struct, frozen=True):
    """Properties of a device's link to the broker, in each direction. Without a rate it is as fast as this machine."""

    bits_per_s: float | None = None
    latency_s: float = 0.0
    loss: float = 0.0  # share of segments, below 1

    @classmethod
    def parse(cls, text: str) -> "Network":
        """Read rate, latency and loss in any order, each at most once. Raises ConfigError.

        >>> Network.parse("2mbit,50ms,5%")
        Network(bits_per_s=2000000.0, latency_s=0.05, loss=0.05)
        """
        units = {"kbit": ("bits_per_s", 1e3), "mbit": ("bits_per_s", 1e6), "ms": ("latency_s", 1e-3)}
        units |= {"s": ("latency_s", 1.0), "%": ("loss", 0.01)}
        values: dict[str, float] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z%]+)\s*", part.lower())
            key, factor = units.get(found[2], ("", 0.0)) if found else ("", 0.0)
            try:
                value = float(found[1]) * factor if found else 0.0
            except ValueError:
                key, value = "", 0.0
            if not key or key in values or (key == "bits_per_s" and value <= 0) or (key == "loss" and value >= 1):
                raise ConfigError(f"network {text!r}: {part!r} is not understood; expected the like of 2mbit,50ms,5%")
            values[key] = value
        return cls(**values)

    def bytes_per_s(self) -> float:
        """Rate of one TCP connection."""
        rate = math.inf if self.bits_per_s is None else self.bits_per_s / 8
        if self.loss and self.latency_s:
            rate = min(rate, SEGMENT_BYTES / (2 * self.latency_s) * math.sqrt(1.5 / self.loss))
        return rate


class _Direction:
    """One direction of a link: computes when each segment arrives."""

    def __init__(self, network: Network, seed: str) -> None:
        self.network = network
        self.carried_bytes = 0
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._last_due = 0.0

    def due(self, size: int) -> float:
        """When a segment that is sent now arrives, on the monotonic clock."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size / self.network.bytes_per_s()
        arrives = self._free_at + self.network.latency_s
        while self._random.random() < self.network.loss:
            arrives += 2 * self.network.latency_s
        self._last_due = max(self._last_due, arrives)  # TCP delivers in order
        return self._last_due


class Link:
    """One device's link to the broker. The device connects to `port`; the methods are for the loop's thread."""

    def __init__(self, target_port: int, network: Network, seed: str) -> None:
        self.port = 0
        self.directions = (_Direction(network, f"{seed} up"), _Direction(network, f"{seed} down"))
        self._target_port = target_port
        self._open = True
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection, and every new one."""
        self._open = False
        for writer in self._writers:
            writer.transport.abort()

    def silence(self) -> None:
        """Hold back all data in both directions."""
        self._forwarding.clear()

    def mend(self) -> None:
        self._open = True
        self._forwarding.set()

    def close(self) -> None:
        """Reset all connections and stop listening."""
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _accept(self, device: asyncio.StreamReader, to_device: asyncio.StreamWriter) -> None:
        self._writers.add(to_device)
        try:
            if self._open:
                await self._connection(device, to_device)
        except OSError:
            pass  # one side closed; the other is closed below
        finally:
            to_device.transport.abort()
            self._writers.discard(to_device)

    async def _connection(self, device: asyncio.StreamReader, to_device: asyncio.StreamWriter) -> None:
        await self._forwarding.wait()
        broker, to_broker = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers.add(to_broker)
        up, down = self.directions
        copies = [
            asyncio.ensure_future(self._carry(device, to_broker, up)),
            asyncio.ensure_future(self._carry(broker, to_device, down)),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            to_broker.transport.abort()
            self._writers.discard(to_broker)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
        """Copy data in one direction until one side closes."""
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_SEGMENTS)

        async def send() -> None:
            with suppress(ConnectionError):  # one side was killed with data that it had not read
                while not reader.at_eof():
                    # an unshaped link need not be cut into segments
                    shaped = direction.network != Network()
                    if not (piece := await reader.read(SEGMENT_BYTES if shaped else 65536)):
                        break
                    await in_flight.put((direction.due(len(piece)) if shaped else 0.0, piece))
            await in_flight.put((0.0, b""))

        sending = asyncio.ensure_future(send())
        try:
            while True:
                due, piece = await in_flight.get()
                if (wait_s := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                await self._forwarding.wait()
                if not piece:
                    return
                direction.carried_bytes += len(piece)
                writer.write(piece)
                await writer.drain()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


class Links:
    """All devices' links, in a thread of their own; use as a context manager."""

    def __init__(self, target_port: int, network: Network | None = None, seed: int = 0) -> None:
        self._target_port = target_port
        self._network = network or Network()
        self._seed = seed
        self._links: dict[str, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)

    def __enter__(self) -> "Links":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Close all links and cancel copies that wait on a silent link."""
        for link in self._links.values():
            link.close()
        carrying = asyncio.all_tasks() - {asyncio.current_task()}
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)

    def port(self, name: str) -> int:
        """The port that the device of this name connects to; its link is made at the first call."""
        if name not in self._links:

            async def make() -> Link:
                link = Link(self._target_port, self._network, f"{self._seed} {name}")
                await link.listen()
                return link

            self._links[name] = asyncio.run_coroutine_threadsafe(make(), self._loop).result(START_S)
        return self._links[name].port

    def cut(self, name: str) -> None:
        self._do(self._links[name].cut)

    def silence(self, name: str) -> None:
        self._do(self._links[name].silence)

    def mend(self, name: str) -> None:
        self._do(self._links[name].mend)

    def carried_bytes(self) -> tuple[int, int]:
        """(up, down), the sum over all devices so far."""
        directions = [link.directions for link in self._links.values()]
        return sum(up.carried_bytes for up, _ in directions), sum(down.carried_bytes for _, down in directions)

    def _do(self, action: Callable[[], Made]) -> Made:
        done: Future[Made] = Future()

        def act() -> None:
            try:
                done.set_result(action())
            except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
                done.set_exception(error)

        self._loop.call_soon_threadsafe(act)
        return done.result(START_S)
