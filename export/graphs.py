"""All graphs of one method for one model and batch: traced, exported, verified, and kept on disk."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from torch import Tensor

from export.origin import origin_of
from export.trace import Trace, to_onnx, trace
from export.verify import check_key, reference_predict, reference_step, reference_update, verify
from fedvit.blobs import digest_of
from fedvit.files import atomic_write
from fedvit.methods.base import Method
from fedvit.methods.step import (
    PIECE,
    Serves,
    Step,
    Update,
    example_inputs,
    gather_step,
    predict_step,
    steps_of,
    train_step,
    update_step,
)
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Gather, Train

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """A graph that was verified against torch, and its largest difference."""

    content: bytes
    max_difference: float
    cached: bool  # read from the cache; tests see by it what is exported again


def default_cache() -> Path:
    """The folder of cached graphs: $XDG_CACHE_HOME/fedvit/graphs, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvit" / "graphs"


def export_graphs(
    method: Method,
    vit: PatchViT,
    batch: Batch,
    *,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Exported]:
    """Graph name -> verified graph: those that the method's phases and its evaluation name.

    Raises ExportMismatch when a graph and torch disagree; nothing is cached then.
    """
    folder = cache or default_cache()
    graphs: dict[str, Exported] = {}
    for name, serves in steps_of(method, vit).items():
        seen = _origin_file(folder, method, vit, batch, name)
        if known := _read_by_origin(folder, seen):
            graphs[name] = known
            continue
        progress(f"tracing graph {name!r}")
        inputs = example_inputs(method, vit, batch, serves)
        _, reference = _step_and_reference(method, vit, serves)
        traced = _trace_step(method, vit, serves, inputs)
        key = f"{traced.key}-{check_key()}"
        graphs[name] = _verify_once(traced, key, reference, name, folder, progress)
        if seen:
            atomic_write(seen, key.encode())
    return graphs


def export_unverified(method: Method, vit: PatchViT, batch: Batch, *, cache: Path | None = None) -> dict[str, bytes]:
    """The graphs as `export_graphs` would make them, but not verified: for pricing, not for devices.

    Those that `export_graphs` left in a cache are taken from there; what is made here is not kept.
    """
    graphs: dict[str, bytes] = {}
    for name, serves in steps_of(method, vit).items():
        if cache and (known := _read_by_origin(cache, _origin_file(cache, method, vit, batch, name))):
            graphs[name] = known.content
        else:
            graphs[name] = to_onnx(_trace_step(method, vit, serves, example_inputs(method, vit, batch, serves)))
    return graphs


def _origin_file(folder: Path, method: Method, vit: PatchViT, batch: Batch, graph: str) -> Path | None:
    """The file that holds the key of a graph by what it was made of; None where that has no key."""
    origin = origin_of(method, vit, batch, graph)
    return folder / origin[:2] / f"{origin}.seen" if origin else None


def _read_by_origin(folder: Path, seen: Path | None) -> Exported | None:
    return _read_cached(folder, seen.read_text(errors="replace")) if seen and seen.is_file() else None


def _trace_step(method: Method, vit: PatchViT, serves: Serves, inputs: Mapping[str, Tensor]) -> Trace:
    step, _ = _step_and_reference(method, vit, serves)
    any_length = PIECE if isinstance(serves, Update) else None
    compute = method.compute if isinstance(serves, Train) else "fp32"
    return trace(step, inputs, any_length=any_length, compute=compute)


def _step_and_reference(method: Method, vit: PatchViT, serves: Serves) -> tuple[Step, Step]:
    if isinstance(serves, Train):
        return train_step(method, vit, serves), reference_step(method, vit, serves)
    if isinstance(serves, Update):
        return update_step(serves.rule), reference_update(serves.rule)
    step = gather_step(method, vit, serves) if isinstance(serves, Gather) else predict_step(method, vit)
    return step, partial(reference_predict, step)


def _verify_once(
    traced: Trace, key: str, reference: Step, name: str, folder: Path, progress: Callable[[str], None]
) -> Exported:
    """The verified graph of a trace, from the cache if an equal trace passed the same check before."""
    if known := _read_cached(folder, key):
        return known
    progress(f"exporting graph {name!r} (once for this method, model and batch)")
    content = to_onnx(traced)
    difference = verify(content, reference, traced.inputs, f"graph {name!r}")
    progress(f"graph {name!r} agrees with torch within {difference:.1e}")
    file = _file(folder, key)
    atomic_write(file, content)
    facts = {"graph": name, "max_difference": difference, "digest": digest_of(content)}
    atomic_write(file.with_suffix(".json"), json.dumps(facts).encode())
    log.info("graph exported", extra={"graph": name, "bytes": len(content), "max_difference": difference})
    return Exported(content, difference, cached=False)


def _read_cached(folder: Path, key: str) -> Exported | None:
    """A cached graph; None if there is none or a file is damaged: the graph is exported again, with equal bytes."""
    file = _file(folder, key)
    facts = file.with_suffix(".json")
    if not (file.is_file() and facts.is_file()):  # the facts are written last: if they exist, both files are complete
        return None
    content = file.read_bytes()
    try:
        known = msgspec.json.decode(facts.read_bytes(), type=_Facts)
    except (msgspec.MsgspecError, ValueError):
        known = None
    if known is None or known.digest != digest_of(content):
        log.warning("damaged file", extra={"path": str(file), "held": "a graph; it is exported again"})
        return None
    return Exported(content, known.max_difference, cached=True)


class _Facts(msgspec.Struct):
    max_difference: float
    digest: str


def _file(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.onnx"
