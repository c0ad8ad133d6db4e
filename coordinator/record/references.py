"""What devices get of the server's state, where it is coded: a value that each can make from what it has already.

The server's own state stays float32 and exact. Beside it the reference is kept: what devices were last sent, bit for
bit. After a round the reference moves by the coded difference of the state from it, so what coding lost in one round
is in the next one's difference. Devices train from the reference; their deltas move the state.
"""

from collections.abc import Mapping

import numpy as np

from coordinator.config import UpdatesConfig
from coordinator.record.tables import Link, Reference
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.tensors import Tensors, pack, unpack
from fedvit.updates import NONE, Codec, decode, make_codec

MAX_LINKS = 32
"""Of one group: a task names each as a recipe of about 250 bytes, and 64 kB hold about 250 of all its groups together.
A device that was away for more rounds gets the group whole."""


def references(
    state: Mapping[str, Tensors], before: Mapping[str, Reference], updates: UpdatesConfig, blobs: BlobStore
) -> dict[str, Reference]:
    """What devices get next of every group, whose tensors `state` has; nothing where they get the state itself."""
    if not updates.codes_down:
        return {}
    down, whole = make_codec(updates.down), make_codec(updates.down_whole)
    return {group: _next(members, before.get(group), down, whole, blobs) for group, members in state.items()}


def snapshot(members: Tensors, updates: UpdatesConfig, blobs: BlobStore) -> Reference:
    """What a device gets of values that were made for it alone, in this round alone."""
    return _next(members, None, make_codec(NONE), make_codec(updates.down_whole), blobs)


def _next(members: Tensors, before: Reference | None, down: Codec, whole: Codec, blobs: BlobStore) -> Reference:
    """Where numbers are beyond a codec, devices get the state itself."""
    try:
        return _coded(members, before, down, whole, blobs)
    except BadPayload:
        return Reference(blobs.put(pack(members)).digest)


def _coded(members: Tensors, before: Reference | None, down: Codec, whole: Codec, blobs: BlobStore) -> Reference:
    target, patch, snapshot = members, None, None
    if before is not None and down.name != NONE:
        base = unpack(blobs.get(before.digest))
        patch = down.encode({name: np.subtract(value, base[name]) for name, value in members.items()})
        moved = decode(patch, {name: value.shape for name, value in members.items()})
        target = {name: np.add(base[name], moved[name]) for name in members}
    if whole.name != NONE:
        snapshot = whole.encode(target)
        target = decode(snapshot, {})
    sent = blobs.put(pack(target))
    if before is not None and sent.digest == before.digest:  # nothing moved
        return before
    links: list[Link] = []
    if before is not None and patch is not None and before.whole == whole.text:
        links = [link for link in before.links if link.base]
        links.append(Link(sent.digest, before.digest, blobs.put(pack(patch)).digest))
    if snapshot is None:
        return Reference(sent.digest, whole.text, _smaller_than(sent.size, links, blobs))
    kept = blobs.put(pack(snapshot))
    links = [*_smaller_than(kept.size, links, blobs), Link(sent.digest, "", kept.digest)]
    return Reference(sent.digest, whole.text, tuple(links))


def _smaller_than(size: int, links: list[Link], blobs: BlobStore) -> tuple[Link, ...]:
    """The newest links whose patches together are smaller: others would help nobody. At most MAX_LINKS of them."""
    kept: list[Link] = []
    for link in reversed(links[-MAX_LINKS:]):
        size -= blobs.manifest(link.patch).size
        if size <= 0:
            break
        kept.append(link)
    return tuple(reversed(kept))
