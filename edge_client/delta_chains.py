"""Delta chains: a device rebuilds a blob from one that it has and small patches, instead of fetching it whole."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, FedvitError
from fedvit.tensors import Array, Tensors, mapped, packed_stream, release_pages
from fedvit.updates import NONE, decode_one, make_codec
from fedvit.wire.messages import DeltaStep, Manifest


class DeltaChain(NamedTuple):
    """How to rebuild one blob: from the blob `base`, if any, by the steps in their order."""

    target: Manifest
    base: str
    steps: tuple[DeltaStep, ...]


def delta_chains(
    wanted: Iterable[str],
    steps: tuple[DeltaStep, ...],
    manifests: Mapping[str, Manifest],
    has: Callable[[str], bool],
) -> list[DeltaChain]:
    """The chain with the fewest bytes for each wanted blob that is not here; none where the whole blob is smaller."""
    found = []
    for digest in wanted:
        if digest in manifests and not has(digest):
            base, chain = _cheapest(digest, steps, has)
            if chain and sum(step.patch.size for step in chain) < manifests[digest].size:
                found.append(DeltaChain(manifests[digest], base, chain))
    return found


def _cheapest(
    target: str, steps: tuple[DeltaStep, ...], has: Callable[[str], bool]
) -> tuple[str, tuple[DeltaStep, ...]]:
    """(base, steps) with the fewest bytes that lead to the target; no steps if there is no chain."""
    best: tuple[str, tuple[DeltaStep, ...]] = ("", ())
    for number, step in enumerate(steps):
        if step.target != target:
            continue
        base = step.base
        before: tuple[DeltaStep, ...] = ()
        if base and not has(base):  # each step is used once, so that cycles end
            base, before = _cheapest(step.base, steps[:number] + steps[number + 1 :], has)
            if not before:
                continue
        chain = (*before, step)
        if not best[1] or _size(chain) < _size(best[1]):
            best = (base, chain)
    return best


def _size(chain: tuple[DeltaStep, ...]) -> int:
    return sum(step.patch.size for step in chain)


def make_blob(chain: DeltaChain, blobs: BlobStore) -> None:
    """Rebuild the target of a chain, tensor by tensor, so that a large one takes little memory.

    Raises BadPayload when the digest is not that of the target; nothing is kept then.
    """
    base = mapped(blobs.path(chain.base)) if chain.base else {}
    patches = [mapped(blobs.path(step.patch.digest)) for step in chain.steps]
    names = base or {name: value for name, value in patches[0].items() if "#" not in name}
    specs = {name: (value.shape, "float32") for name, value in names.items()}

    def value(name: str) -> Array:
        result: Array | None = base.get(name)
        for step, patch in zip(chain.steps, patches, strict=True):
            result = apply_step(name, result if step.base else None, patch, step.whole)
        assert result is not None  # a chain has at least one step
        return result

    partial = blobs.receive(chain.target)
    try:
        waiting = bytearray()
        index = 0
        for piece in packed_stream(specs, value):
            waiting += piece
            for start in range(0, len(waiting) - chain.target.chunk + 1, chain.target.chunk):
                partial.write(index, bytes(waiting[start : start + chain.target.chunk]))
                index += 1
            del waiting[: len(waiting) // chain.target.chunk * chain.target.chunk]
        if waiting:
            partial.write(index, bytes(waiting))
        partial.commit()
    except FedvitError:
        partial.abandon()
        raise
    finally:
        release_pages((*base.values(), *(part for patch in patches for part in patch.values())))


def apply_step(name: str, before: Array | None, patch: Tensors, whole: str) -> Array:
    """Apply one step to one tensor. Raises BadPayload if the patch does not fit."""
    if before is None:
        return decode_one(name, patch, None)
    if name not in patch:
        raise BadPayload(f"a patch lacks tensor {name!r}")
    value: Array = np.add(before, decode_one(name, patch, before.shape))
    if whole == NONE:
        return value
    return decode_one(name, make_codec(whole).encode({name: value}), value.shape)
