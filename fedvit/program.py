"""The contract between server and device: WHAT to compute, as data.

A Program names ONNX graphs, the tensors they read and write, the role of every group of tensors, and
the local work of a round as phases. The device's software does not depend on the method; it runs the Program.

Graph inputs and outputs are bound by name, so that graphs carry their own wiring:

    tensor/NAME       a tensor of the Program, read (input) or its new value (output `new/tensor/NAME`)
    slot/SLOT/NAME    optimizer state for tensor NAME, zero at the start of a phase (`new/slot/...`)
    grad/NAME         gradient of tensor NAME summed over the batch's samples so far (`new/grad/...`: with these)
    anchor/NAME       the tensor's value at the start of the round
    batch/patches     (B, tokens, patch values) float32: normalised, unfolded, kept patches only
    batch/kept        (B, tokens) int64: which patch of the image each row is
    batch/seeds       (B,) int64 random number of each sample, in [0, 2^31): what dropout drops of it
    batch/tokens      (B, context) int64: characters as indices into `Program.classes`; of text, instead of patches
    batch/labels      (B,) int64: index into `Program.classes`; others: `Batch.describe_label`, `fedvit.label_forms`
    batch/weight      (B,) float32: 1 for a sample, 0 for padding of the last batch
    batch/share       () float32: these samples' part of the whole batch's weight
    hyper/lr          () float32 learning rate;  hyper/step () float32, counts from 1 in a phase
    hyper/last        () float32: 1 in the last of a batch's repeats, else 0
    fact/class_counts (classes,) float32: the device's training images of each class
    draw/NAME         (count,) int64 random numbers, drawn once per task on the device
    gathered/NAME     (capacity, ...) float32: what an evaluation gathered from the device's training images,
                      with gathered/labels (capacity,) int64 and gathered/weight (capacity,), 0 where empty
    metric/loss       () float32 mean loss over the batch's samples (output)
    collect/NAME      (B, ...) what the phase may record per sample (output)
    logits            (B, classes) float32 (output of a predict graph); of text or patches (B, positions, classes)

A graph that updates works on any piece of the trained tensors, laid out as one vector:

    value, grad       (n,) float32 (`new/value`);  slot/SLOT (n,) (`new/slot/SLOT`);  hyper/lr, hyper/step as above

A new value, slot or summed gradient may be written to where the old one was read: nothing reads that afterwards.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from fedvit.errors import BadPayload
from fedvit.label_forms import LabelForm
from fedvit.program_versions import PROGRAM_VERSION, VERSIONS
from fedvit.roles import NONE
from fedvit.roles import Role as Role
from fedvit.updates import make_codec

SEEDS = 1 << 31
"""Random numbers of samples are below this."""
MAX_VALUES = 1 << 31
"""Numbers in one array that a device makes for a Program; its memory budget is the real limit."""
MAX_PROGRAM_BYTES = 4 << 20
"""The largest Program: names of 1,000 tensors are 100 kB, a list of classes is 1 MB at most."""
MAX_GROUPS = 256
"""Groups of one Program. With both limits, work that looks at all tensors for each group takes less than a second."""
MAX_TENSORS = 16_384
MAX_PHASES = 64
LABELS = "labels"
"""The tensor of an upload that names the class of every collected value."""

# A Program is validated when it is read, on devices, too, before memory is allocated for it.
Pixels = Annotated[int, Meta(ge=1, le=4096)]
Samples = Annotated[int, Meta(ge=1, le=65_536)]
Times = Annotated[int, Meta(ge=0, le=1_000_000)]
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(max_length=8)]
Rate = Annotated[float, Meta(ge=0.0, le=1e6)]
Norm = Annotated[float, Meta(gt=0.0, le=1e12)]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
Channel = Annotated[float, Meta(ge=-1e3, le=1e3)]
Deviation = Annotated[float, Meta(gt=0.0, le=1e3)]
DType = Annotated[str, Meta(pattern="^(bool|uint8|int8|int32|int64|float16|float32|float64)$")]


class TensorGroup(Struct, frozen=True):
    """A set of tensors with one role."""

    role: Role
    initial: str | None = None  # digest of the first value; only frozen and local groups have one
    up: str = NONE  # codec of the deltas that are sent back
    down: str = NONE  # codec of what changes from round to round, sent to devices that have the value before
    whole: str = NONE  # codec of the whole value, which every value that a device gets has been through


class TensorSpec(Struct, frozen=True):
    shape: Shape
    dtype: DType
    group: str


class GraphSpec(Struct, frozen=True):
    """One ONNX file. `flops` counts one run, 1 multiply-add = 2 FLOPs."""

    digest: str
    flops: Annotated[int, Meta(ge=0)]


class Text(Struct, frozen=True, kw_only=True):
    """Samples of text: the following character is predicted at every position."""

    context: Annotated[int, Meta(ge=1, le=65_536)]  # characters of a sample


class Batch(Struct, frozen=True, kw_only=True):
    """The form in which a device passes its images, or its text, to a graph."""

    batch_size: Samples  # samples of one optimizer step
    text: Text | None = None  # None: samples are images, as the fields below say
    image_size: Pixels = 1
    patch_size: Pixels = 1
    mean: tuple[Channel, Channel, Channel] = (0.0, 0.0, 0.0)
    std: tuple[Deviation, Deviation, Deviation] = (1.0, 1.0, 1.0)
    mask_ratio: Share = 0.0  # share of patches dropped per sample and step, training only; [0, 1)
    sample_seeds: bool = False  # training steps read a random number of each sample
    crop_padding: Annotated[int, Meta(ge=0, le=4096)] = 0  # random crop; so many pixels are reflected at each border
    flip: bool = False  # random left-right flip
    brightness: Share = 0.0  # random factor in [1 - brightness, 1 + brightness]
    views: Annotated[int, Meta(ge=1, le=64)] | UnsetType = UNSET  # fixed augmentations of an image; unset: new ones
    micro_batch: Samples | None = None  # samples of one run of a graph, from which its memory follows; None: batch_size
    labels: LabelForm | None = None  # None: one class for each sample, of text for each character

    def describe_label(self, classes: int) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of the label of one sample."""
        positions = (self.text.context,) if self.text else ()
        return self.labels.describe_label(classes, self.patches) if self.labels else (positions, "int64")

    @property
    def run_size(self) -> int:
        """Samples of one run of a graph that adds gradients up."""
        return self.micro_batch or self.batch_size

    @property
    def answer_size(self) -> int:
        """Samples of one run of a graph without gradients: at least two, so that their axis is recognisable."""
        return max(2, self.run_size)

    @property
    def tokens(self) -> int:
        """Number of patches or characters of a training sample."""
        return self.text.context if self.text else self.kept_patches

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_values(self) -> int:
        return 3 * self.patch_size**2

    @property
    def is_augmented(self) -> bool:
        return bool(self.crop_padding or self.flip or self.brightness)

    @property
    def kept_patches(self) -> int:
        return count_kept_patches(self.patches, self.mask_ratio)


