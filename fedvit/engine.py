"""How a device opens a graph: onnxruntime with the settings that were measured to be the best ones."""

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a device that waits for work does without its 25 MB: imported with the first graph
    from onnxruntime import InferenceSession

log = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"


def open_session(path: Path, threads: int, provider: str = CPU, *, profile: Path | None = None) -> "InferenceSession":
    """A session of the graph in `path`; where there is no such execution provider, on the CPU, with a warning.

    With `profile`, onnxruntime's profiler writes to a file of this prefix. Raises onnxruntime's exceptions.
    """
    onnxruntime = _engine()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # threads spin between the hundreds of operators of a step, which saves a tenth of it where operators are small,
    # and stop at its end: what runs beside us then has the cores
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.enable_mem_pattern = False  # one block for all activations would be larger than they ever are together
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    session: InferenceSession = onnxruntime.InferenceSession(
        str(path),
        options,
        providers=_providers(provider),
        # equal unpackings of a weight in the forward and in the backward pass, and what a block computes again, must
        # stay two: joined, they would hold the whole model unpacked in between
        disabled_optimizers=["CommonSubexpressionElimination"],
    )
    return session


@functools.cache
def _engine() -> Any:
    """onnxruntime, with one memory arena for all sessions of the process, growing by what is needed.

    By default each session has its own and doubles it: on the demo's two graphs that costs 12 MB of 149.
    """
    import onnxruntime

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
        log.warning(
            "this onnxruntime has not the wanted execution provider, the CPU is used",
            extra={"wanted": wanted, "available": available},
        )
        return [CPU]
    return list(dict.fromkeys((wanted, CPU)))
