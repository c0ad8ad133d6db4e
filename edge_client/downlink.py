"""Blobs that a device makes from what it has and a small patch, instead of fetching them whole."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, FedvitError
from fedvit.tensors import Array, Tensors, let_go, mapped, packed_stream
from fedvit.updates import NONE, decode_one, make_codec
from fedvit.wire.messages import Manifest, Recipe


class Route(NamedTuple):
    """How one blob comes about: from the blob `base`, if any, by the recipes in their order."""

    target: Manifest
    base: str
    recipes: tuple[Recipe, ...]


def routes(
    wanted: Iterable[str],
    recipes: tuple[Recipe, ...],
    manifests: Mapping[str, Manifest],
    has: Callable[[str], bool],
) -> list[Route]:
    """For every wanted blob that is not here, the recipes with the fewest bytes; none where it is cheaper whole."""
    found = []
    for digest in wanted:
        if digest in manifests and not has(digest):
            base, chain = _cheapest(digest, recipes, has)
            if chain and sum(recipe.patch.size for recipe in chain) < manifests[digest].size:
                found.append(Route(manifests[digest], base, chain))
    return found


def _cheapest(target: str, recipes: tuple[Recipe, ...], has: Callable[[str], bool]) -> tuple[str, tuple[Recipe, ...]]:
    """(base, recipes) of the fewest bytes that lead to the target; no recipes where none do."""
    best: tuple[str, tuple[Recipe, ...]] = ("", ())
    for number, recipe in enumerate(recipes):
        if recipe.target != target:
            continue
        base = recipe.base
        before: tuple[Recipe, ...] = ()
        if base and not has(base):  # every recipe is used once, so that no circle is followed
            base, before = _cheapest(recipe.base, recipes[:number] + recipes[number + 1 :], has)
            if not before:
                continue
        chain = (*before, recipe)
        if not best[1] or _size(chain) < _size(best[1]):
            best = (base, chain)
    return best


def _size(chain: tuple[Recipe, ...]) -> int:
    return sum(recipe.patch.size for recipe in chain)


def make_blob(route: Route, blobs: BlobStore) -> None:
    """Put a route's target together, tensor by tensor, so that a large one takes little memory.

    Raises BadPayload when what comes out is not the target, and nothing of it is then kept.
    """
    base = mapped(blobs.path(route.base)) if route.base else {}
    patches = [mapped(blobs.path(recipe.patch.digest)) for recipe in route.recipes]
    names = base or {name: value for name, value in patches[0].items() if "#" not in name}
    specs = {name: (value.shape, "float32") for name, value in names.items()}

    def value(name: str) -> Array:
        result: Array | None = base.get(name)
        for recipe, patch in zip(route.recipes, patches, strict=True):
            result = step(name, result if recipe.base else None, patch, recipe.whole)
        assert result is not None  # a route has at least one recipe
        return result

    partial = blobs.receive(route.target)
    try:
        waiting = bytearray()
        index = 0
        for piece in packed_stream(specs, value):
            waiting += piece
            for start in range(0, len(waiting) - route.target.chunk + 1, route.target.chunk):
                partial.write(index, bytes(waiting[start : start + route.target.chunk]))
                index += 1
            del waiting[: len(waiting) // route.target.chunk * route.target.chunk]
        if waiting:
            partial.write(index, bytes(waiting))
        partial.commit()
    except FedvitError:
        partial.abandon()
        raise
    finally:
        let_go((*base.values(), *(part for patch in patches for part in patch.values())))


def step(name: str, before: Array | None, patch: Tensors, whole: str) -> Array:
    """One recipe on one tensor. Raises BadPayload where the patch does not fit."""
    if before is None:
        return decode_one(name, patch, None)
    if name not in patch:
        raise BadPayload(f"a patch lacks tensor {name!r}")
    value: Array = np.add(before, decode_one(name, patch, before.shape))
    if whole == NONE:
        return value
    return decode_one(name, make_codec(whole).encode({name: value}), value.shape)
