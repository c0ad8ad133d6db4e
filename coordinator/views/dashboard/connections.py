"""Bounds of connections that uvicorn has no options for: their number, and the time for the head of a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
"""Time within which the head of a request arrives; uvicorn itself bounds only the time between two requests."""
MOST_OF_ONE_ADDRESS = 100
MOST = 500


class BoundedProtocol(HttpToolsProtocol):  # type: ignore[misc] # httptools has no types
    """A connection that ends if it is one too many, or sends no whole request in time."""

    _deadline: asyncio.TimerHandle | None = None
    _is_upgraded = False

    def connection_made(self, transport: Any) -> None:
        """Accept a connection within the bounds."""
        super().connection_made(transport)
        host = _host(transport)
        same = sum(_host(other.transport) == host for other in self.connections)
        if same > MOST_OF_ONE_ADDRESS or len(self.connections) > MOST:
            transport.abort()
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Read on; the time runs while a request has begun, and its head is not whole."""
        super().data_received(data)
        if self._is_upgraded or (self.cycle is not None and not self.cycle.response_complete):
            self._stop_waiting()
        elif self._deadline is None:
            self._wait_for_head()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to the protocol of WebSockets."""
        self._is_upgraded = True
        self._stop_waiting()
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _host(transport: Any) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""
