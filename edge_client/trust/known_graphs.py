"""Known graphs on the device: the publisher that it trusts, and the check of a task's graphs."""

from pathlib import Path

from fedvit.errors import ConfigError, NotAllowed
from fedvit.known_graphs import read_own_graphs
from fedvit.program import Program
from fedvit.public_keys import PUBLISHER_FILE, format_key, parse_key
from fedvit.wire.messages import Task

UNKNOWN_S = 3600.0
"""Time after which a device is asked again for a task with unknown graphs: they may be signed meanwhile."""
MAX_REMEMBERED = 1024

_signed: set[tuple[str, str, bytes]] = set()
"""Signatures that were verified in this process: publisher, digest of the graph, signature."""


def read_publisher(state: Path) -> str:
    """Return the public key that is pinned in a state folder; "" if none is. Raises ConfigError."""
    file = state / PUBLISHER_FILE
    try:
        return format_key(parse_key(file.read_text()))
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError("FV1436", f"the publisher's key in {file} cannot be read: {error}; join again") from error


def check_token_publisher(state: Path, publisher: str, *, replace: bool) -> None:
    """Check the publisher of a join token, before the token is used up.

    Raises ConfigError if it is none, or if the device trusts another one that is not to be replaced.
    """
    if not publisher:
        return
    parse_key(publisher)
    pinned = "" if replace else read_publisher(state)
    if pinned not in ("", publisher):
        raise ConfigError("FV1435", _describe_change(pinned, publisher, "the token names"))


def check_known(task: Task, program: Program, publisher: str) -> None:
    """Raise NotAllowed, naming the graph, if a graph of a Program is neither fedvit's own nor signed by `publisher`."""
    own = read_own_graphs()
    graphs = program.digests_by_graph()
    signatures = dict(zip(graphs, task.signatures, strict=False))
    for name, digest in graphs.items():
        if digest in own or (publisher and _is_signed(publisher, digest, signatures.get(name, b""))):
            continue
        if publisher and task.publisher not in ("", publisher):
            raise NotAllowed("FV1435", _describe_change(publisher, task.publisher, "the task is signed by"), UNKNOWN_S)
        who = f"publisher {publisher} has not signed" if publisher else "no trusted publisher has signed"
        why = f'policy: methods = "known", and {who} graph {name!r} ({digest}) of the task'
        raise NotAllowed("FV1434", why, UNKNOWN_S)


def _is_signed(publisher: str, digest: str, signature: bytes) -> bool:
    key = publisher, digest, signature
    if key not in _signed:
        from fedvit.publisher import is_signed_by  # cryptography takes 7 MB, which devices without a publisher save

        if not is_signed_by(publisher, digest, signature):
            return False
        if len(_signed) >= MAX_REMEMBERED:
            _signed.clear()
        _signed.add(key)
    return True


def _describe_change(pinned: str, other: str, who: str) -> str:
    return (
        f"WARNING: THE PUBLISHER HAS CHANGED: {who} {other[:64]}, and this device trusts {pinned}. Somebody may want "
        "to run graphs here that your publisher does not know. If the publisher told you of a new key: "
        "edge-client join TOKEN --replace-publisher"
    )
