"""Access to the object store of a run: calls for its threads, and what is known of it.

All calls to the store are made by the threads of `StoreThreads`. The coordinator's keys come from the environment,
as for other programs (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY),
and never reach the record, a log or a device.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Literal

import obstore
from obstore.store import LocalStore

from coordinator.config.blobs import BlobsConfig
from coordinator.record.mirror import (
    ABSENT,
    ObjectStoreClient,
    blob_object,
    check_folder,
    open_store,
    reason_of,
)
from coordinator.rounds.store_threads import StoreThreads
from fedvit.blobs import BlobStore
from fedvit.errors import FedvitError, LinkDown

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Interval in which a store in trouble is tried again."""
IDLE_S = 30.0
"""Time after which a store that nobody used is tried, so that its loss is noticed before a round needs it."""
PART_BYTES = 16 << 20
"""Part of a large blob; the store takes one part after the other."""
PROBE = "probe"


class StoreAccess:
    """The object store of one run. Objects of a run are below PREFIX/RUN.

    `lock` is held to read or change `stored`, `removing` and `trouble`, and to call `note`, `is_usable` and
    `try_to_sign`.
    """

    def __init__(self, config: BlobsConfig, run: str, blobs: BlobStore) -> None:
        assert config.url is not None  # checked by the caller
        self.config = config
        self.blobs = blobs
        self.lock = threading.Lock()
        self.trouble = ""  # why the store cannot be used
        self.stored: set[str] = set()  # digests of blobs that are in the store
        self.removing: set[str] = set()  # from the mirror
        self.threads = StoreThreads(config.url)
        self._valid = timedelta(seconds=config.url_valid_s)
        self._name = run
        self._tried_at = time.monotonic()  # the end of the newest use; infinite: being tried
        self._lines: list[str] = []

    def take_lines(self) -> list[str]:
        """Lines for the operator since the last call."""
        with self.lock:
            lines, self._lines = self._lines, []
        return lines

    @property
    def client(self) -> ObjectStoreClient:
        check_folder(self.config)
        return self._lazy_client

    @cached_property
    def _lazy_client(self) -> ObjectStoreClient:
        """Made when it is first used, so that keys that cannot be read are reported as other trouble of the store."""
        return open_store(self.config, self._name)

    # --- calls in threads ---------------------------------------------------------------------------------

    def attempt(self, work: Callable[[], object]) -> bool:
        """Use the store, and note whether it works. Errors of this disk are raised."""
        trouble = ""
        try:
            work()
        except LinkDown as error:
            trouble = str(error)
        except FedvitError:
            raise
        except Exception as error:  # noqa: BLE001 - of the store, whatever it is: reported
            trouble = reason_of(error)
        with self.lock:
            self.note(trouble)
        return not trouble

    def repeat_until_done(self, attempt: Callable[[], bool]) -> None:
        """Repeat an attempt until it succeeds. Raises LinkDown when the run ends meanwhile."""
        while not attempt():
            if self.threads.closed.wait(RETRY_S):
                raise LinkDown("FV1018", f"object store {self.config.url} could not be used until the run ended")

    def has(self, name: str, size: int) -> bool:
        """Return whether an earlier process has put the blob."""
        try:
            return obstore.head(self.client, name)["size"] == size
        except ABSENT:  # or there is no such bucket, which putting shows
            return False

    def put_blob(self, digest: str, size: int) -> None:
        """Put a blob into the store unless it is there."""
        if not self.has(blob_object(digest), size):
            self.put_path(blob_object(digest), self.blobs.path(digest))

    def put_path(self, name: str, path: Path) -> None:
        obstore.put(self.client, name, path, chunk_size=PART_BYTES, max_concurrency=1)

    def delete(self, name: str) -> None:
        with contextlib.suppress(Exception):  # costs space only, and is pruned later
            obstore.delete(self.client, name)

    def remove(self, digests: set[str]) -> None:
        for digest in digests:
            self.delete(blob_object(digest))
            with self.lock:
                self.removing.discard(digest)
                self.stored.discard(digest)

    # --- trouble ----------------------------------------------------------------------------------------

    def is_usable(self) -> bool:
        """Return whether the store worked last; otherwise it is tried from time to time. The lock is held."""
        if self.trouble:
            self._try_after(RETRY_S)
        return not self.trouble

    def tick(self) -> None:
        """Try a store that nobody has used for a while, or that is in trouble."""
        with self.lock:
            self._try_after(RETRY_S if self.trouble else IDLE_S)

    def _try_after(self, silent_s: float) -> None:
        if time.monotonic() - self._tried_at > silent_s:
            self._tried_at = math.inf  # until the answer: a store that hangs is not tried in all threads
            self.threads.begin(self.probe)

    def probe(self) -> bool:
        """Return whether something can be put into the store."""
        trouble = ""
        try:
            obstore.put(self.client, PROBE, b"fedvit")
        except Exception as error:  # noqa: BLE001
            trouble = reason_of(error)
        with self.lock:
            self.note(trouble)
        return not trouble

    def note(self, trouble: str) -> None:
        """Note whether the store works, and tell the operator what is new. The lock is held."""
        self._tried_at = time.monotonic()
        if trouble == self.trouble:
            return
        self.trouble = trouble
        if trouble:
            what = f"object store {self.config.url} cannot be used: {trouble}"
            most = self.config.fallback_bytes / 1e6
            follows = f"blobs up to {most:.3g} MB go over MQTT, larger ones wait for it"
            self._lines.append(f"{what}; {'the run waits for it' if self.config.mirror else follows}")
            log.warning("object store cannot be used", extra={"reason": trouble})
        else:
            self._lines.append(f"object store {self.config.url} can be used again")
            log.info("object store can be used again")

    def try_to_sign(self, method: Literal["GET", "PUT"], name: str) -> str | None:
        """Return a signed URL; None without keys. The lock is held."""
        try:
            return self.sign(method, name)
        except Exception as error:  # noqa: BLE001 - there are no keys
            self.note(reason_of(error))
            return None

    def sign(self, method: Literal["GET", "PUT"], name: str) -> str:
        assert not isinstance(self.client, LocalStore)  # `takes` refuses every blob then
        return obstore.sign(self.client, method, name, self._valid)
