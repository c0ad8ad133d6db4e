"""Forwarding proxies on loopback: a program reaches a server through a link that is slow, lossy, cut or silent.

A link forwards TCP, so it delays segments and never drops them: a lost segment, and all behind it, arrive a round trip
later, and loss limits the rate as TCP's congestion control does (Mathis et al., 1997):
MSS / RTT * sqrt(3/2) / sqrt(loss).
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from tests.support.waiting import WAIT_S

SEGMENT_BYTES = 1448
QUEUED_SEGMENTS = 64
"""Segments that a link buffers in each direction; when they are used up, the sender waits."""


class Network(Struct, frozen=True):
    """Properties of a link in each direction. Without a rate it is as fast as this machine."""

    bits_per_s: float = math.inf
    latency_s: float = 0.0
    loss: float = 0.0  # share of segments, below 1

    def bytes_per_s(self) -> float:
        """Return the rate of one TCP connection."""
        if not (self.loss and self.latency_s):
            return self.bits_per_s / 8
        return min(self.bits_per_s / 8, SEGMENT_BYTES / (2 * self.latency_s) * math.sqrt(1.5 / self.loss))


class _Direction:
    """One direction of a link: computes when each segment arrives."""

    def __init__(self, network: Network, seed: str) -> None:
        self.network = network
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._last_arrival = 0.0

    def send(self, size: int) -> float:
        """Return when a segment that is sent now arrives, on the monotonic clock."""
        if self.network == Network():
            return 0.0
        self._free_at = max(time.monotonic(), self._free_at) + size / self.network.bytes_per_s()
        arrival = self._free_at + self.network.latency_s
        while self._random.random() < self.network.loss:
            arrival += 2 * self.network.latency_s
        self._last_arrival = max(self._last_arrival, arrival)  # TCP delivers in order
        return self._last_arrival


class _Link:
    """One link to the server; its methods are for the loop's thread."""

    def __init__(self, target_port: int, network: Network, seed: str) -> None:
        self.port = 0
        self._network = network
        self._seed = seed
        self._target_port = target_port
        self._is_open = True
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._is_open = False
        for writer in self._writers:
            writer.transport.abort()

    def silence(self) -> None:
        self._forwarding.clear()

    def mend(self) -> None:
        self._is_open = True
        self._forwarding.set()

    def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self._writers.add(to_client)
        with suppress(OSError):  # one side closes first
            if self._is_open:
                await self._forwarding.wait()
                server, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
                self._writers.add(to_server)
                up, down = (_Direction(self._network, f"{self._seed} {way}") for way in ("up", "down"))
                copies = [
                    asyncio.ensure_future(self._carry(client, to_server, up)),
                    asyncio.ensure_future(self._carry(server, to_client, down)),
                ]
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
                to_server.transport.abort()
                self._writers.discard(to_server)
        to_client.transport.abort()
        self._writers.discard(to_client)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
        """Copy data in one direction until one side closes."""
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_SEGMENTS)

        async def read() -> None:
            with suppress(ConnectionError):  # one side was killed with data that it had not read
                while piece := await reader.read(SEGMENT_BYTES):
                    await in_flight.put((direction.send(len(piece)), piece))
            await in_flight.put((0.0, b""))

        reading = asyncio.ensure_future(read())
        try:
            while True:
                arrival, piece = await in_flight.get()
                await asyncio.sleep(max(0.0, arrival - time.monotonic()))
                await self._forwarding.wait()
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class Links:
    """Links of programs to one server, in a thread of their own; use as a context manager."""

    def __init__(self, target_port: int, network: Network | None = None) -> None:
        self._target_port = target_port
        self._network = network or Network()
        self._links: dict[str, _Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)

    def __enter__(self) -> "Links":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def port(self, name: str) -> int:
        """Return the port that the program of this name connects to; the first call makes its link."""
        if name not in self._links:
            link = _Link(self._target_port, self._network, name)
            asyncio.run_coroutine_threadsafe(link.listen(), self._loop).result(WAIT_S)
            self._links[name] = link
        return self._links[name].port

    def cut(self, name: str) -> None:
        """Reset every connection, and every new one."""
        self._call(self._links[name].cut)

    def silence(self, name: str) -> None:
        """Hold back all data in both directions; connections stay open."""
        self._call(self._links[name].silence)

    def mend(self, name: str) -> None:
        self._call(self._links[name].mend)

    def _call(self, action: Callable[[], None]) -> None:
        async def call() -> None:
            action()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(WAIT_S)

    async def _end(self) -> None:
        """Close all links, and cancel copies that wait on a silent link."""
        for link in self._links.values():
            link.close()
        copies = asyncio.all_tasks() - {asyncio.current_task()}
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
