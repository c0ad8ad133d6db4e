"""The mirror of a run, read and removed by commands; `coordinator.rounds.object_store` fills it.

Objects of a run are below PREFIX/RUN: its blobs, and below `results/` the files of its folder that it wrote at its end.
"""

import contextlib
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import PermissionDeniedError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from coordinator.config.blobs import BlobsConfig
from fedvit.blobs import ALGORITHM, digest_of
from fedvit.errors import Damaged, FedvitError, StorageFailed

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

Outcome = TypeVar("Outcome")
ObjectStoreClient = S3Store | GCSStore | AzureStore | LocalStore

CONNECT_S = 5.0
RETRY_S = 10.0
"""For how long a request that failed is repeated."""
ANSWER_S = 60.0
"""Longest time for one request: a part of a blob needs it on a link of 2 Mb/s."""
ABSENT = (FileNotFoundError, PermissionDeniedError)
"""Errors of stores for a missing object; S3 raises the second if the key may not list the bucket."""
BLOBS, RESULTS = "blobs", "results"


def open_store(config: BlobsConfig, run: str) -> ObjectStoreClient:
    """A client of the objects of one run. Raises various errors if the keys in the environment cannot be used, and
    FileNotFoundError if the store is a folder that is not there."""
    prefix = f"{config.prefix}/{run}".strip("/")
    client: ClientConfig = {
        "allow_http": config.origin.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=ANSWER_S),
    }
    retry: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=RETRY_S)}
    if config.scheme == "file":
        check_folder(config)
        return LocalStore(Path(config.folder) / run, mkdir=True)
    if config.scheme == "gs":
        google: GCSConfig = {"base_url": config.origin} if config.endpoint else {}
        return GCSStore(config.bucket, prefix=prefix, config=google, client_options=client, retry_config=retry)
    if config.scheme == "az":
        azure: AzureConfig = {"account_name": config.account}
        if config.endpoint:  # other servers than Azure's have no host for each account
            azure["endpoint"] = f"{config.origin}/{config.account}"
        return AzureStore(config.bucket, prefix=prefix, config=azure, client_options=client, retry_config=retry)
    s3: S3Config = {"endpoint": config.origin, "region": config.region, "virtual_hosted_style_request": False}
    return S3Store(config.bucket, prefix=prefix, config=s3, client_options=client, retry_config=retry)


def check_folder(config: BlobsConfig) -> None:
    """Raise FileNotFoundError if the store is a folder that is not there: files would be put below a missing mount."""
    if config.scheme == "file" and not Path(config.folder).is_dir():
        raise FileNotFoundError(f"there is no folder {config.folder}")


def blob_object(digest: str) -> str:
    """Return the name of a blob's object."""
    return f"{BLOBS}/{digest.partition(':')[2]}"


def blob_digest(name: str) -> str | None:
    """Return the digest of an object's blob; None if the object is not a blob."""
    found = re.fullmatch(rf"{BLOBS}/([0-9a-f]{{64}})", name)
    return f"{ALGORITHM}:{found[1]}" if found else None


def reason_of(error: Exception) -> str:
    """Return an error of a store in one line."""
    text = str(error)
    code, message = (re.search(f"<{tag}>(.*?)(</{tag}>|$)", text, re.MULTILINE) for tag in ("Code", "Message"))
    if code:
        return f"{code[1]}: {message[1]}" if message else code[1]
    if "error sending request" in text:
        return "no answer from it"
    return re.sub(r" in [\d.]+\S*s\b.*", "", text.partition("\n")[0])[:300]


class Mirror:
    """The objects of a run in its mirror. The store is not used before the first call. All methods raise StorageFailed,
    naming the store, if it cannot be used."""

    def __init__(self, config: BlobsConfig, run: str) -> None:
        self._config = config
        self._run = run

    @property
    def place(self) -> str:
        """Address of the run's objects, for messages."""
        return f"{(self._config.url or '').rstrip('/')}/{self._run}"

    @cached_property
    def _store(self) -> ObjectStoreClient:
        return open_store(self._config, self._run)

    def _using(self, work: Callable[[], Outcome]) -> Outcome:
        try:
            return work()
        except FedvitError:
            raise
        except Exception as error:
            raise StorageFailed(
                "FV1019", f"object store {self._config.url} cannot be used: {reason_of(error)}"
            ) from error

    def blob(self, digest: str) -> bytes:
        """Return a blob's content. Raises Damaged if it is missing, or does not have its digest."""
        content = self._using(lambda: self._get(blob_object(digest)))
        if content is None:
            raise Damaged("FV1019", f"object {self.place}/{blob_object(digest)} is missing")
        if digest_of(content) != digest:
            raise Damaged(
                "FV1019",
                f"object {self.place}/{blob_object(digest)} is damaged: it does not have the digest that is its name",
            )
        return content

    def result(self, name: str) -> bytes | None:
        """Return a file that the run wrote at its end, by its name in the run's folder; None if it is missing."""
        return self._using(lambda: self._get(f"{RESULTS}/{name}"))

    def _get(self, name: str) -> bytes | None:
        store = self._store
        try:
            return bytes(obstore.get(store, name).bytes())
        except ABSENT:
            return None

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each object of the run."""
        return self._using(
            lambda: {found["path"]: found["size"] for batch in obstore.list(self._store) for found in batch}
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, if they are there."""

        def remove_all() -> None:
            for name in names:
                obstore.delete(self._store, name)
            if isinstance(self._store, LocalStore):
                _remove_empty_folders(Path(self._config.folder) / self._run)

        self._using(remove_all)


def _remove_empty_folders(folder: Path) -> None:
    below = [path for path in folder.rglob("*") if path.is_dir()]
    for path in [*sorted(below, reverse=True), folder]:
        with contextlib.suppress(OSError):  # it is not empty, or not there
            path.rmdir()
