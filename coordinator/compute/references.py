"""Coded transfers of the server's state: devices build each value from the previous one and a coded delta.

The server's own state stays exact, in float32. Beside it the server keeps the reference: the values that devices were
last sent, bit for bit. After a round the reference is updated by the coded difference between the state and itself, so
the coding error of one round is part of the next difference (error feedback). Devices train from the reference; their
deltas update the state.
"""

from collections.abc import Mapping

import numpy as np

from coordinator.config import UpdatesConfig
from coordinator.record.tables import Link, Reference
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.tensors import Tensors, pack, unpack
from fedvit.updates import NONE, Codec, decode, make_codec
from fedvit.wire.messages import MAX_CHAIN_STEPS


def references(
    state: Mapping[str, Tensors], before: Mapping[str, Reference], updates: UpdatesConfig, blobs: BlobStore
) -> dict[str, Reference]:
    """The next reference of every group of `state`; empty if devices get the uncoded state."""
    if not updates.codes_down:
        return {}
    down, whole = make_codec(updates.down), make_codec(updates.down_whole)
    return {group: _next(members, before.get(group), down, whole, blobs) for group, members in state.items()}


def snapshot(members: Tensors, updates: UpdatesConfig, blobs: BlobStore) -> Reference:
    """The reference of values that were generated for one device in one round."""
    return _next(members, None, make_codec(NONE), make_codec(updates.down_whole), blobs)


def _next(members: Tensors, before: Reference | None, down: Codec, whole: Codec, blobs: BlobStore) -> Reference:
    """The next reference; if a codec cannot represent the values, it is the uncoded state."""
    try:
        return _encode_next(members, before, down, whole, blobs)
    except BadPayload:
        return Reference(blobs.put(pack(members)).digest)


def _encode_next(members: Tensors, before: Reference | None, down: Codec, whole: Codec, blobs: BlobStore) -> Reference:
    target, patch, snapshot = members, None, None
    if before is not None and down.name != NONE:
        base = unpack(blobs.get(before.digest))
        patch = down.encode({name: np.subtract(value, base[name]) for name, value in members.items()})
        change = decode(patch, {name: value.shape for name, value in members.items()})
        target = {name: np.add(base[name], change[name]) for name in members}
    if whole.name != NONE:
        snapshot = whole.encode(target)
        target = decode(snapshot, {})
    sent = blobs.put(pack(target))
    if before is not None and sent.digest == before.digest:  # nothing changed
        return before
    links: list[Link] = []
    if before is not None and patch is not None and before.whole == whole.text:
        links = _without_return([link for link in before.links if link.base], sent.digest)
        links.append(Link(sent.digest, before.digest, blobs.put(pack(patch)).digest))
    if snapshot is None:
        return Reference(sent.digest, whole.text, _smaller_than(sent.size, links, blobs))
    stored = blobs.put(pack(snapshot))
    links = [*_smaller_than(stored.size, links, blobs), Link(sent.digest, "", stored.digest)]
    return Reference(sent.digest, whole.text, tuple(links))


def _without_return(links: list[Link], target: str) -> list[Link]:
    """The links after the one that begins at `target`: values can return to earlier ones, a chain must not."""
    starts = [number for number, link in enumerate(links) if link.base == target]
    return links[starts[-1] + 1 :] if starts else links


def _smaller_than(size: int, links: list[Link], blobs: BlobStore) -> tuple[Link, ...]:
    """The newest links whose patches together are smaller than the whole value; at most MAX_CHAIN_STEPS."""
    kept: list[Link] = []
    for link in reversed(links[-MAX_CHAIN_STEPS:]):
        size -= blobs.manifest(link.patch).size
        if size <= 0:
            break
        kept.append(link)
    return tuple(reversed(kept))
