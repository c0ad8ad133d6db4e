"""The content of `results.json`, which `fleet experiment` writes: the one declaration of an experiment's results.

It is here, below the fleet and the coordinator, since the experiment writes it and the dashboard reads it.
"""

from statistics import fmean
from typing import Any, Literal

from msgspec import Struct

from profiles.report.curves import Accuracy, RoundFigures

RESULTS_FILE = "results.json"

Values = dict[str, Any]
"""Some options of a method; in a search, the tuned ones."""


HeadFusion = Literal["mean", "max"]
"""One attention of a block's heads: their mean, or FedTP's, the largest without the lowest share."""


class EmbeddedDevice(Struct, frozen=True, kw_only=True):
    """A device's embedding on the plane of t-SNE, whose axes mean nothing."""

    device: str
    kind: str  # the device's domain, or the class of which it has most training images
    x: float
    y: float
    novel: bool = False  # it joined after the training


class AttentionPicture(Struct, frozen=True, kw_only=True):
    """A device's test image, and the share of its model's attention that each patch has by attention rollout."""

    device: str
    label: str
    png: bytes
    attention: list[list[float]]  # rows of patches from the top; all together 1


Attacker = Literal["encoder", "first values"]
"""Knowledge of an attacker: the blocks that a device keeps, or the values with which they begin."""


class AttackFigures(Struct, frozen=True, kw_only=True):
    """Success of an attacker on devices' features, by images under masks; an image's error is that of a linear
    attacker, as a share of the error of the mean image."""

    attacker: Attacker
    seen_once: float  # share of an image's patches that the features of one epoch show
    seen_ever: float  # of all epochs of a round
    error_once: float
    error_ever: float
    membership: float  # AUC of telling images of the device from others; 0.5: it cannot
    class_distance: float  # distance between the class distributions of the device and of its upload
    even_distance: float  # the same of equally many of each class, which say nothing but the classes


ATTACK_FIGURES = [name for name in AttackFigures.__struct_fields__ if name != "attacker"]


class FeatureAttack(AttackFigures, frozen=True, kw_only=True):
    """An attack on one device's features."""

    device: str
    picture: bytes  # PNG: rows of images, as they are, from one epoch, from all


class MeanAttack(AttackFigures, frozen=True, kw_only=True):
    """Figures of the attacks on a method's features, means over devices."""

    method: str
    partition: str


class CellResult(Struct, frozen=True, kw_only=True):
    """The result of a cell, which is one run of the grid."""

    digest: str  # of the cell
    software: str
    protocol: str | None  # how accuracy is measured
    accuracy: Accuracy  # after the last round
    accuracy_by_device: dict[str, float]
    bytes_down: float  # per device and round
    bytes_up: float
    flops: float | None  # of training, per device and round
    wall_s: float
    peak_rss_bytes: int | None  # of the process: coordinator and all devices
    refusals: int  # results that were refused or lost
    rounds: list[RoundFigures]
    epsilon: float | None = None  # of devices' updates, over all rounds; None: no noise
    feature_epsilon: float | None = None  # of one device's features, over all rounds
    generic_accuracy: float | None = None  # of the server's model, on images that no device has; None: there is none
    novel: Accuracy | None = None  # of devices that joined after the training; None: there are none
    novel_by_device: dict[str, float] = {}
    novel_rounds: list[float] = []  # mean accuracy of these devices after each round of theirs
    # difference between the tensors that a generator makes for devices, as a share of their size, in the last round
    generated_difference: float | None = None  # None: there is no generator
    # scores that weigh classes equally: means over devices; None: devices did not count their answers by class
    balanced_accuracy: float | None = None
    macro_f1: float | None = None
    balanced_by_device: dict[str, float] = {}
    macro_f1_by_device: dict[str, float] = {}
    auc: float | None = None  # mean over classes, then over devices
    auc_by_device: dict[str, float] = {}
    embeddings: list[EmbeddedDevice] = []  # if the experiment asks for pictures
    attention: list[AttentionPicture] = []
    attacks: list[FeatureAttack] = []  # if the experiment asks for them


class CellOutcome(Struct, frozen=True, kw_only=True):
    """A cell with its result, if it has one."""

    method: str  # as the file calls it
    partition: str
    seed: int
    result: CellResult | None  # None: not finished
    failure: str | None  # why, when it failed

    @property
    def name(self) -> str:
        return f"{self.method}/{self.partition}/seed-{self.seed}"

    @property
    def state(self) -> str:
        """Return the state of the cell in one word or two."""
        return "finished" if self.result else "failed" if self.failure else "not finished"


class Interval(Struct, frozen=True):
    """Student's t interval of a mean over seeds, not cut off at 0 and 1."""

    low: float
    high: float


