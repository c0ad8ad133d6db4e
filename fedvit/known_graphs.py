"""Known graphs: those that a publisher has signed, and those of fedvit's own methods and models.

A publisher is a person who builds Programs from source that they trust. Devices pin a publisher's public key when they
join, and a coordinator without the private key can choose among known graphs, but not invent one. A graph's digest does
not depend on the processor on which it is made, nor on weights, names of classes or the order of images.
"""

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from msgspec import Struct

from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.public_keys import PublicKey, format_key, parse_key

OWN_GRAPHS = Path(__file__).with_name("own_graphs.txt")
"""Digests of graphs of fedvit's own methods, one in each line, made by `make own-graphs`."""


@cache
def read_own_graphs() -> frozenset[str]:
    """Return the digests of the graphs that come with fedvit."""
    return frozenset(line for line in OWN_GRAPHS.read_text().splitlines() if line and not line.startswith("#"))


class SignedGraphs(Struct, frozen=True):
    """A publisher's signatures, by the graph's digest."""

    publisher: PublicKey
    signatures: dict[str, bytes]

    def find_all(self, graphs: Mapping[str, str]) -> tuple[bytes, ...] | None:
        """Return a signature for each graph's digest, in order; None if one is missing."""
        found = [self.signatures.get(digest) for digest in graphs.values()]
        return None if None in found else tuple(one for one in found if one is not None)


def read_signatures(file: Path) -> SignedGraphs | None:
    """Read a file of signatures; None if there is none. Raises ConfigError, naming the file and the line."""
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FV1320", f"{file} cannot be read: {error}") from error
    publisher, signatures = "", {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        try:
            match words:
                case ["publisher", key] if not publisher:
                    publisher = format_key(parse_key(key))
                case [digest, text] if publisher:
                    signatures[digest] = base64.b64decode(text, validate=True)
                case _:
                    raise ConfigError("FV1320", "is neither `publisher KEY` nor `DIGEST SIGNATURE`")
        except (ConfigError, ValueError) as error:
            raise ConfigError("FV1320", f"{file}, line {number}: {error}") from error
    return SignedGraphs(publisher, signatures) if publisher else None


def write_signatures(file: Path, signed: SignedGraphs) -> None:
    """Write a publisher's signatures to a file. Raises StorageFailed."""
    lines = ["# made by coordinator sign and coordinator plan --sign", f"publisher {signed.publisher}"]
    lines += [f"{digest} {base64.b64encode(one).decode()}" for digest, one in sorted(signed.signatures.items())]
    atomic_write(file, "".join(f"{line}\n" for line in lines).encode())
