"""The object store through which blobs may move, as the side that has its keys uses it."""

from collections.abc import Callable
from typing import Protocol

from fedvit.wire.messages import Manifest

Located = Callable[[str | None], None]
"""Is called with the URL of a blob, or with None if chunks are to be sent; in any thread."""


class BlobPlaces(Protocol):
    """An object store, as the side sees it that has its keys. No call blocks on the network."""

    def takes(self, manifest: Manifest) -> bool:
        """Return whether such a blob goes through the store at all."""

    def locate(self, peer: str, manifest: Manifest, located: Located, *, failed: bool) -> None:
        """Put a blob into the store, unless it is there, and call `located` then, or at once. While neither the store
        nor chunks can be used, it is not called: the peer asks again. `failed`: URLs did not work for this peer."""

    def is_awaited(self, manifest: Manifest) -> bool:
        """Return whether this side makes peers wait: the blob is being put, or only the store can take it."""

    def upload_url(self, peer: str, manifest: Manifest, first: int) -> str | None:
        """Return a URL for the piece of an upload that begins with chunk `first`; None: use chunks, or, if the blob
        `is_awaited`, wait."""

    def read_upload(
        self, peer: str, manifest: Manifest, first: int, size: int, read: Callable[[bytes | None], None]
    ) -> None:
        """Read and remove a piece; `read(None)` if it is not there or has another size. Called in any thread."""

    def check(self, checked: Callable[[bool], None]) -> None:
        """URLs did not work for a peer: find out whether the store works for this side, and call `checked`, in any
        thread."""

    def forget(self, digest: str) -> None:
        """The blob is damaged on this side: it is put again when it is needed next."""
