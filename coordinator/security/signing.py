"""The signatures of graphs that a coordinator can give to devices."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedvit.known_graphs import SignedGraphs, read_own_graphs, read_signatures
from fedvit.public_keys import PublicKey
from fedvit.publisher import PublisherKey, add_signatures

PUBLISHER_KEY = "publisher.key"
SIGNATURES = "signatures.txt"


class GraphSigner:
    """The signatures of a deployment. While its folder has the publisher's key, every graph gets one."""

    def __init__(self, folder: Path, publisher: PublicKey) -> None:
        """Raises ConfigError for a key or a file of signatures that cannot be read, or is another publisher's."""
        self.publisher = publisher
        self.file = folder / SIGNATURES
        self._key_file = folder / PUBLISHER_KEY
        self._signed = SignedGraphs(publisher, {})
        self._seen = self._find_state()

    def _find_state(self) -> tuple[int, int] | None:
        """Return the time and size of the file of signatures; None if there is none."""
        with suppress(FileNotFoundError):
            found = self.file.stat()
            return found.st_mtime_ns, found.st_size
        return None

    def has_new(self) -> bool:
        """Tell whether the signatures have changed since the last call."""
        before, self._seen = self._seen, self._find_state()
        return self._seen != before

    def find_signatures(self, graphs: Mapping[str, str]) -> tuple[bytes, ...] | None:
        """Return a signature for each graph, in order, by name and digest; None if one has none.

        Signatures that were added to the deployment meanwhile count.
        """
        if self._signed.find_all(graphs) is None:
            if self._key_file.exists():
                add_signatures(self.file, PublisherKey.read(self._key_file), graphs.values())
            read = read_signatures(self.file)
            if read and read.publisher == self.publisher:
                self._signed = read
        return self._signed.find_all(graphs)


def are_own(graphs: Mapping[str, str]) -> bool:
    """Tell whether all graphs are fedvit's own."""
    return read_own_graphs().issuperset(graphs.values())
