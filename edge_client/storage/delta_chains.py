"""Delta chains: a device rebuilds a blob from one that it has and small patches, instead of fetching it whole."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, FedvitError
from fedvit.tensors import Array, Tensors, map_tensors, release_pages, stream_tensors
from fedvit.updates import NONE, decode_one, make_codec
from fedvit.wire.messages import MAX_CHAIN_STEPS, DeltaStep, Manifest


class DeltaChain(NamedTuple):
    """The way to rebuild one blob: from the blob `base`, if any, by the steps in their order."""

    target: Manifest
    base: str
    steps: tuple[DeltaStep, ...]


class _Best(NamedTuple):
    """The chain with the fewest bytes that leads to one digest, by its last step."""

    size_bytes: int
    length: int
    last: DeltaStep


def delta_chains(
    wanted: Iterable[str],
    steps: tuple[DeltaStep, ...],
    manifests: Mapping[str, Manifest],
    has: Callable[[str], bool],
) -> list[DeltaChain]:
    """Find the chain with the fewest bytes for each wanted blob that is not here; none if the whole blob is smaller.

    Raises BadPayload for steps that lead in a circle, and for a chain of more than MAX_CHAIN_STEPS steps.
    """
    best = _find_best(steps, has)
    chains = []
    for digest in wanted:
        if digest in manifests and digest in best and best[digest].size_bytes < manifests[digest].size:
            length = best[digest].length
            if length > MAX_CHAIN_STEPS:
                raise BadPayload(
                    "FV2304", f"a delta chain to {digest} has {length} steps, at most {MAX_CHAIN_STEPS} are allowed"
                )
            chain, base = deque[DeltaStep](), digest
            while base in best:
                chain.appendleft(best[base].last)
                base = chain[0].base
            chains.append(DeltaChain(manifests[digest], base, tuple(chain)))
    return chains


def _find_best(steps: tuple[DeltaStep, ...], has: Callable[[str], bool]) -> dict[str, _Best]:
    """Find the cheapest chain to every digest that steps lead to and that is not here.

    Bases come before their targets, so that each step is looked at once, whatever graph a coordinator sends.
    """
    leading: dict[str, list[DeltaStep]] = {}
    for step in steps:
        leading.setdefault(step.target, []).append(step)
    bases = {target: {step.base for step in its if step.base} for target, its in leading.items()}
    try:
        order = tuple(TopologicalSorter(bases).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise BadPayload("FV2304", f"the task's delta steps lead in a circle: {circle[:500]}") from None
    here = {digest for digest in order if has(digest)}
    best: dict[str, _Best] = {}
    for digest in order:
        for step in leading.get(digest, ()) if digest not in here else ():
            before = best.get(step.base)
            if step.base and step.base not in here and before is None:
                continue
            size_bytes, length = (before.size_bytes, before.length) if before else (0, 0)
            chain = _Best(size_bytes + step.patch.size, length + 1, step)
            if digest not in best or chain.size_bytes < best[digest].size_bytes:
                best[digest] = chain
    return best


def make_blob(chain: DeltaChain, blobs: BlobStore) -> None:
    """Rebuild the target of a chain, tensor by tensor, so that a large one takes little memory.

    Raises BadPayload when the digest is not that of the target; nothing is kept then.
    """
    base = map_tensors(blobs.path(chain.base)) if chain.base else {}
    patches = [map_tensors(blobs.path(step.patch.digest)) for step in chain.steps]
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
        for piece in stream_tensors(specs, value):
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
        raise BadPayload("FV2303", f"a patch lacks tensor {name!r}")
    value: Array = np.add(before, decode_one(name, patch, before.shape))
    if whole == NONE:
        return value
    return decode_one(name, make_codec(whole).encode({name: value}), value.shape)
