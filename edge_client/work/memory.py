"""The memory that graphs read and write in place: NumPy arrays, or memory of a GPU.

A GPU keeps tensors, gradients and optimizer slots from step to step; the batch, single numbers and what is collected
are copied at each run.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedvit.tensors import Array

if TYPE_CHECKING:  # imported when the first graph is loaded
    from onnxruntime import InferenceSession

DEVICES = {"CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "cuda"}
"""Execution provider -> the device whose memory its graphs use; those of all others use the host's."""


@dataclass(frozen=True)
class Buffer:
    """Numbers in a GPU's memory."""

    device: str  # as onnxruntime names it
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any  # the OrtValue that keeps the memory


class Memory(Protocol):
    """Makes places, which are arrays or buffers."""

    is_host: bool

    def hold(self, array: Array) -> Any:
        """Return a place with the numbers of an array, which is the place itself if it can be one."""

    def copy(self, array: Array) -> Any:
        """Return a place of its own with the numbers of an array."""

    def make_zeros(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any: ...

    def view(self, vector: Any, part: slice, shape: tuple[int, ...]) -> Any:
        """Return a part of a vector, in a shape of its own."""

    def read(self, place: Any) -> Array:
        """Return the numbers of a place as an array: those of the host are the place itself."""

    def write(self, place: Any, array: Array) -> None: ...

    def clear(self, place: Any) -> None:
        """Set all numbers of a place to zero."""


class HostMemory:
    """Places are arrays."""

    is_host = True

    def hold(self, array: Array) -> Array:
        return array

    def copy(self, array: Array) -> Array:
        return array.copy()

    def make_zeros(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        return np.zeros(shape, dtype)

    def view(self, vector: Any, part: slice, shape: tuple[int, ...]) -> Array:
        array: Array = vector[part].reshape(shape)
        return array

    def read(self, place: Array) -> Array:
        return place

    def write(self, place: Any, array: Any) -> None:
        if place is not array:
            place[...] = array

    def clear(self, place: Any) -> None:
        place.fill(0)


class DeviceMemory:
    """Places are buffers on one device."""

    is_host = False

    def __init__(self, device: str) -> None:
        self._device = device

    def hold(self, array: Array) -> Buffer:
        return self.copy(array)

    def copy(self, array: Array) -> Buffer:
        from onnxruntime import OrtValue  # late, as onnxruntime itself

        value = OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, self._device, 0)
        value.update_inplace(np.ascontiguousarray(array).reshape(array.shape))
        return Buffer(self._device, value.data_ptr(), array.shape, array.dtype, value)

    def make_zeros(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Buffer:
        return self.copy(np.zeros(shape, dtype))

    def view(self, vector: Buffer, part: slice, shape: tuple[int, ...]) -> Buffer:
        return replace(vector, address=vector.address + part.start * vector.dtype.itemsize, shape=shape)

    def read(self, place: Buffer) -> Array:
        array: Array = place.owner.numpy()
        return array

    def write(self, place: Buffer, array: Array) -> None:
        place.owner.update_inplace(array)

    def clear(self, place: Buffer) -> None:
        self.write(place, np.zeros(place.shape, place.dtype))


def find_memory(session: "InferenceSession") -> Memory:
    """Return the memory that the graphs of a session compute in."""
    devices = [DEVICES[name] for name in session.get_providers() if name in DEVICES]
    return DeviceMemory(devices[0]) if devices else HostMemory()
