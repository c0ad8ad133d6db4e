"""The training steps of a phase: graphs that are bound once to fixed memory.

Nothing is copied between steps. If gradients are summed over the parts of a batch, tensors, gradients and optimizer
slots are one vector each, which graphs read and write in place.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_client.work.memory import Buffer, find_memory
from edge_client.work.packed_slots import BLOCK, PackedSlot
from fedvit.errors import BadPayload
from fedvit.frozen_part import FEATURE
from fedvit.program import Program, Train
from fedvit.tensors import Array, Tensors, release_pages

if TYPE_CHECKING:  # imported when the first graph is loaded
    from onnxruntime import InferenceSession

PIECE_ELEMENTS = 1 << 17
"""Elements that one run of an update processes: with slots and temporaries they fit into a core's cache."""
ALIGNED_ELEMENTS = 16

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Runs a graph that holds its tensors: from the other inputs to all outputs."""

_DTYPES = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(int64)": np.dtype(np.int64),
}


class Graph:
    """A loaded graph, with its inputs and outputs by name."""

    def __init__(self, session: "InferenceSession") -> None:
        self.session = session
        self.inputs = {node.name: node for node in session.get_inputs()}
        self.outputs = {node.name: node for node in session.get_outputs()}

    def require(self, provided: set[str]) -> None:
        """Raises BadPayload when the graph reads an input that is not in `provided`."""
        if missing := [name for name in self.inputs if name not in provided]:
            raise BadPayload("FV2310", f"the graph reads {missing[0]!r}, which the program does not provide")

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """All outputs for these inputs; feeds that the graph does not read are ignored."""
        fed = {name: feeds[name] for name in self.inputs}
        try:
            return dict(zip(self.outputs, self.session.run(list(self.outputs), fed), strict=True))
        except Exception as error:  # onnxruntime's exceptions share no base of their own
            raise _cannot_run(error) from error

    def hold(self, values: Mapping[str, Any]) -> Answer:
        """Return a `run` that needs the other inputs alone; a GPU copies these once."""
        memory = find_memory(self.session)
        if memory.is_host:
            return lambda feeds: self.run({**values, **feeds})
        bound = Bound(self)
        for name, value in values.items():
            bound.read(name, memory.copy(value))
        return bound.answer


class Bound:
    """Inputs and outputs of a graph at fixed memory addresses."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._binding = graph.session.io_binding()
        self._held: dict[str, Array | Buffer] = {}  # onnxruntime does not hold references

    def read(self, name: str, place: Array | Buffer) -> None:
        """Bind input `name` to the memory of a place; ignored if the graph does not read it.

        A GPU copies an array here, and does not see later changes of it. Raises BadPayload if dtype or shape do not
        match the graph.
        """
        if (node := self.graph.inputs.get(name)) is not None:
            if not isinstance(place, Buffer) and place.shape:
                place = np.ascontiguousarray(place)
            self._bind(self._binding.bind_input, node, place)
            self._held[name] = place

    def write(self, name: str, place: Array | Buffer) -> None:
        """Bind output `name` to a place. Raises BadPayload if it is missing, or has another shape or dtype."""
        if (node := self.graph.outputs.get(name)) is None:
            raise BadPayload("FV2310", f"the graph has no output {name!r}")
        self._bind(self._binding.bind_output, node, place)
        self._held[f"output {name}"] = place

    def _bind(self, bind: Callable[..., None], node: Any, place: Array | Buffer) -> None:
        _check(node, place)
        device, address = (place.device, place.address) if isinstance(place, Buffer) else ("cpu", place.ctypes.data)
        bind(node.name, device, 0, place.dtype.type, place.shape, address)

    def answer(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Bind further inputs, run, and return all outputs as arrays."""
        self.graph.require(self._held.keys() | feeds.keys())
        for name, array in feeds.items():
            self.read(name, array)
        for name in self.graph.outputs:
            self._binding.bind_output(name, "cpu")
        self.run()
        return dict(zip(self.graph.outputs, self._binding.copy_outputs_to_cpu(), strict=True))

    def run(self) -> None:
        """Raises BadPayload when onnxruntime refuses."""
        try:
            self.graph.session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime's exceptions share no base of their own
            raise _cannot_run(error) from error


class Stepped(NamedTuple):
    """One optimizer step."""

    loss: float  # mean over the batch's samples
    collected: dict[str, Array]  # (samples, ...) each
    runs: int  # of the phase's graph


class Steps(ABC):
    """The training state of one phase."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        phase: Train,
        values: Mapping[str, Array],
        start: Mapping[str, Array],
        facts: Mapping[str, Any],
    ) -> None:
        self.count = 0  # steps so far
        self.trained_names = [name for group in phase.groups for name in program.names(group)]
        self._phase = phase
        self._scalars = {
            "hyper/lr": np.array(phase.lr, np.float32),
            "hyper/step": np.zeros((), np.float32),
            "hyper/last": np.zeros((), np.float32),
        }
        trained = set(self.trained_names)
        self._fixed: dict[str, Array] = {
            f"tensor/{name}": value for name, value in values.items() if name not in trained
        }
        self._fixed |= {f"anchor/{name}": start[name] for group in phase.anchors for name in program.names(group)}
        self._fixed |= dict(facts)
        self._memory = find_memory(graph.session)
        self._bound = Bound(graph)

    @property
    @abstractmethod
    def tensors(self) -> Tensors:
        """The tensors as they are now."""

    def step(self, feeds: Mapping[str, Array], *, last: bool) -> Stepped:
        """One optimizer step on one batch; `last` of its repeats."""
        self.count += 1
        self._scalars["hyper/step"][()] = self.count
        self._scalars["hyper/last"][()] = last
        if not self._memory.is_host:
            for bound in self._all_bound():
                for name, scalar in self._scalars.items():
                    bound.read(name, scalar)
        return self._step(feeds)

    @abstractmethod
    def _step(self, feeds: Mapping[str, Array]) -> Stepped: ...

    def _all_bound(self) -> list[Bound]:
        return [self._bound]

    def _bind_fixed(self, trained: set[str]) -> None:
        """Raises BadPayload when the graph reads an input that is neither fixed nor trained."""
        kinds = ("patches", "kept", "seeds", "tokens", "labels", "weight")
        batch = {f"batch/{kind}" for kind in kinds}
        batch |= {name for name in self._bound.graph.inputs if name.startswith(FEATURE)}
        self._bound.graph.require(self._fixed.keys() | self._scalars.keys() | trained | batch)
        for name, array in self._fixed.items():
            if name in self._bound.graph.inputs:
                self._bound.read(name, self._memory.hold(array))
        for name, scalar in self._scalars.items():
            self._bound.read(name, scalar)

    def _collect_into(self, rows: int) -> dict[str, Array]:
        outputs = self._bound.graph.outputs
        collected = {name: node for name, node in outputs.items() if name.startswith("collect/")}
        return {name: np.empty((rows, *node.shape[1:]), np.float32) for name, node in collected.items()}


