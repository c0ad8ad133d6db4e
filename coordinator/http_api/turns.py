"""Turns of requests that need much memory: few at once, and few that wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.security.credentials import TooManyAttempts

AT_ONCE = 2
WAITING = 8
"""Requests that wait for their turn; further ones are refused."""


class Turns:
    """Lets AT_ONCE downloads be made at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._asked = 0

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it in the block. Raises TooManyAttempts."""
        if self._asked >= WAITING:
            raise TooManyAttempts("FV1814", f"{WAITING} downloads are being made: try again later")
        self._asked += 1
        try:
            async with self._turn:
                yield
        finally:
            self._asked -= 1
