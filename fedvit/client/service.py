"""The service of a coordinator on another machine."""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from fedvit.client.connection import TIMEOUT_S, Connection
from fedvit.client.documents import (
    ENDED,
    Changed,
    ChangedModel,
    Device,
    Labels,
    Page,
    Round,
    Run,
    Submitted,
    UsedModel,
)
from fedvit.errors import ConfigError, LinkDown
from fedvit.files import WRITING, name_failure

SERVER, TOKEN, CA = "FEDVIT_SERVER", "FEDVIT_TOKEN", "FEDVIT_SERVER_CA"
LOOK_EVERY_S = 1.0

T = TypeVar("T")


class Event(msgspec.Struct, frozen=True):
    """Something that changed."""

    kind: str  # run, round, service, end
    data: dict[str, Any]


class _Rounds(msgspec.Struct):
    rounds: list[Round]


class _Devices(msgspec.Struct):
    devices: list[Device]


class Service:
    """A coordinator's HTTP API. All methods raise the errors of the commands, and LinkDown if it does not answer."""

    def __init__(self, url: str, token: str, *, ca_file: Path | None = None) -> None:
        self.connection = Connection(url, token, ca_file)
        self.runs = Runs(self)
        self.devices = Devices(self)
        self.models = ModelRequests(self)

    @classmethod
    def from_environment(cls) -> Self:
        """Use FEDVIT_SERVER, FEDVIT_TOKEN and, if set, FEDVIT_SERVER_CA. Raises ConfigError if one is missing."""
        url, token, authority = (os.environ.get(name) for name in (SERVER, TOKEN, CA))
        if not url or not token:
            raise ConfigError("FV1815", f"set {SERVER} to the address of the server, and {TOKEN} to a token")
        return cls(url, token, ca_file=Path(authority) if authority else None)

    def ask(
        self,
        kind: type[T],
        method: str,
        *path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> T:
        """Return the answer to a request, as an object of a type; LinkDown if none begins within `timeout_s`."""
        content = self.connection.ask(method, path, query, body, timeout_s)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                "FV1815", f"the answer of {self.connection.url} is not understood ({error}): update the older side"
            ) from error

    def get(self, *path: str, **query: Any) -> Any:
        """Return the whole answer to a request of docs/api.md, as JSON values."""
        return self.ask(Any, "GET", *path, query=query)

    def download(self, file: Path, *path: str, **query: Any) -> None:
        """Write an answer, such as that of ("runs", RUN, "report"), to a file, whole or not at all.

        Raises StorageFailed if it cannot be written.
        """
        partial, failure = file.parent / f"{WRITING}{secrets.token_hex(8)}", f"cannot write {file}"
        try:
            with (
                name_failure(failure),
                partial.open("xb") as written,
                self.connection.open("GET", path, query) as answer,
            ):
                while piece := answer.read(1 << 20):
                    with name_failure(failure):
                        written.write(piece)
                if answer.length:  # http.client says nothing when a connection ends early
                    raise LinkDown("FV1815", f"{self.connection.url} sent all but {answer.length} bytes")
            with name_failure(failure):
                partial.replace(file)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def follow(self, run: str | None = None) -> Iterator[Event]:
        """Yield events of all runs, or of one until it has ended."""
        path = ("events",) if run is None else ("runs", run, "events")
        with self.connection.open("GET", path) as answer:
            kind = ""
            while line := answer.readline():
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield Event(kind, msgspec.json.decode(value))


class Runs:
    """The runs of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def list_all(self, **where: Any) -> Iterator[Run]:
        """Yield runs, newest first; `where`: status, method, model, name."""
        offset = 0
        while True:
            page = self._service.ask(Page, "GET", "runs", query={**where, "offset": offset, "limit": 500})
            yield from page.runs
            offset += len(page.runs)
            if not page.runs or offset >= page.total:
                return

    def read(self, run: str) -> Run:
        """Return a run."""
        return self._service.ask(Run, "GET", "runs", run)

    def read_rounds(self, run: str, newest: int = 50) -> list[Round]:
        """Return the newest closed rounds of a run, at most 500, the newest first."""
        return self._service.ask(_Rounds, "GET", "runs", run, "rounds", query={"limit": newest}).rounds

    def submit(
        self, config: Mapping[str, Any], name: str | None = None, *, priority: int = 0, at: str | None = None
    ) -> Submitted:
        """Put a run into the queue; `config` has the keys of run.toml."""
        body = {"config": dict(config), "name": name, "priority": priority, "at": at}
        return self._service.ask(Submitted, "POST", "runs", body=body)

    def cancel(self, run: str) -> Changed:
        """End a run for good."""
        return self._act(run, "cancel")

    def pause(self, run: str) -> Changed:
        """Let a run open no new round."""
        return self._act(run, "pause")

    def unpause(self, run: str) -> Changed:
        """Let a paused run open rounds again."""
        return self._act(run, "unpause")

    def retry(self, run: str) -> Changed:
        """Let the service serve a failed run again."""
        return self._act(run, "retry")

    def wait(self, run: str, timeout_s: float | None = None) -> Run:
        """Wait until a run has ended, and return it. Raises LinkDown after `timeout_s`."""
        began = time.monotonic()
        while (found := self.read(run)).status not in ENDED:
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                raise LinkDown("FV1526", f"run {run}: {found.status}; it has not ended within {timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)
        return found

    def _act(self, run: str, act: str) -> Changed:
        return self._service.ask(Changed, "POST", "runs", run, act)


class ModelRequests:
    """The models of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def list_all(self) -> list[UsedModel]:
        """Return the models, the newest first."""
        return self._service.ask(list[UsedModel], "GET", "models")

    def promote(self, model: str, where: str = "") -> ChangedModel:
        """Let devices that have a model use it; `where`: only those with these labels."""
        return self._service.ask(ChangedModel, "POST", "models", model, "promote", body={"where": where})

    def roll_back(self, model: str) -> ChangedModel:
        """Stop the use of a model: its devices use their former ones again."""
        return self._service.ask(ChangedModel, "POST", "models", model, "rollback")

    def retire(self, model: str) -> ChangedModel:
        """Let devices remove a model that none of them uses."""
        return self._service.ask(ChangedModel, "POST", "models", model, "retire")


class Devices:
    """The devices of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def list_all(self) -> list[Device]:
        """Return the devices of the deployment, by name."""
        return self._service.ask(_Devices, "GET", "devices").devices

    def set_labels(self, device: str, labels: Mapping[str, str], removed: tuple[str, ...] = ()) -> Labels:
        """Set labels of a device, and remove others by name."""
        body = {"set": dict(labels), "remove": list(removed)}
        return self._service.ask(Labels, "PATCH", "devices", device, "labels", body=body)

    def revoke(self, device: str) -> list[str]:
        """Revoke a device; return what happened."""
        lines: list[str] = self._service.ask(dict, "POST", "devices", device, "revoke")["lines"]
        return lines