class WholeSteps(Steps):
    """A graph that makes whole optimizer steps: it reads one copy of the tensors and writes another."""

    def __init__(self, graph: Graph, program: Program, phase: Train, values: Mapping[str, Array], *rest: Any) -> None:
        super().__init__(graph, program, phase, values, *rest)
        memory, arrays = self._memory, {name: values[name] for name in self.trained_names}
        self._now: dict[str, Any] = {f"tensor/{name}": memory.copy(array) for name, array in arrays.items()}
        for slot in phase.slots:
            for name, array in arrays.items():
                self._now[f"slot/{slot}/{name}"] = memory.make_zeros(array.shape, array.dtype)
        release_pages(arrays.values())
        self._next = {name: memory.make_zeros(place.shape, place.dtype) for name, place in self._now.items()}
        self._loss = np.zeros((), np.float32)
        self._bound.write("metric/loss", self._loss)
        self._bind_fixed(set(self._now))

    @property
    def tensors(self) -> Tensors:
        return {name: self._memory.read(self._now[f"tensor/{name}"]) for name in self.trained_names}

    def _step(self, feeds: Mapping[str, Array]) -> Stepped:
        collected = self._collect_into(len(feeds["batch/labels"]))
        for name, array in feeds.items():
            self._bound.read(name, array)
        for name, place in self._now.items():
            self._bound.read(name, place)
            self._bound.write(f"new/{name}", self._next[name])
        for name, array in collected.items():
            self._bound.write(name, array)
        self._bound.run()
        self._now, self._next = self._next, self._now
        return Stepped(float(self._loss), collected, 1)


