"""The cost of a Program that does not depend on the device: FLOPs, bytes in each direction, memory."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Self

import msgspec
import numpy as np

from fedvit.program import Collect, Program, Role, TensorSpec, Train, encode_program
from fedvit.resources import IMAGE_CACHE_BYTES
from fedvit.tensors import compute_packed_bytes
from fedvit.updates import NONE, list_coded_forms, make_codec
from profiles.cost import GraphCost, flop_shares
from profiles.kept_features import PricedCut
from profiles.prediction import FlopShare, GraphWork, MemoryPhase, ProductWork, ProgramCost

ARENA_SLACK = 1.4
"""Ratio of onnxruntime's memory for activations to the live activations: pieces of different sizes leave gaps,
and kernels have their own buffers. 1.2 to 1.6 over the cases of `python -m bench profile`."""

GraphRuns = tuple[GraphCost, float]
"""A graph, and how often it runs."""


@dataclass(frozen=True)
class PricedProgram:
    """A Program with priced graphs. Costs that do not depend on the number of images are computed once."""

    program: Program
    options: Mapping[str, Any]  # of the method
    graphs: Mapping[str, GraphCost]  # of every graph of the Program
    cuts: Mapping[str, PricedCut] = field(default_factory=dict)  # by the name of a graph of the training
    own_kernels: bool = False  # the device has the optional kernels

    def cost(
        self,
        *,
        images: int,
        test_images: int,
        cache_bytes: int = IMAGE_CACHE_BYTES,
        feature_bytes: int | None = None,
    ) -> ProgramCost:
        """Return the cost for a device with these numbers of images, spread evenly over its classes.

        Decoded images may take `cache_bytes`, and features of layers that are not trained `feature_bytes`; None: it
        keeps none.
        """
        program = self.program
        kept = {} if feature_bytes is None else self._find_kept(images, feature_bytes)
        runs = self._list_runs(images, kept, is_first_round=True)
        later = self._list_runs(images, kept, is_first_round=False) if kept else None
        collected = {
            phase.collect: _count_collected(phase.collect, phase.epochs, images)
            for phase in program.train
            if phase.collect
        }
        # a device keeps its decoded images where all of them fit, or none
        kept_bytes, kept_test_bytes = (
            bytes_ if bytes_ <= cache_bytes else 0
            for bytes_ in (count * 3 * program.batch.image_size**2 for count in (images, test_images))
        )
        return msgspec.structs.replace(
            self._without_images,
            step_work=self._sum_step_work(runs, images),
            later_step_work=later and self._sum_step_work(later, images),
            steps=sum(program.steps_of(phase, images) for phase in program.train),
            images=images,
            test_images=test_images,
            flops_round=_sum_flops(runs),
            later_flops_round=later and _sum_flops(later),
            bytes_up=_upload_bytes(program, collected) if collected else self._without_images.bytes_up,
            memory=_add_images(self._without_images.memory, collected, kept_bytes, kept_test_bytes),
        )

    def _find_kept(self, images: int, feature_bytes: int) -> dict[str, PricedCut]:
        """Find the cuts of graphs, by name, whose features a device with room for them keeps."""
        return {
            phase.graph: cut
            for phase in self.program.train
            if (cut := self.cuts.get(phase.graph))
            and cut.part.is_worth_keeping(phase)
            and cut.has_room(images, feature_bytes)
        }

    def _list_runs(self, images: int, kept: Mapping[str, PricedCut], *, is_first_round: bool) -> list[GraphRuns]:
        """List the graphs of a round's training, and how often each runs."""
        listed: list[GraphRuns] = []
        for phase in self.program.train:
            runs = _count_runs_of_round(self.program, phase, images)
            if cut := kept.get(phase.graph):
                batches = -(-images // self.program.batch.batch_size)
                passes = max(1.0, self.program.steps_of(phase, images) / batches)
                features = cut.count_feature_runs(runs, passes, is_first_round=is_first_round)
                listed += ((cut.rest, runs), (cut.features, features))
            else:
                listed.append((self.graphs[phase.graph], runs))
        return listed

    def _sum_step_work(self, runs: Sequence[GraphRuns], images: int) -> GraphWork:
        """Sum the work of one optimizer step, averaged over the steps of all phases."""
        program = self.program
        steps = {phase: program.steps_of(phase, images) for phase in program.train}
        total = max(1, sum(steps.values()))
        work = _sum_work(*((self._run(graph).work, count / total) for graph, count in runs))
        for phase, count in steps.items():
            if phase.update:
                numbers = _count_trained_bytes(program, phase) // 4
                updating = self._running[phase.update].nodes
                pieces = -(-numbers // PIECE_ELEMENTS)
                moved_bytes = 4 * numbers * sum(node.vectors for node in updating)
                updated = work.moved_bytes | {"Add": work.moved_bytes.get("Add", 0.0) + moved_bytes * count / total}
                nodes = work.nodes + pieces * len(updating) * count / total
                work = GraphWork(products=work.products, moved_bytes=updated, nodes=nodes)
        return work

    def _run(self, cost: GraphCost) -> GraphCost:
        """Return the cost of a graph as the device runs it."""
        return (self.own_kernels and cost.with_kernels) or cost

    @cached_property
    def _running(self) -> Mapping[str, GraphCost]:
        return {name: self._run(cost) for name, cost in self.graphs.items()}

    @cached_property
    def with_kernels(self) -> Self:
        """The Program on a device with the optional kernels: less time and memory, the same FLOPs and bytes."""
        return replace(self, own_kernels=True)

    @cached_property
    def _without_images(self) -> ProgramCost:
        program, graphs = self.program, self.graphs
        shares = _list_flop_shares(graphs, {phase.graph: _count_runs(program, phase) for phase in program.train})
        trained = _select(program, lambda role: role.is_trained_on_device)
        fixed = _select(program, lambda role: not role.is_trained_on_device)
        down = [name for name, group in program.groups.items() if group.role.from_server_each_round]
        first = [name for name, group in program.groups.items() if group.initial]
        whole = sum(_download_bytes(program, group, whole=True) for group in down)
        bytes_down = count_download_bytes(program)
        once = whole - bytes_down + sum(cost.graph_bytes for cost in graphs.values()) + len(encode_program(program))
        once += sum(_size_packed(program, [group]) for group in first)
        return ProgramCost(
            method=program.method,
            model=program.model,
            options=dict(self.options),
            batch_size=program.batch.batch_size,
            run_size=program.batch.run_size,
            kept_patches=program.batch.kept_patches,
            mask_ratio=program.batch.mask_ratio,
            parameters_trained=_count_numbers(trained),
            parameters_frozen=_count_numbers(fixed),
            parameters_local=_count_numbers(_select(program, lambda role: role is Role.LOCAL)),
            flops_forward=sum(share.forward for share in shares),
            flops_backward=sum(share.backward for share in shares),
            flops=shares,
            flops_evaluate=graphs[program.evaluate.graph].flops // program.batch.answer_size,
            step_work=GraphWork(products=[], moved_bytes={}, nodes=0),
            answer_work=self._running[program.evaluate.graph].work,
            answer_size=program.batch.answer_size,
            steps=0,
            images=0,
            test_images=0,
            flops_round=0,
            bytes_once=once,
            bytes_down=bytes_down,
            bytes_up=_upload_bytes(program, {}),
            memory=_list_memory_without_images(program, self._running),
        )


# --- work ---------------------------------------------------------------------------------------------


def _count_runs_of_round(program: Program, phase: Train, images: int) -> int:
    """Count the runs of the phase's graph in a round; a short last batch has only runs with samples."""
    batch, steps = program.batch, program.steps_of(phase, images)
    if not phase.update:
        return steps
    batches = -(-images // batch.batch_size)
    short = steps // phase.repeats // batches  # batches that end a pass
    last = images - (batches - 1) * batch.batch_size
    whole = steps // phase.repeats - short
    return phase.repeats * (whole * _count_runs(program, phase) + short * -(-last // batch.run_size))


def _count_runs(program: Program, phase: Train) -> int:
    """Count the runs of the phase's graph in one step on a whole batch."""
    return -(-program.batch.batch_size // program.batch.run_size) if phase.update else 1


def _sum_flops(runs: Sequence[GraphRuns]) -> int:
    return round(sum(count * graph.flops for graph, count in runs))


PIECE_ELEMENTS = 1 << 17
"""Numbers in one run of an update (edge_client.work.steps)."""


def _sum_work(*parts: tuple[GraphWork, float]) -> GraphWork:
    """Sum the parts' work, each multiplied by its count."""
    products: dict[ProductWork, float] = defaultdict(float)  # by size, with a count of 1
    moved_bytes: dict[str, float] = defaultdict(float)
    for work, times in parts:
        for product in work.products:
            products[msgspec.structs.replace(product, count=1.0)] += times * product.count
        for op, size_bytes in work.moved_bytes.items():
            moved_bytes[op] += times * size_bytes
    return GraphWork(
        products=[msgspec.structs.replace(product, count=count) for product, count in products.items()],
        moved_bytes=dict(moved_bytes),
        nodes=sum(work.nodes * times for work, times in parts),
    )


def _list_flop_shares(graphs: Mapping[str, GraphCost], runs: Mapping[str, int]) -> list[FlopShare]:
    """Sum the FLOPs of one optimizer step, or of one step of each phase's graph."""
    return [
        FlopShare(block=block, kind=kind, forward=forward, backward=backward)
        for name, count in runs.items()
        for block, kind, forward, backward in flop_shares(graphs[name], count)
    ]


# --- bytes --------------------------------------------------------------------------------------------


def _select(program: Program, wanted: Callable[[Role], bool]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in program.tensors.items() if wanted(program.groups[spec.group].role)}


def _count_numbers(tensors: Mapping[str, TensorSpec]) -> int:
    return sum(prod(spec.shape) for spec in tensors.values())


def _size_bytes(tensors: Mapping[str, TensorSpec]) -> int:
    return sum(prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in tensors.values())


def _size_packed(program: Program, groups: list[str]) -> int:
    members = {name: (spec.shape, spec.dtype) for name, spec in program.tensors.items() if spec.group in groups}
    return compute_packed_bytes(members)


def _download_bytes(program: Program, group: str, *, whole: bool = False) -> int:
    """Return the bytes of a group for a device with the previous round's value; `whole`: without one."""
    coding = program.groups[group]
    shapes = {name: program.tensors[name].shape for name in program.names(group)}
    sizes = [_size_packed(program, [group])] if coding.whole == NONE else []
    sizes += [compute_packed_bytes(list_coded_forms(make_codec(coding.whole), shapes))] if coding.whole != NONE else []
    if coding.down != NONE and not whole:
        sizes.append(compute_packed_bytes(list_coded_forms(make_codec(coding.down), shapes)))
    return min(sizes)


def count_download_bytes(program: Program) -> int:
    """Count the bytes of the values that a device gets in each round."""
    groups = [name for name, group in program.groups.items() if group.role.from_server_each_round]
    return sum(_download_bytes(program, group) for group in groups)


def _count_collected(collect: Collect, epochs: int, images: int) -> int:
    """Count the uploaded features, if all classes have equally many images; an image has one in each epoch at most."""
    return int(images * min(epochs, collect.threshold))


def _upload_bytes(program: Program, collected: Mapping[Collect, int]) -> int:
    if program.secure:
        return 4 * program.count_summed()
    counts = {collect.output: count for collect, count in collected.items()} | {
        "labels": max(collected.values(), default=0)
    }
    expected: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, (shape, dtype) in program.upload_form().items():
        count = counts.get(name.partition("#")[0], 0)  # of what may be any number
        expected[name] = tuple(count if length is None else length for length in shape), dtype
    return compute_packed_bytes(expected) if expected else 0


# --- memory -------------------------------------------------------------------------------------------


def _list_memory_without_images(program: Program, graphs: Mapping[str, GraphCost]) -> list[MemoryPhase]:
    """Return the memory of each part of a round, without the software, decoded images and collected features."""
    batch = program.batch
    trained = _select(program, lambda role: role.is_trained_on_device)
    weights = _size_bytes(_select(program, lambda role: not role.is_trained_on_device))
    updated = max((_count_trained_bytes(program, phase) for phase in program.train), default=0)
    state = max((_state_bytes(program, phase) for phase in program.train), default=0)
    activations = int(ARENA_SLACK * max((graphs[phase.graph].activation_bytes for phase in program.train), default=0))
    answers = int(ARENA_SLACK * graphs[program.evaluate.graph].activation_bytes)
    image_bytes = 3 * batch.image_size**2
    patches = 4 * batch.patch_values
    # one batch is trained on, one waits, one is made; as pictures and as patches
    batches = 3 * batch.batch_size * batch.kept_patches * patches + batch.batch_size * image_bytes
    sent = _size_bytes(_select(program, lambda role: role.is_sent_back))
    if any(program.groups[group].up != NONE for group in program.groups):
        sent += _upload_bytes(program, {})  # the residuals of coding replace the changes, one by one
    mapped = weights + _size_bytes(trained)  # the files of trained tensors are read again to compute the changes
    return [
        MemoryPhase(
            phase="train",
            parts={
                "graphs": _graph_bytes(graphs[name] for name in program.graphs_for("train")),
                "weights": weights,
                "trained": state,
                "activations": activations,
                "images": batches,
                "features": 0,
            },
        ),
        MemoryPhase(
            phase="upload",
            parts={
                "graphs": _graph_bytes(graphs[name] for name in program.graphs_for("train")),
                "weights": mapped if sent else weights,
                "trained": updated + sent,
                "activations": activations,  # an arena does not shrink
                "images": 0,
                "features": 0,
            },
        ),
        MemoryPhase(
            phase="evaluate",
            parts={
                "graphs": _graph_bytes(graphs.values()),
                "weights": mapped,
                "activations": max(activations, answers),
                "images": batch.answer_size * (image_bytes + batch.patches * patches),
            },
        ),
    ]


def _add_images(
    memory: list[MemoryPhase], collected: Mapping[Collect, int], kept_bytes: int, kept_test_bytes: int
) -> list[MemoryPhase]:
    """Add decoded training and test images, and collected features."""
    features = sum(4 * count * prod(collect.shape) for collect, count in collected.items())
    added = {
        "train": {"images": kept_bytes, "features": features},
        "upload": {"images": kept_bytes, "features": 2 * features},
        "evaluate": {"images": kept_bytes + kept_test_bytes},
    }
    return [
        MemoryPhase(
            phase=phase.phase,
            parts={part: size_bytes + added[phase.phase].get(part, 0) for part, size_bytes in phase.parts.items()},
        )
        for phase in memory
    ]


def _count_trained_bytes(program: Program, phase: Train) -> int:
    return sum(_size_bytes({name: program.tensors[name] for name in program.names(group)}) for group in phase.groups)


def _state_bytes(program: Program, phase: Train) -> int:
    """Return the memory of values, gradients and slots; a whole step writes new values and slots."""
    updated, slots = _count_trained_bytes(program, phase), len(phase.slots)
    if not phase.update:
        return 2 * (1 + slots) * updated
    if phase.slot_bits == 32:
        return (2 + slots) * updated
    blocks = -(-updated // (4 * SLOT_BLOCK))
    return 2 * updated + slots * (blocks * (SLOT_BLOCK + 4) + 4 * PIECE_ELEMENTS)  # codes, scales, an unpacked piece


SLOT_BLOCK = 2048
"""Numbers of a slot of 8 bits with one scale (edge_client.work.packed_slots)."""


def _graph_bytes(graphs: Iterable[GraphCost]) -> int:
    """Return the memory of loaded graphs in onnxruntime: their nodes with plans."""
    return sum(LOADED_PER_NODE_BYTES * len(cost.nodes) for cost in graphs)


LOADED_PER_NODE_BYTES = 4_500
"""Measured over the cases of `python -m bench`."""
