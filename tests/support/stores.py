"""Real object stores for tests, and keys for their clients in this process: rclone speaks S3, Azurite speaks Azure."""

import base64
import hashlib
import hmac
import os
import secrets
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import AzureStore

from coordinator.config import BlobsConfig
from coordinator.security.broker.process import claim_port
from tests.support.s3_server import BUCKET, KEYS, S3Server, status_of
from tests.support.waiting import WAIT_S, wait_until

ACCOUNT, ACCOUNT_KEY = "fedvit", base64.b64encode(b"a key of the account").decode()
_INSTALLED = Path(__file__).parents[2] / "build" / "azurite" / "node_modules" / ".bin"


def usual_stores() -> list[str]:
    """The stores that the contract is held over: S3, or those that `make test-stores` names instead."""
    return os.environ.get("FEDVIT_TEST_STORES", "s3").split()


class AzureServer:
    """Azurite, whose objects are in a container like those of `S3Server` in a bucket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "azurite"
        self.folder.mkdir(parents=True)
        self.port = claim_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.prefix = "fleet"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("azurite-blob", path=f"{_INSTALLED}{os.pathsep}{os.environ['PATH']}")
        assert program, "this test needs azurite: make azurite"
        command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self.folder)]
        environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [*command, "--skipApiVersionCheck"], stdout=log, stderr=log, env=environment
            )
        wait_until(lambda: status_of(self.endpoint) is not None)
        self._make_container()

    def _make_container(self) -> None:
        """By a request that is signed with the account's key: clients of objects cannot make containers."""
        date, version = formatdate(usegmt=True), "2021-12-02"
        asked = f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
        key = base64.b64decode(ACCOUNT_KEY)
        signature = hmac.new(key, f"PUT{12 * chr(10)}{asked}".encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}",
            "Content-Type": "",
        }
        url = f"{self.endpoint}/{ACCOUNT}/{BUCKET}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, b"", headers, method="PUT"), timeout=WAIT_S) as answer:
            assert answer.status == 201

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def config(self, **more: Any) -> BlobsConfig:
        given = {"url": f"az://{ACCOUNT}/{BUCKET}/{self.prefix}", "endpoint": self.endpoint, "min_bytes": 1}
        return BlobsConfig(**{**given, **more})

    def objects(self) -> list[str]:
        found = (each["path"] for batch in obstore.list(self._store(), prefix=self.prefix) for each in batch)
        return sorted(found)

    def write(self, name: str, content: bytes) -> None:
        obstore.put(self._store(), name, content)

    def _store(self) -> AzureStore:
        return AzureStore(
            BUCKET,
            account_name=ACCOUNT,
            account_key=ACCOUNT_KEY,
            endpoint=f"{self.endpoint}/{ACCOUNT}",
            client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        )


class Folder:
    """A folder that coordinators share, as a store; it is only a mirror."""

    def __init__(self, folder: Path) -> None:
        self.prefix = "fleet"
        self.folder = folder / "shared"

    def start(self) -> None:
        self.folder.mkdir(parents=True)

    def kill(self) -> None:
        """It is gone."""
        if self.folder.exists():
            self.folder.rename(self.folder.with_name(f"gone-{secrets.token_hex(4)}"))

    def config(self, **more: Any) -> BlobsConfig:
        (self.folder / self.prefix).mkdir(exist_ok=True)
        return BlobsConfig(**{"url": f"file://{self.folder}/{self.prefix}", "mirror": True, **more})

    def objects(self) -> list[str]:
        below = (self.folder / self.prefix).rglob("*")
        return sorted(str(path.relative_to(self.folder)) for path in below if path.is_file())

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)


AnyServer = S3Server | AzureServer | Folder


@contextmanager
def s3_server(folder: Path, *flags: str) -> Iterator[S3Server]:
    server = S3Server(folder)
    try:
        server.start(*flags)
        yield server
    finally:
        server.kill()


@contextmanager
def store_server(kind: str, folder: Path) -> Iterator[AnyServer]:
    """`s3`, `azure` or `folder`."""
    server = {"s3": S3Server, "azure": AzureServer, "folder": Folder}[kind](folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def set_keys(monkeypatch: pytest.MonkeyPatch, **keys: str) -> None:
    for name, value in {**KEYS, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY, **keys}.items():
        monkeypatch.setenv(name, value)
