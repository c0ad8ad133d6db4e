"""The site of the API: the folders that all endpoints work on, and their way to the record."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from coordinator.operations.devices import LocalDevices
from coordinator.operations.runs import LocalRuns
from coordinator.record.record import Record, open_record
from coordinator.security.credentials import ApiCredentials, TooManyAttempts
from coordinator.security.folder import Deployment
from coordinator.serving.backup import BackupFolder
from coordinator.views.dashboard.reader import RecordReader
from fedvit.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


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


@dataclass(frozen=True, eq=False)
class ApiSite:
    """The folders of a service, and who may use them."""

    reader: RecordReader
    folder: Path  # of the runs
    credentials: ApiCredentials
    deployment: Deployment | None = None
    backups: BackupFolder | None = None
    downloads: Turns = field(default_factory=Turns)
    streams: dict[object, str] = field(default_factory=dict)  # open streams of events -> name of their user

    async def read(self, question: Callable[Concatenate[Record, P], T], *arguments: P.args, **no: P.kwargs) -> T:
        """Return the answer to a question to the record, which requests share until the record changes."""
        return await self.reader(question, *arguments, **no)

    async def read_run(self, question: Callable[[LocalRuns], T]) -> T:
        """Return the answer to a question that depends on more than the record, such as files of a run."""
        return await asyncio.to_thread(question, LocalRuns(self.reader.store, self.folder))

    async def change(self, act: Callable[[LocalRuns], T]) -> T:
        """Change runs."""
        return await self.change_record(lambda store: act(LocalRuns(store, self.folder)))

    async def change_record(self, act: Callable[[Record], T]) -> T:
        """Change the record; later requests see the change."""
        try:
            return await asyncio.to_thread(self._write, act)
        finally:
            self.reader.forget()

    async def change_folder(self, act: Callable[[], T]) -> T:
        """Do something that opens the record itself."""
        try:
            return await asyncio.to_thread(act)
        finally:
            self.reader.forget()

    async def use_devices(self, act: Callable[[LocalDevices], T]) -> T:
        """Look at the devices of the deployment, or change them. Raises ConfigError if there is no deployment."""
        return await asyncio.to_thread(act, LocalDevices(self.find_deployment(), self.folder))

    def find_deployment(self) -> Deployment:
        """Return the deployment. Raises ConfigError if the server has none."""
        if self.deployment is None:
            raise ConfigError("FV1816", "this server knows no deployment: start it with --deployment")
        return self.deployment

    def find_backups(self) -> BackupFolder:
        """Return the folder of backups. Raises ConfigError if the server has none."""
        if self.backups is None:
            raise ConfigError("FV1816", "this server has no folder of backups: start it with --backups")
        return self.backups

    def _write(self, act: Callable[[Record], T]) -> T:
        with open_record(self.folder, check=False) as store:
            return act(store)