class MethodComparison(Struct, frozen=True, kw_only=True):
    """One method on one partition, over the seeds that are finished; every figure is a mean over them."""

    method: str
    partition: str
    seeds: list[int]
    accuracy: float  # of the mean over devices, after the last round
    std_over_seeds: float | None  # of `accuracy`, sample standard deviation; None for a single seed
    std_over_devices: float  # within one run, population standard deviation
    accuracy_weighted: float  # over test images
    bytes_down: float  # per device and round, evaluation included
    bytes_up: float
    flops: float | None  # of training, per device and round
    wall_s: float
    peak_rss_bytes: int | None  # largest of all cells
    epsilon: float | None = None  # of devices' updates, over all rounds; largest of all cells
    feature_epsilon: float | None = None  # of one device's features; largest of all cells
    interval: Interval | None = None  # of `accuracy`; None for a single seed
    protocol: str | None = None  # how accuracy is measured
    late: float | None = None  # mean of the evaluations in the last `late_rounds` rounds
    late_std: float | None = None  # over these evaluations, population standard deviation, of each run
    rounds_to_target: float | None = None  # until an evaluation reached `target_accuracy`; None: not in every seed
    seconds_to_target: float | None = None  # training in these rounds, each of its slowest device; None: not measured
    generic: float | None = None  # accuracy of the server's model on images that no device has; None: there is none
    generic_interval: Interval | None = None
    novel: float | None = None  # accuracy of devices that joined after the training; None: there are none
    novel_interval: Interval | None = None
    novel_rounds: list[float] = []  # after each round of theirs
    generated_difference: float | None = None  # between devices' generated tensors; None: there is no generator
    generated_interval: Interval | None = None
    balanced_accuracy: float | None = None  # classes of a device weigh equally; None: not counted in every seed
    balanced_interval: Interval | None = None
    macro_f1: float | None = None
    macro_f1_interval: Interval | None = None
    auc: float | None = None
    auc_interval: Interval | None = None


class Difference(Struct, frozen=True, kw_only=True):
    """Difference in accuracy to the reference, on the same partition and the same seeds."""

    method: str
    reference: str
    partition: str
    seeds: list[int]  # finished of both
    mean: float  # over seeds, of the difference in accuracy
    interval: Interval


class Gain(Struct, frozen=True, kw_only=True):
    """A device's accuracy minus the reference's on the same device, partition and seed."""

    method: str
    partition: str
    seed: int
    device: str
    gain: float


class TriedValues(Struct, frozen=True, kw_only=True):
    """Values that a search tried, and their outcome."""

    values: Values
    rounds: int  # of the last rung in which they were compared; 0: not tried
    accuracy: float | None  # on validation images, mean over devices, then over seeds; None: not known, or unusable
    unusable: str | None  # why no device could train with these values


class SearchOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of the search for one method's values on one partition."""

    method: str
    partition: str
    tried: list[TriedValues]
    chosen: Values | None  # None: not known yet, or no values are usable
    over: bool
    at_edge: dict[str, str]  # options of which the lowest or highest value was chosen -> "lowest" or "highest"


class ExperimentOutcome(Struct, frozen=True, kw_only=True):
    """All results of an experiment."""

    schema: int
    experiment: str
    description: str
    protocols: list[str]  # how accuracy is measured; more than one when methods differ
    settings: dict[str, Any]  # the experiment's file, with defaults
    methods: dict[str, dict[str, Any]]  # name -> method, and all its options
    seeds: list[int]
    comparisons: list[MethodComparison]
    cells: list[CellOutcome]
    differences: list[Difference] = []
    gains: list[Gain] = []  # if the file names a reference
    searches: list[SearchOutcome] = []

    @property
    def partitions(self) -> list[str]:
        """All partitions, in the file's order."""
        return list(dict.fromkeys(cell.partition for cell in self.cells))

    @property
    def reference(self) -> str:
        """The method from which differences are measured."""
        named: str | None = self.settings.get("reference")
        return named or next(iter(self.methods), "-")

    @property
    def has_figures(self) -> bool:
        """True if a cell or a search has a result."""
        return bool(self.comparisons) or any(one.rounds for search in self.searches for one in search.tried)

    def comparison(self, method: str, partition: str) -> MethodComparison | None:
        """Return the comparison of a method on a partition, or None before a seed is finished."""
        pairs = (entry for entry in self.comparisons if (entry.method, entry.partition) == (method, partition))
        return next(pairs, None)

    def difference(self, method: str, partition: str) -> Difference | None:
        """Return the difference to the reference, or None for too few seeds."""
        pairs = (entry for entry in self.differences if (entry.method, entry.partition) == (method, partition))
        return next(pairs, None)

    def sort_gains(self, method: str, partition: str) -> list[float]:
        """Return the gains of every device of every seed, the lowest first."""
        return sorted(entry.gain for entry in self.gains if (entry.method, entry.partition) == (method, partition))

    def average_attacks(self) -> list[MeanAttack]:
        """Average each attacker's figures over the devices of a cell; only a method's first seed is attacked."""
        means = []
        for cell in self.cells:
            by_attacker: dict[Attacker, list[FeatureAttack]] = {}
            for attack in cell.result.attacks if cell.result else ():
                by_attacker.setdefault(attack.attacker, []).append(attack)
            for attacker, attacks in by_attacker.items():
                figures = {name: fmean(getattr(one, name) for one in attacks) for name in ATTACK_FIGURES}
                means.append(MeanAttack(method=cell.method, partition=cell.partition, attacker=attacker, **figures))
        return means

    def find_cells(self, method: str, partition: str) -> list[CellOutcome]:
        """Return the cells of a method on a partition, one for each seed."""
        return [cell for cell in self.cells if (cell.method, cell.partition) == (method, partition)]