class Collect(Struct, frozen=True):
    """Record one of the graph's `collect/` outputs for upload, of samples that a sampler chooses."""

    output: str
    shape: Shape  # of one sample's value, float32
    threshold: Rate = 1.0  # of the sampler: multiplies the median; > 0
    codec: str = NONE  # of the values, as they are uploaded
    clip: Norm | None = None  # each sample's value is scaled down to this norm before it is sent
    noise: Rate = 0.0  # with `clip`: std of the Gaussian noise that is added then, times `clip`
    rehearsal: bool = False  # deterministic noise from the run's seed: for experiments, without privacy
    sampler: Literal["median", "balanced"] = "median"  # of edge_client.work.sampler


class Draw(Struct, frozen=True, kw_only=True):
    """Whole numbers in [low, high), drawn with replacement once per task and phase: the input `draw/NAME`."""

    name: str
    low: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    high: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    count: Annotated[int, Meta(ge=0, le=10_000_000)]
    ascending: bool = False


class Train(Struct, frozen=True, tag="train", kw_only=True):
    """Train on the device's images in batches.

    With `update`, a batch is worked off `Batch.run_size` samples at a time: `graph` adds their gradients up, and
    `update` then moves the tensors. Without, `graph` makes the whole step on the whole batch.
    """

    graph: str
    update: str | None = None
    clip_norm: Annotated[float, Meta(gt=0.0)] | None = None  # with `update`: of the gradients of all tensors together
    groups: tuple[str, ...]  # the groups that this phase moves
    slots: tuple[str, ...] = ()  # optimizer state kept per trained tensor
    slot_bits: Literal[8, 32] = 32  # with `update`: of a number of that state
    epochs: Times = 1
    steps: Times | None = None  # batches after which the phase ends, whatever `epochs` says
    repeats: Times = 1  # runs of the graph on each batch
    lr: Rate
    anchors: tuple[str, ...] = ()  # groups whose start value is an input
    draws: tuple[Draw, ...] = ()
    collect: Collect | None = None


class Gather(Struct, frozen=True, kw_only=True):
    """Run a graph over the device's training images and store the outputs for up to `capacity` of them."""

    graph: str
    output: str  # of `collect/`; becomes the input `gathered/` of the same name
    shape: Shape  # of one sample's value, float32
    capacity: Annotated[int, Meta(ge=1, le=10_000_000)]  # of more images a random choice is taken


