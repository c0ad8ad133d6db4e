"""A real S3 server for tests, and keys for its clients in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.s3_server import KEYS, S3Server


@contextmanager
def s3_server(folder: Path, *flags: str) -> Iterator[S3Server]:
    server = S3Server(folder)
    try:
        server.start(*flags)
        yield server
    finally:
        server.kill()


def set_keys(monkeypatch: pytest.MonkeyPatch, **keys: str) -> None:
    for name, value in {**KEYS, **keys}.items():
        monkeypatch.setenv(name, value)