class SummedSteps(Steps):
    """A graph that adds up gradients over the parts of a batch, and one that updates."""

    def __init__(
        self, graph: Graph, program: Program, phase: Train, values: Mapping[str, Array], *rest: Any, update: Graph
    ) -> None:
        super().__init__(graph, program, phase, values, *rest)
        self._run_size = program.batch.run_size
        self._places = dict(_places(self.trained_names, values))
        length = max((place.stop for place, _ in self._places.values()), default=0)
        memory, self._length = self._memory, length
        start = np.zeros(length, np.float32)
        for name, tensor in self._views(start).items():
            tensor[...] = values[name]
        self._values: Any = memory.hold(start)
        self._grads: Any = memory.make_zeros((length,))
        packs = phase.slot_bits == 8 and memory.is_host  # by NumPy
        self._packed = {slot: PackedSlot(slot, length) for slot in phase.slots if packs}
        sizes = {slot: PIECE_ELEMENTS if slot in self._packed else length for slot in phase.slots}
        self._slots: dict[str, Any] = {slot: memory.make_zeros((size,)) for slot, size in sizes.items()}
        self._scalars["batch/share"] = np.zeros((), np.float32)
        self._loss = np.zeros((), np.float32)
        self._bound.write("metric/loss", self._loss)
        for name, (place, shape) in self._places.items():
            grad = memory.view(self._grads, place, shape)
            self._bound.read(f"tensor/{name}", memory.view(self._values, place, shape))
            self._bound.read(f"grad/{name}", grad)
            self._bound.write(f"new/grad/{name}", grad)
        self._bind_fixed({f"{kind}/{name}" for kind in ("tensor", "grad") for name in self.trained_names})
        release_pages(values[name] for name in self.trained_names)
        pieces = _pieces(length, PIECE_ELEMENTS if memory.is_host else max(1, length))
        self._updates = [(piece, self._update_of(update, piece)) for piece in pieces]

    @property
    def tensors(self) -> Tensors:
        return self._views(self._memory.read(self._values))

    def _views(self, vector: Any) -> Tensors:
        return {name: vector[place].reshape(shape) for name, (place, shape) in self._places.items()}

    def _update_of(self, update: Graph, piece: slice) -> Bound:
        update.require({"value", "grad", *(f"slot/{slot}" for slot in self._slots), *self._scalars})
        bound = Bound(update)
        for name, scalar in self._scalars.items():
            bound.read(name, scalar)
        size = piece.stop - piece.start
        bound.read("grad", self._memory.view(self._grads, piece, (size,)))
        vectors = {"value": self._memory.view(self._values, piece, (size,))}
        for slot, vector in self._slots.items():
            part = slice(0, size) if slot in self._packed else piece
            vectors[f"slot/{slot}"] = self._memory.view(vector, part, (size,))
        for name, place in vectors.items():
            bound.read(name, place)
            bound.write(f"new/{name}", place)
        return bound

    def _all_bound(self) -> list[Bound]:
        return [self._bound, *(update for _, update in self._updates)]

    def _update(self) -> None:
        draw = np.random.default_rng(self.count)
        for piece, update in self._updates:
            whole = -(-(piece.stop - piece.start) // BLOCK) * BLOCK
            for slot, packed in self._packed.items():
                packed.unpack(piece.start, self._slots[slot][:whole])
            update.run()
            for slot, packed in self._packed.items():
                packed.pack(piece.start, self._slots[slot][:whole], draw)

    def _step(self, feeds: Mapping[str, Array]) -> Stepped:
        size = self._run_size
        weight: Any = feeds["batch/weight"]
        collected = self._collect_into(len(weight))
        self._memory.clear(self._grads)
        loss, runs = 0.0, 0
        for first in range(0, len(weight), size):
            part = slice(first, first + size)
            share = weight[part].sum() / weight.sum()
            if not share:  # padding only
                continue
            self._scalars["batch/share"][()] = share
            self._bound.read("batch/share", self._scalars["batch/share"])
            for name, array in feeds.items():
                self._bound.read(name, array[part])
            for name, array in collected.items():
                self._bound.write(name, array[part])
            self._bound.run()
            loss, runs = loss + float(self._loss), runs + 1
        if self._phase.clip_norm is not None:
            grads: Any = self._memory.read(self._grads)
            norm = float(np.sqrt(np.dot(grads, grads)))
            if norm > self._phase.clip_norm:
                grads *= self._phase.clip_norm / norm
                self._memory.write(self._grads, grads)
        self._update()
        return Stepped(loss, collected, runs)


def _places(names: list[str], values: Mapping[str, Array]) -> Iterator[tuple[str, tuple[slice, tuple[int, ...]]]]:
    """The slice of each tensor in one vector, and its shape; each slice starts at a cache line."""
    first = 0
    for name in names:
        value = values[name]
        if value.dtype != np.float32:
            raise BadPayload("FV2310", f"tensor {name!r} is {value.dtype}; training supports float32 only")
        yield name, (slice(first, first + value.size), value.shape)
        first += -(-value.size // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def _pieces(length: int, size: int) -> Iterator[slice]:
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def _check(node: Any, array: Array | Buffer) -> None:
    dtype = _DTYPES.get(node.type)
    fits = len(node.shape) == len(array.shape) and all(
        not isinstance(want, int) or want == got for want, got in zip(node.shape, array.shape, strict=True)
    )
    if dtype != array.dtype or not fits:
        raise BadPayload(
            "FV2310",
            f"the graph expects {node.name!r} as {node.type} of shape {list(node.shape)}, "
            f"got {array.dtype} of shape {list(array.shape)}",
        )


def _cannot_run(error: Exception) -> BadPayload:
    return BadPayload("FV1418", f"the graph cannot run on this device: {error}")
