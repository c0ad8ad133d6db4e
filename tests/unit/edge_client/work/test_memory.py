"""Places of numbers, which are arrays on the host and buffers of onnxruntime elsewhere."""

from typing import Any, cast

import numpy as np
import pytest

from edge_client.work.memory import DeviceMemory, HostMemory, Memory, find_memory

MEMORIES = [HostMemory(), DeviceMemory("cpu")]

each_memory = pytest.mark.parametrize("memory", MEMORIES, ids=["host", "device"])


@each_memory
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.int64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_place_holds_the_numbers_of_an_array(memory: Memory, shape: tuple[int, ...], dtype: Any) -> None:
    array = np.asarray(np.random.default_rng(0).integers(1, 100, shape)).astype(dtype)
    for place in (memory.hold(array), memory.copy(array), memory.copy(np.array(array, order="F"))):
        np.testing.assert_array_equal(memory.read(place), array)
        assert (memory.read(place).dtype, tuple(place.shape)) == (array.dtype, shape)
    own = memory.copy(array)
    memory.clear(own)
    assert not memory.read(own).any()
    memory.write(own, array)
    np.testing.assert_array_equal(memory.read(own), array)
    zeros = memory.make_zeros(shape, dtype)
    assert not memory.read(zeros).any()
    assert memory.read(zeros).dtype == dtype


@each_memory
def test_view_lies_inside_its_vector(memory: Memory) -> None:
    vector = memory.copy(np.arange(10, dtype=np.float32))
    view = memory.view(vector, slice(2, 8), (2, 3))
    assert view.shape == (2, 3)
    address = view.ctypes.data if memory.is_host else view.address
    whole = vector.ctypes.data if memory.is_host else vector.address
    assert address - whole == 2 * 4


@pytest.mark.parametrize(
    ("providers", "device"),
    [
        (["CPUExecutionProvider"], None),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], "cuda"),
        (["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"], "cuda"),
        (["XnnpackExecutionProvider", "CPUExecutionProvider"], None),
    ],
)
def test_provider_decides_on_the_memory(providers: list[str], device: str | None) -> None:
    class Session:
        def get_providers(self) -> list[str]:
            return providers

    memory = find_memory(cast(Any, Session()))
    assert memory.is_host == (device is None)
    assert getattr(memory, "_device", None) == device
