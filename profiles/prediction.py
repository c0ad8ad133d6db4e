"""The types of predicted costs in profiles, plans and reports. Units are in the names.

Conventions: 1 multiply-add = 2 FLOPs; only matrix products count (as torch's FlopCounterMode); bytes are those of
packed tensors as they travel, without MQTT framing and control messages; memory is resident memory of the process.
"""

from typing import Any, Literal

from msgspec import Struct, field

from fedvit.resources import Budget, BudgetKind, ProductKind

FLOP_CONVENTION = "2 FLOPs per multiply-add; matrix products only, forward and backward as in the graph that runs"


class FlopShare(Struct, frozen=True, kw_only=True):
    """FLOPs of one optimizer step in one block of the model, of one kind of work."""

    block: str  # "embedding", "block 0", ..., "head", or the tensor's own name for other tensors
    kind: str  # "attention", "mlp", "projection", ... ; the part of the block
    forward: int
    backward: int
    trained: bool | None = None  # whether the device trains any tensor of it; None: not said


class MemoryPhase(Struct, frozen=True, kw_only=True):
    """Resident memory at its highest in one part of a round."""

    phase: Literal["train", "upload", "evaluate"]
    parts: dict[str, int]  # "software", "weights", "trained", "activations", "images", ... -> bytes

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


class ProductWork(Struct, frozen=True, array_like=True):
    """A number of equal matrix products, which may be a fraction."""

    kind: ProductKind
    batch: int
    rows: int
    inner: int
    columns: int
    count: float


class GraphWork(Struct, frozen=True, kw_only=True):
    """The work of a processor, in terms of a `Speed`."""

    products: list[ProductWork]
    moved_bytes: dict[str, float]  # read and written by operators that are no products, by ONNX name
    nodes: float


class ProgramCost(Struct, frozen=True, kw_only=True):
    """The cost of a Program that does not depend on the device."""

    method: str
    model: str
    options: dict[str, Any]  # of the method
    batch_size: int  # samples of one optimizer step
    run_size: int  # samples of one run of the graph
    kept_patches: int  # of one image in training
    mask_ratio: float
    parameters_trained: int
    parameters_frozen: int
    parameters_local: int  # of the trained ones those that never leave the device
    flops_forward: int  # of one optimizer step
    flops_backward: int
    flops: list[FlopShare]
    flops_evaluate: int  # of one image
    step_work: GraphWork  # of one optimizer step
    answer_work: GraphWork  # of one run of the graph that answers
    answer_size: int  # images of such a run
    steps: int  # of a round
    images: int  # that the device trains with
    test_images: int
    flops_round: int  # of a round's training; of the first one, where features are kept
    bytes_once: int  # graphs, Program and first values: fetched once; and what the first round's tensors take more
    bytes_down: int  # tensors that the server sends each round, to a device that has those of the round before
    bytes_up: int  # the result of a round; of what is collected, as much as from equally large classes
    memory: list[MemoryPhase]  # beside the software itself, which is the device's
    # of later rounds, where features are kept; None: they cost the same
    later_step_work: GraphWork | None = None
    later_flops_round: int | None = None

    @property
    def flops_step(self) -> int:
        return self.flops_forward + self.flops_backward


class Prediction(Struct, frozen=True, kw_only=True):
    """The predicted cost of one Program on one device, for one round. Seconds and joules are None without a speed."""

    device: str
    source: Literal["measured", "catalogue"] | None  # where the device's speed is from
    mode: str | None  # power mode of the catalogue
    step_s: float | None
    train_s: float | None  # a round's training, without transfers
    evaluate_s: float | None  # of the device's test images
    bound: Literal["products", "memory", "overhead"] | None  # the largest part of a step
    memory: list[MemoryPhase]
    peak_rss_bytes: int
    energy_j: float | None  # of a round's training; None where the device's power is not known
    power_w: float | None
    over: tuple[BudgetKind, ...]  # exceeded budgets; empty: it fits
    load_per_core: float | None = None  # of other processes while the device's speed was measured
    later_train_s: float | None = None  # training of a later round, where features are kept; None: the same

    @property
    def usual_train_s(self) -> float | None:
        """Training of a round after the first."""
        return self.train_s if self.later_train_s is None else self.later_train_s


class Expected(Struct, frozen=True, kw_only=True):
    """The expected cost of a device's task, and its budget."""

    prediction: Prediction
    flops: int  # of the round's training
    bytes_down: int
    bytes_up: int
    budget: Budget = Budget()
    changes: dict[str, Any] = {}  # options that were changed for the device's budget
    quality: float = field(default=1.0, name="kept")  # estimated share of the accuracy that these leave
    later_flops: int | None = None  # of a later round's training, where features are kept; None: the same

    @property
    def usual_flops(self) -> int:
        """FLOPs of a round's training after the first."""
        return self.flops if self.later_flops is None else self.later_flops
