"""The data of a report, from which its tables, page and JSON are made.

A field is never renamed or given another meaning; new fields have defaults. `schema` counts the changes that an old
reader would misunderstand. A missing measurement is None.
"""

from statistics import median
from typing import Any, Literal

import msgspec
from msgspec import Struct

from fedvit.errors import BadPayload
from fedvit.resources import Budget, BudgetKind, ResourceUse
from profiles.prediction import FLOP_CONVENTION, Expected, Prediction, ProgramCost

SCHEMA = 1


class Comparison(Struct, frozen=True, kw_only=True):
    """A predicted and a measured figure."""

    figure: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def relative_error(self) -> float | None:
        """(predicted - measured) / measured; above 0: predicted too much.

        >>> Comparison(figure="step", unit="s", predicted=3.0, measured=2.0).relative_error
        0.5
        """
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


class PublishedFigure(Struct, frozen=True, kw_only=True):
    """A figure of a paper beside ours."""

    figure: str
    unit: str
    published: float
    reproduced: float | None  # by the paper's own way of counting
    ours: float | None  # of the Program and its graphs
    convention: str  # how the paper counted
    source: str


# --- before a run: what Programs will cost -------------------------------------------------------------


class ProfiledVariant(Struct, frozen=True, kw_only=True):
    """One Program; `label` tells it from the others, such as "mask 0.75, M=2"."""

    label: str
    cost: ProgramCost


class ProfiledDevice(Struct, frozen=True, kw_only=True):
    """The predicted cost of every variant on one device."""

    id: str
    name: str
    source: Literal["measured", "catalogue"]
    mode: str | None
    budget: Budget
    predictions: list[Prediction]  # in the order of the variants
    warnings: list[str] = []


class CrossCheck(Struct, frozen=True, kw_only=True):
    """Another counter's figure for one image's answer, beside ours; multiply-adds."""

    tool: str
    convention: str
    macs: int  # all that the tool counts
    product_macs: int  # of these matrix products
    ours_macs: int  # matrix products of the graph that answers on a device
    not_counted: list[str]  # operators that the tool does not know


class ProfileDocument(Struct, frozen=True, kw_only=True, tag_field="kind", tag="profile"):
    """Variants of a method on devices."""

    title: str
    created_at: str  # ISO 8601, UTC
    software: str  # name and version
    images: int  # training images of one device
    test_images: int | None
    variants: list[ProfiledVariant]
    devices: list[ProfiledDevice]
    published: list[PublishedFigure] = []
    measured: list[Comparison] = []
    crosscheck: CrossCheck | None = None
    warnings: list[str] = []
    convention: str = FLOP_CONVENTION
    schema: int = SCHEMA

    @property
    def fitting(self) -> int:
        """Pairs of a variant and a device that break no budget."""
        return sum(not prediction.over for device in self.devices for prediction in device.predictions)


# --- after a run: what it cost -------------------------------------------------------------------------


class DeviceRound(Struct, frozen=True, kw_only=True):
    """One device in one round of its cohort."""

    round: int
    status: Literal["accepted", "refused", "dropped out"]
    expected: Expected | None
    measured: ResourceUse | None  # of its training
    accuracy: float | None  # of an evaluation after the round
    reason: str | None = None  # why its result is missing


class RunDevice(Struct, frozen=True, kw_only=True):
    """One device over a run."""

    device: str
    train_samples: int
    test_samples: int
    accuracy: float | None  # of its last evaluation
    rounds: list[DeviceRound]
    bytes_down: int  # of the whole run, evaluations included
    bytes_up: int
    peak_rss_bytes: int | None

    @property
    def budget(self) -> Budget | None:
        """The newest; None where the run kept none."""
        return next((entry.expected.budget for entry in reversed(self.rounds) if entry.expected), None)

    @property
    def given(self) -> str:
        """Options that were changed in the last round for the device's budget; "" without changes."""
        newest = next((entry.expected for entry in reversed(self.rounds) if entry.expected), None)
        return ", ".join(f"{name} = {value}" for name, value in newest.changes.items()) if newest else ""

    @property
    def broken(self) -> dict[BudgetKind, int]:
        """Budgets that tasks exceeded, and in how many rounds."""
        kinds = [kind for entry in self.rounds if entry.measured for kind in entry.measured.broke]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def rounds_that_were(self, status: str) -> int:
        return sum(entry.status == status for entry in self.rounds)

    def comparisons(self) -> list[Comparison]:
        """Medians over rounds of what was predicted and of what was measured, for figures that somebody knows."""
        expected = [entry.expected for entry in self.rounds if entry.expected]
        measured = [entry.measured for entry in self.rounds if entry.measured]
        pairs: list[tuple[str, str, list[float | None], list[float | None]]] = [
            ("step", "s", [e.prediction.step_s for e in expected], [m.step_s for m in measured]),
            ("training of a round", "s", [e.prediction.train_s for e in expected], [m.train_s for m in measured]),
            (
                "peak memory", "bytes",
                [e.prediction.peak_rss_bytes for e in expected], [m.peak_rss_bytes for m in measured],
            ),
            ("FLOPs of a round", "FLOP", [e.flops for e in expected], [m.flops for m in measured]),
            ("sent down", "bytes", [e.bytes_down for e in expected], [m.fetched_bytes for m in measured]),
            ("sent up", "bytes", [e.bytes_up for e in expected], [m.upload_bytes for m in measured]),
            ("energy of a round", "J", [e.prediction.energy_j for e in expected], [m.energy_j for m in measured]),
        ]  # fmt: skip
        found = [
            Comparison(figure=figure, unit=unit, predicted=_median(before), measured=_median(after))
            for figure, unit, before, after in pairs
        ]
        return [entry for entry in found if entry.predicted is not None or entry.measured is not None]


