"""Memory that the device and the process that runs its graphs both see: the tensors of a result."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedvit.errors import BadPayload
from fedvit.program import LABELS, Program
from fedvit.tensors import Array, Tensors

_ALIGNED_BYTES = 64

Form = tuple[str, tuple[int, ...], np.dtype[Any]]
"""Name, shape and dtype of a tensor."""


def make_shared(nbytes: int) -> int:
    """Return a file of this size in memory, which nobody can shorten: reading it never fails."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            file.truncate(nbytes)
            return os.dup(file.fileno())
    import fcntl

    shared = os.memfd_create("fedvit-result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(shared, nbytes)
    fcntl.fcntl(shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return shared


def list_forms(program: Program, rows: dict[str, int]) -> list[Form]:
    """Return the tensors of a training's result in their order: new values, then `rows` of each collected output."""
    trained = dict.fromkeys(name for phase in program.train for group in phase.groups for name in program.names(group))
    forms: list[Form] = [(name, program.tensors[name].shape, np.dtype(program.tensors[name].dtype)) for name in trained]
    collects = {phase.collect.output: phase.collect for phase in program.train if phase.collect}
    forms += [(name, (rows[name], *collect.shape), np.dtype(np.float32)) for name, collect in collects.items()]
    if collects:
        shape, dtype = program.batch.describe_label(len(program.classes))
        forms.append((LABELS, (rows[LABELS], *shape), np.dtype(dtype)))
    return forms


def list_file_forms(sizes: dict[str, int]) -> list[Form]:
    """Return files of these sizes in their order, as tensors of bytes."""
    return [(name, (size,), np.dtype(np.uint8)) for name, size in sizes.items()]


def count_bytes(forms: Iterable[Form]) -> int:
    """Return the size of the tensors, each at an aligned place."""
    return sum(_round_up(_nbytes(form)) for form in forms)


def write_tensors(shared: int, forms: Sequence[Form], tensors: Tensors) -> None:
    """Copy the tensors into the shared memory, and give up the view of it."""
    for (name, _, dtype), place in zip(forms, _places(forms), strict=True):
        raw = memoryview(np.ascontiguousarray(tensors[name], dtype).reshape(-1).view(np.uint8).data)
        written = 0
        while written < raw.nbytes:
            written += os.pwrite(shared, raw[written : written + (1 << 24)], place + written)


def map_shared(shared: int, forms: Sequence[Form]) -> Tensors:
    """Map the tensors that the other process wrote. Raises BadPayload if they are larger than the shared memory."""
    needed = count_bytes(forms)
    if needed > os.fstat(shared).st_size:
        raise BadPayload("FV1481", f"a result of {needed} bytes is larger than {os.fstat(shared).st_size} expected")
    if not needed:
        return {}
    memory = mmap.mmap(shared, needed, prot=mmap.PROT_READ)
    tensors: Tensors = {}
    for (name, shape, dtype), place in zip(forms, _places(forms), strict=True):
        count = int(np.prod(shape, dtype=np.int64))
        numbers: Array = np.frombuffer(memory, dtype, count, place) if count else np.zeros(0, dtype)
        tensors[name] = numbers.reshape(shape)
    return tensors


def _places(forms: Sequence[Form]) -> list[int]:
    places, end = [], 0
    for form in forms:
        places.append(end)
        end += _round_up(_nbytes(form))
    return places


def _nbytes(form: Form) -> int:
    return int(np.prod(form[1], dtype=np.int64)) * form[2].itemsize


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
