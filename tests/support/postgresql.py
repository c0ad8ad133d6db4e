"""A real PostgreSQL server on loopback."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from coordinator.security.broker.process import claim_port
from tests.support.waiting import WAIT_S

USER, PASSWORD = "fedvit", "known-to-the-record-alone"


class Postgresql:
    """A server with databases of its own. It refuses to run as root: then it runs as the user of its Debian package."""

    def __init__(self) -> None:
        newest = max(
            Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name), default=None
        )
        found = shutil.which("initdb")
        self._programs = newest or (Path(found).parent if found else None)
        assert self._programs is not None, "PostgreSQL was not found: make postgresql"
        self._as: dict[str, Any] = (
            {"user": "postgres", "group": "postgres", "extra_groups": []} if not os.getuid() else {}
        )
        self.folder = Path(tempfile.mkdtemp(prefix="fedvit-postgresql-", dir="/tmp"))  # pytest's are closed to others
        if self._as:
            shutil.chown(self.folder, "postgres", "postgres")
        self.port = claim_port()
        self._schemas = 0
        self._data = self.folder / "data"
        self._run("initdb", "-D", str(self._data), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _run(self, program: str, *arguments: str) -> str:
        assert self._programs is not None
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, **self._as)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    def start(self) -> None:
        assert self._programs is not None
        settings = (f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}")
        given = [word for setting in (*settings, "fsync=off") for word in ("-c", setting)]
        with open(self.folder / "log", "ab") as log:
            command = [str(self._programs / "postgres"), "-D", str(self._data), *given]
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self._as)
        until = time.monotonic() + WAIT_S
        while not self._answers():
            assert time.monotonic() < until, f"PostgreSQL does not answer; its log: {self.folder / 'log'}"
            time.sleep(0.005)

    def _answers(self) -> bool:
        with suppress(AssertionError):
            self._run("pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port))
            return True
        return False

    def stop(self) -> None:
        """All connections end at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(WAIT_S)
            self._process = None

    def schema(self) -> str:
        """The address of a new, empty schema: it is made in a few milliseconds, a database takes many more."""
        self._schemas += 1
        name, address = f"test_{self._schemas}", f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/postgres"
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f"create schema {name}".encode())
        return f"{address}?options=-csearch_path%3D{name}"

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)