class AttentionEntropy(Struct, frozen=True, kw_only=True):
    """Entropy of a generator's attention weights, as a share of the logarithm of the keys: 0 for one key alone."""

    mean: float  # over devices
    lowest: float
    highest: float


class GeneratorRound(Struct, frozen=True, kw_only=True):
    """State of a method's generator at the start of a round, over the devices whose updates it learns from."""

    difference: float  # root mean square over pairs of devices, as a share of the size of generated values
    attention: AttentionEntropy | None = None  # None: the generator has no attention


class FeatureRound(Struct, frozen=True, kw_only=True):
    """Features that devices sent in a round, for a server that trains on them."""

    uploads: int
    features: int  # of all these uploads
    unequal: int  # uploads with more features of one class than of another, which tell the device's class distribution


class RunRound(Struct, frozen=True, kw_only=True):
    """One round of all devices; accuracies are None where it was not evaluated."""

    round: int
    cohort: int
    accepted: int
    accuracy_mean: float | None  # over devices, unweighted
    accuracy_lowest: float | None
    accuracy_highest: float | None
    accuracy_weighted: float | None  # over test images
    train_loss: float | None
    bytes_down: int
    bytes_up: int
    devices_s: float | None  # from the first task to the last result, while a coordinator served the run
    server_s: float | None
    accuracy_std: float | None = None  # over devices, population
    # differential privacy, for the run's delta; None where there is none
    epsilon: float | None = None  # of devices' updates, over all rounds up to this one
    row_epsilon: float | None = None  # of one row of features in one upload
    upload_epsilon: float | None = None  # of all rows of the round's largest upload
    device_epsilon: float | None = None  # of all features of one device, over all rounds up to this one
    generator: GeneratorRound | None = None  # None: the method has no generator, or one device took part
    features: FeatureRound | None = None  # None: devices send no features


class ClassAccuracy(Struct, frozen=True, kw_only=True):
    """The answers of all devices of one evaluation for the test images of one class."""

    name: str
    devices: int  # with test images of it
    images: int
    correct: int
    wrong: dict[str, int] = {}  # by the class that was answered, the most frequent first; empty: not counted, or none

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


class RunPrivacy(Struct, frozen=True, kw_only=True):
    """The noise of a run, as in its table [privacy]; 0: none of that kind."""

    delta: float = 1e-5
    noise_multiplier: float = 0.0
    clip: float | None = None
    accounting: str = "every_round"
    feature_noise: float = 0.0
    feature_clip: float | None = None
    deterministic_noise: bool = False  # the noise follows from the seed: it protects nobody


class Refusal(Struct, frozen=True, kw_only=True):
    """A refused message; equal ones are counted."""

    round: int | None
    device: str
    kind: str
    reason: str
    times: int


class RunDocument(Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """A run, finished or not."""

    run: str
    created_at: str  # of this document: ISO 8601, UTC
    started_at: str
    software: str
    status: str
    reason: str | None
    method: str
    model: str
    seed: int
    rounds_planned: int
    protocol: str | None  # how accuracy is measured
    rounds: list[RunRound]
    devices: list[RunDevice]
    refusals: list[Refusal]
    dropouts: list[Refusal]  # tasks without a result
    privacy: RunPrivacy | None = None  # None: the run asked for no noise
    settings: dict[str, Any] = {}  # of the run's configuration that differ from the defaults, as "privacy.clip"
    duration_s: float | None = None  # from the first round's begin to the end of the newest closed one
    classes: list[ClassAccuracy] = []  # of the newest evaluation; empty: no device counted them
    warnings: list[str] = []
    convention: str = FLOP_CONVENTION
    schema: int = SCHEMA

    @property
    def mean_accuracy(self) -> float | None:
        return next((entry.accuracy_mean for entry in reversed(self.rounds) if entry.accuracy_mean is not None), None)


Document = ProfileDocument | RunDocument


def encode(document: Document) -> bytes:
    """JSON for a file or a pipe, indented."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode(content: bytes) -> Document:
    """Raises BadPayload when the content is no document, or of a newer schema."""
    try:
        document: Document = msgspec.json.decode(content, type=ProfileDocument | RunDocument)
    except msgspec.MsgspecError as error:
        raise BadPayload(f"this is no report: {error}") from error
    if document.schema > SCHEMA:
        raise BadPayload(f"this report has schema {document.schema}, known is up to {SCHEMA}: update fedvit")
    return document


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
