"""Opens graphs with onnxruntime, with the settings that were best in measurements."""

import contextlib
import ctypes
import functools
import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvit import kernels
from fedvit.onnx_file import check_self_contained

if TYPE_CHECKING:  # imported with the first graph: an idle device saves its 25 MB
    from collections.abc import Callable

    from onnxruntime import InferenceSession

log = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"

_IDENTITY = (
    b"\x08\x08" b"B\x02\x10\x11" b":7\n\x10\n\x01x\x12\x01y\"\x08Identity\x12\x01g"
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01" b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"
)  # fmt: skip
"""The smallest of all graphs, an ONNX model as it is written: IR version 8, operators of set 17; y = Identity(x), of
one float32 each."""


def open_session(
    graph: Path | bytes, threads: int, provider: str = CPU, *, own_kernels: bool = True
) -> "InferenceSession":
    """Open a session of a graph or file; on the CPU, with a warning, if the execution provider is not available.

    On the CPU operators of the optional kernels are put in, if they are installed and `own_kernels`. Raises BadPayload
    for a file that would make the engine read another file, and onnxruntime's exceptions.
    """
    check_self_contained(graph)
    onnxruntime = _engine()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # threads spin between the hundreds of operators of a step, which saves a tenth of the time if operators are small,
    # and stop at its end: what runs beside us then has the cores
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.enable_mem_pattern = False  # one block for all activations would be larger than they ever are together
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.load_model_format", "ONNX")  # whatever its first bytes may say
    options.log_severity_level = 3
    # equal unpackings of a weight in the forward and in the backward pass, and what a block computes again, must stay
    # two: joined, they would hold the whole model unpacked in between
    kept = ["CommonSubexpressionElimination"]
    make = functools.partial(
        onnxruntime.InferenceSession,
        sess_options=options,
        providers=_providers(provider),
        disabled_optimizers=kept,
    )
    session: InferenceSession | None = None
    if own_kernels and _providers(provider) == [CPU]:
        session = _open_with_kernels(graph, options, make)
    return session or make(graph if isinstance(graph, bytes) else str(graph))


def _open_with_kernels(
    graph: Path | bytes, options: Any, make: "Callable[[bytes], InferenceSession]"
) -> "InferenceSession | None":
    """Open the graph with operators of the kernels; None if there are none for it, or they do not load."""
    if not _register_kernels(options):
        return None
    changed = kernels.insert_kernels(graph if isinstance(graph, bytes) else graph.read_bytes())
    try:
        return make(changed) if changed else None
    except Exception as error:  # noqa: BLE001 - a library of another version lacks an operator
        _warn_of_kernels(str(kernels.find_library()), str(error))
        return None


def has_kernels() -> bool:
    """Return whether the optional kernels are installed and load."""
    return _register_kernels(_engine().SessionOptions())


def _register_kernels(options: Any) -> bool:
    if (library := kernels.find_library()) is None:
        return False
    try:
        options.register_custom_ops_library(str(library))
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base of their own
        _warn_of_kernels(str(library), str(error))
        return False
    return True


@functools.cache
def _warn_of_kernels(library: str, error: str) -> None:
    """Once: a device opens several graphs."""
    log.warning("the kernels cannot be loaded; training without them", extra={"path": library, "error": error})


def load_engine() -> None:
    """Import onnxruntime now: what it takes is there before a task begins."""
    _engine()


def trim_memory() -> None:
    """Return memory to the system that no graph and no array needs any more.

    onnxruntime's arena keeps what it once got, also when all sessions are closed: 289 MB stayed resident where 107
    were left after this. It shrinks only at the end of a run, so the smallest of all graphs is run.
    """
    onnxruntime = _engine()
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    session = onnxruntime.InferenceSession(_IDENTITY, options, providers=[CPU])
    how = onnxruntime.RunOptions()
    how.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session.run(None, {"x": np.zeros(1, np.float32)}, how)
    del session
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # only available in glibc
        ctypes.CDLL(None).malloc_trim(0)


_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20
"""Blocks from this size on get pages of their own, which go back to the system when they are freed. By default glibc
puts blocks of up to 32 MB among the small ones as soon as one was freed: a second round then needed 439 MB where the
first had needed 380, and 38 MB more stayed between rounds."""


@functools.cache
def _engine() -> Any:
    """onnxruntime, with one memory arena for all sessions of the process, growing by what is needed.

    By default each session has its own and doubles it: on the demo's two graphs that costs 12 MB of 149.
    """
    import onnxruntime

    with contextlib.suppress(AttributeError, OSError):  # only available in glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    same_as_requested = 1
    onnxruntime.create_and_register_allocator(
        place, onnxruntime.OrtArenaCfg({"arena_extend_strategy": same_as_requested})
    )
    return onnxruntime


@functools.cache
def _providers(wanted: str) -> list[str]:
    available = _engine().get_available_providers()
    if wanted not in available:
        log.warning("execution provider not available; using CPU", extra={"wanted": wanted, "available": available})
        return [CPU]
    return list(dict.fromkeys((wanted, CPU)))