class Evaluate(Struct, frozen=True, tag="evaluate", kw_only=True):
    """Count right answers on the device's own test images, full images, no augmentation.

    `adapt` first trains a temporary copy, which is discarded.
    """

    graph: str
    adapt: Annotated[tuple[Train, ...], Meta(max_length=MAX_PHASES)] = ()
    gather: Gather | None = None
    kept: tuple[str, ...] = ()  # groups tested as the device itself last trained them, not as the server has them
    kept_of_this_round: bool = False  # only where the device trained them in the round that is being evaluated
    counts_classes: bool = True  # answers are also counted by class, which tells the device's class distribution
    counts_scores: bool = False  # with `counts_classes`, scores of answers are counted by class, too


class _Head(Struct, frozen=True):
    v: int | str | None = None


class Program(Struct, frozen=True, kw_only=True):
    """Everything a device needs to take part in a run; identified by the digest of its bytes."""

    v: int = PROGRAM_VERSION
    method: str
    model: str
    classes: tuple[str, ...]
    groups: Annotated[dict[str, TensorGroup], Meta(max_length=MAX_GROUPS)]
    tensors: Annotated[dict[str, TensorSpec], Meta(max_length=MAX_TENSORS)]
    graphs: Annotated[dict[str, GraphSpec], Meta(max_length=MAX_PHASES)]
    train: Annotated[tuple[Train, ...], Meta(max_length=MAX_PHASES)]
    evaluate: Evaluate
    batch: Batch
    clip_delta: float | None = None  # deltas are scaled down to this norm, all tensors together, before they are sent
    secure: bool = False  # results stay on the device until they are added up in secret (fedvit.secure)

    def names(self, group: str) -> list[str]:
        """The group's tensor names in their fixed order."""
        return [name for name, spec in self.tensors.items() if spec.group == group]

    def digests_by_graph(self) -> dict[str, str]:
        """Digests of the graphs, by name, in the order of the names."""
        return {name: self.graphs[name].digest for name in sorted(self.graphs)}

    def with_role(self, *roles: Role) -> list[str]:
        """Names of the groups that have one of `roles`."""
        return [name for name, group in self.groups.items() if group.role in roles]

    def list_fetched_once(self) -> list[str]:
        """Digests of what a device fetches once: graphs, and first values of local and frozen groups."""
        first = [group.initial for group in self.groups.values() if group.initial]
        return [graph.digest for graph in self.graphs.values()] + first

    def common_groups(self) -> list[str]:
        """Names of the groups that the server sends each round, the same to all devices."""
        return self.with_role(*(role for role in Role if role.from_server_each_round and not role.is_made_for_device))

    def own_groups(self) -> list[str]:
        """Names of the groups that the server makes for each device."""
        return self.with_role(*(role for role in Role if role.is_made_for_device))

    def steps_of(self, phase: Train, images: int) -> int:
        """Steps of a phase on a device with this number of training images, if all of them can be read."""
        steps = phase.epochs * -(-images // self.batch.batch_size)
        return phase.repeats * (steps if phase.steps is None else min(phase.steps, steps))

    def graphs_for(self, kind: Literal["train", "evaluate", "compare"]) -> list[str]:
        """Names of the graphs that a task of this kind runs: one that compares runs those of an evaluation."""
        evaluate = self.evaluate
        phases = self.train if kind == "train" else evaluate.adapt
        names = [name for phase in phases for name in (phase.graph, phase.update) if name]
        if kind != "train":
            names += [evaluate.graph, *([evaluate.gather.graph] if evaluate.gather else [])]
        return list(dict.fromkeys(names))

    def upload_form(self) -> dict[str, tuple[tuple[int | None, ...], str]]:
        """Return the coded form of a training result: deltas of the groups that are sent back, and what was collected.

        Collected values have a first axis of any length; `labels` are theirs. Nothing is sent if `secure`.
        """
        if self.secure:
            return {}
        expected: dict[str, tuple[tuple[int | None, ...], str]] = {}
        for group in self.with_role(*(role for role in Role if role.is_sent_back)):
            codec = make_codec(self.groups[group].up)
            for name in self.names(group):
                expected |= codec.form(name, self.tensors[name].shape)
        for phase in self.train:
            if phase.collect:
                collect = phase.collect
                expected |= make_codec(collect.codec).form(collect.output, (None, *collect.shape))
                shape, dtype = self.batch.describe_label(len(self.classes))
                expected[LABELS] = ((None, *shape), dtype)
        return expected

    def list_summed(self) -> list[str]:
        """Return the tensors whose deltas are added up in secret, in order; empty unless `secure`."""
        return [name for group in self.with_role(Role.SHARED) for name in self.names(group)] if self.secure else []

    @property
    def is_sum_coded(self) -> bool:
        """Return whether sums of updates have a codec, for which devices measure their largest numbers."""
        return self.secure and any(self.groups[group].up != NONE for group in self.with_role(Role.SHARED))

    def count_summed(self) -> int:
        """Count the numbers of the tensors whose deltas are added up in secret."""
        return sum(math.prod(self.tensors[name].shape) for name in self.list_summed())

    def forms_of(self, groups: list[str]) -> dict[str, tuple[tuple[int | None, ...], str]]:
        """(shape, dtype) of every tensor in `groups`, as `check_tensors` wants it."""
        return {name: (spec.shape, spec.dtype) for name, spec in self.tensors.items() if spec.group in groups}


def encode_program(program: Program) -> bytes:
    return msgspec.msgpack.encode(program, order="deterministic")


def decode_program(raw: bytes) -> Program:
    """Raises BadPayload when the bytes are no Program, of a version that this software does not know, or absurd."""
    if len(raw) > MAX_PROGRAM_BYTES:
        raise BadPayload("FV2307", f"a program of {len(raw)} bytes exceeds the limit of {MAX_PROGRAM_BYTES} bytes")
    try:
        version = msgspec.msgpack.decode(raw, type=_Head).v  # untyped, a few megabytes would become a gigabyte
        if version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise BadPayload("FV1513", f"program version {version!r}, this software knows versions {known}")
        program = msgspec.msgpack.decode(raw, type=Program)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # msgspec lets the latter two through
        raise BadPayload("FV2307", f"not a program: {error}") from error
    if trouble := next(_nonsense(program), None):
        raise BadPayload("FV2307", f"not a program: {trouble}")
    return program


def _nonsense(program: Program) -> Iterator[str]:
    """Impossible sizes and unknown names in a Program; None if there are none."""
    batch = program.batch
    if batch.image_size % batch.patch_size:
        yield f"patches of {batch.patch_size} pixels do not tile an image of {batch.image_size}"
    if batch.crop_padding >= batch.image_size:
        yield f"{batch.crop_padding} pixels cannot be reflected at the border of an image of {batch.image_size}"
    sizes: dict[str, tuple[int, ...]] = {"a batch": (batch.batch_size, 3, batch.image_size, batch.image_size)}
    sizes["a batch of text"] = (batch.batch_size, batch.text.context if batch.text else 0)
    if form := batch.labels:
        sizes["labels of a batch"] = (batch.batch_size, len(program.classes), batch.patches)
        if batch.text or program.secure or program.evaluate.gather:
            yield f"text, secure sums and gathered features need one class for each sample, the task is {form.task}"
        changed = batch.mask_ratio or batch.crop_padding or batch.flip or any(phase.collect for phase in program.train)
        if form.labels_patches and changed:
            yield "labels of patches, and patches that are left out, cropped, mirrored or collected"
        if form.task == "regression" and not (form.low < form.high and len(program.classes) == 1):
            yield f"a regression of {len(program.classes)} numbers from {form.low:g} to {form.high:g}"
    for name, spec in program.tensors.items():
        sizes[f"tensor {name!r}"] = spec.shape
        if spec.group not in program.groups:
            yield f"tensor {name!r} is in group {spec.group!r}, which does not exist"
    phases = (*program.train, *program.evaluate.adapt)
    for phase in phases:
        if unknown := sorted({*phase.groups, *phase.anchors} - program.groups.keys()):
            yield f"a phase names group {unknown[0]!r}, which does not exist"
        if phase.collect:
            sizes[f"what is collected as {phase.collect.output!r}"] = phase.collect.shape
        for draw in phase.draws:
            if draw.low >= draw.high:
                yield f"{draw.name!r} is to be drawn from {draw.low} to {draw.high - 1}"
    if gather := program.evaluate.gather:
        sizes[f"what is gathered of {gather.output!r}"] = (gather.capacity, *gather.shape)
    for what, shape in sizes.items():
        if math.prod(shape) > MAX_VALUES:
            yield f"{what} of shape {shape} has more than {MAX_VALUES} values"
    graphs = {*program.graphs_for("train"), *program.graphs_for("evaluate")}
    if unknown := sorted(graphs - program.graphs.keys()):
        yield f"graph {unknown[0]!r} does not exist"


def count_kept_patches(patches: int, mask_ratio: float) -> int:
    """Count the patches that survive masking: floor(patches * (1 - ratio)), at least 1.

    Rounded in a way that floating-point error cannot lower (1 - 0.9 is not 0.1 in binary).

    >>> [count_kept_patches(196, ratio) for ratio in (0, 0.25, 0.5, 0.75, 0.95)]
    [196, 147, 98, 49, 9]
    >>> count_kept_patches(100, 0.9)
    10
    """
    return max(1, int(patches * (1.0 - mask_ratio) + 1e-6))
