"""The tables of the record. Each kind of row is a class; its table has a column for every field.

A field's type decides its column: text, whole numbers and truth values are stored as such, everything else as JSON. A
column may be empty where the field may be None, and where it is JSON with a default.
"""

import json
import math
import typing
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from sqlalchemy import JSON, Boolean, Column, ForeignKeyConstraint, Index, Integer, MetaData, String, Table, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from fedvit.blobs import BlobStore
from fedvit.comparison import Comparison
from fedvit.resources import BudgetKind, ResourceUse
from fedvit.roles import NONE
from fedvit.secure import SUM as SUM
from fedvit.wire.messages import ClassCount, DeltaStep, ModelState, TaskKind, WantedState
from profiles.prediction import Expected

SCHEMA = "0004"
"""Version of the newest migration in `coordinator.record.migrations`."""

SEAL = "seal"
"""Column of every table that tensors depend on: a digest of the row's other columns, since SQLite has no checksums."""

TABLES = MetaData()


_ENCODER = msgspec.json.Encoder()


def to_json(value: Any) -> str:
    """Encode JSON that `json.loads` can read, in a fraction of the time of `json.dumps`."""
    text = _ENCODER.encode(value)
    if b"null" in text and not _is_finite(value):
        return json.dumps(value)
    return text.decode()


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in a value are finite."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif isinstance(item, dict | list | tuple) and not _is_finite(item):
            return False
    return True


def from_json(text: str) -> Any:
    """Decode like `json.loads`, in a fraction of the time."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # numbers that are not finite
        return json.loads(text)


class _JsonText(TypeDecorator[Any]):
    """JSON as text: PostgreSQL's own type refuses numbers that are not finite."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else to_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else from_json(value)


_JSON = JSON(none_as_null=True).with_variant(_JsonText(), "postgresql")


class Link(Struct, frozen=True):
    """One delta of a chain, as digests; see `DeltaStep`."""

    target: str
    base: str  # empty: the patch is a whole value
    patch: str


class Reference(Struct, frozen=True):
    """The values of one group on devices, and the delta chain that leads to them from older values."""

    digest: str
    whole: str = NONE  # codec that was applied to every reference
    links: tuple[Link, ...] = ()  # the oldest first

    def blobs(self) -> set[str]:
        return {self.digest, *(link.patch for link in self.links)}

    def delta_chain(self, blobs: BlobStore) -> tuple[DeltaStep, ...]:
        """The delta chain for devices that lack the value. Raises BadPayload if a patch is not in `blobs`."""
        return tuple(DeltaStep(link.target, link.base, blobs.manifest(link.patch), self.whole) for link in self.links)


class SavedState(Struct, frozen=True):
    """A `ServerState` as digests."""

    groups: dict[str, str]  # group -> digest of the blob that devices fetch, unless there is a reference
    memory: str | None
    uploads: dict[str, str]
    references: dict[str, Reference] = {}  # of groups that are sent coded

    def find_sent_digest(self, group: str) -> str:
        """The digest that devices use."""
        return self.references[group].digest if group in self.references else self.groups[group]


class RoundTotals(Struct, frozen=True, kw_only=True):
    """The part of a round that is kept when details are thinned; accuracies are None if it was not evaluated."""

    cohort: int  # devices that were asked
    accepted: int = 0
    accuracy_mean: float | None = None  # over devices, unweighted
    accuracy_std: float | None = None  # over devices, population
    accuracy_weighted: float | None = None  # over test images
    accuracy_lowest: float | None = None
    accuracy_highest: float | None = None
    scores: dict[str, float] = {}  # other scores of all test images together, by the names of fedvit.answer_scores
    train_loss: float | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    flops: int = 0  # of training alone
    train_s: float | None = None  # of the device that trained longest; None: not measured
    energy_j: float | None = None  # sum over the devices that measured it


class Asked(NamedTuple):
    """When and how often a device was asked."""

    last: int  # newest round, 0: never
    times: int


class Announced(NamedTuple):
    """The parts of a device's hello that the record keeps."""

    software: str
    denies: tuple[str, ...] = ()


class DeviceTotals(Struct, frozen=True, kw_only=True):
    """The part of a device that is kept when details are thinned. None: not measured."""

    results: int = 0
    rounds: int = 0  # trained and accepted
    train_samples: int = 0
    test_samples: int = 0
    accuracy: float | None = None  # in its last evaluation
    bytes_down: int = 0
    bytes_up: int = 0
    step_s: float = 0.0  # sum over the rounds that measured it
    step_rounds: int = 0
    peak_rss_bytes: int | None = None
    flops: int = 0  # sum over the rounds that counted them
    flops_rounds: int = 0
    budget_kept: int = 0  # tasks that ended within the device's budgets
    budget_broken: int = 0  # tasks that did not, whether the device stopped them or not
    broke: dict[BudgetKind, int] = {}  # how often each budget was broken
    energy_j: float | None = None  # sum over the rounds that measured it
    temperature_c: float | None = None  # highest of its last training
    throttled: bool | None = None  # in its last training
    battery_percent: int | None = None  # at the end of its newest task
    charging: bool | None = None


RunStatus = Literal["queued", "waiting", "running", "interrupted", "finished", "failed", "cancelled"]
ENDED: tuple[RunStatus, ...] = ("finished", "cancelled")
"""A run with one of these has ended, and is not resumed."""


class RunRecord(Struct, frozen=True):
    id: str
    created_at: str  # ISO 8601, UTC
    status: RunStatus
    config: dict[str, Any]
    classes: tuple[str, ...] = ()
    program: str | None = None  # digest
    protocol: str | None = None  # how accuracy is measured
    reason: str | None = None  # why it failed
    corrections: dict[str, dict[BudgetKind, float]] = {}  # by device: factors by which predictions were too low
    thinned: int | None = None  # earlier rounds only have totals
    broker: dict[str, Any] = {}  # the table [broker] of its last process
    submitted_at: str | None = None  # ISO 8601, UTC; None: begun by `start`, not for a service
    cancelled_at: str | None = None  # ISO 8601, UTC: the operator requested its end
    paused_at: str | None = None  # ISO 8601, UTC: the operator paused it; None: it is not paused
    priority: int | None = None  # in the queue: higher ones begin first; None: 0
    starts_at: str | None = None  # ISO 8601, UTC: it waits in the queue until then; None: it need not

    def is_due(self) -> bool:
        """Return whether a queued run may begin now; another one has begun."""
        return self.status != "queued" or self.starts_at is None or self.starts_at <= now()


class RoundRecord(Struct, frozen=True):
    run: str
    round: int
    cohort: list[str]  # empty where details were thinned
    opened_at: str
    closed_at: str | None = None
    evaluated: bool = False
    state: SavedState | None = None  # of the server after the round
    figures: dict[str, float] = {}
    needed: int | None = None  # results that close it at once
    totals: RoundTotals | None = None  # None until it is closed
    accuracy: dict[str, float] | None = None  # by device; None where it was not evaluated, or details were thinned


class TaskRecord(Struct, frozen=True):
    """A training task. Evaluations are not recorded: they are repeated after a restart."""

    round: int
    device: str
    program: str  # digest
    groups: dict[str, str]  # group -> digest; empty once it is answered
    expected: Expected | None = None  # predicted cost
    attempt: int = 1  # number of the current attempt


class TaskTimes(NamedTuple):
    """Times at which a training task changed its state, by the coordinator's clock (ISO 8601, UTC); None: it did not.

    They are stored when the task ends."""

    fetching_at: str | None = None  # the device requested its first blob
    working_at: str | None = None  # it reported its first step
    arrived_at: str | None = None  # its result arrived, before the upload was fetched
    ended_at: str | None = None
    left_at: str | None = None  # its device went offline; the newest time
    returned_at: str | None = None  # it was online again; None: not since it left


ANNOUNCED = "announced"
"""Metric of a device's result whose numbers are in a secure sum: its images, by its hello."""


class ResultRecord(Struct, frozen=True):
    run: str
    round: int
    device: str
    kind: TaskKind
    samples: int
    metrics: dict[str, float]
    use: ResourceUse
    upload: str | None  # digest
    used_in: int  # the round whose server step uses it
    by_class: tuple[ClassCount, ...] = ()  # of an evaluation; empty: not counted


def now() -> str:
    """Return the time as the record writes it (ISO 8601, UTC)."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RefusalRecord(Struct, frozen=True):
    round: int | None
    device: str
    kind: str
    reason: str
    at: str = msgspec.field(default_factory=now)  # ISO 8601, UTC
    broke: BudgetKind | None = None  # the budget that was exceeded
    lost: bool = False  # nothing arrived


class StrikeRecord(Struct, frozen=True):
    round: int
    device: str
    reason: str
    at: str
    spent: bool  # led to a quarantine, or was reset by a release


class QuarantineRecord(Struct, frozen=True):
    device: str
    round: int  # of the last strike
    until_round: int | None  # its last round; None: until it is released
    reason: str
    at: str
    released_at: str | None

    def holds(self, round_number: int) -> bool:
        """Return whether it excludes the device from a round."""
        over = self.until_round is not None and round_number > self.until_round
        return self.released_at is None and not over


class DeviceLog(Struct, frozen=True):
    """The last log lines of a device, which it sent with the failure of a task."""

    run: str
    round: int
    device: str
    kind: TaskKind
    reason: str  # of the failure
    at: str  # ISO 8601, UTC
    lines: str


class DeviceRecord(Struct, frozen=True):
    """One device of a run; counts closed rounds only."""

    run: str
    device: str
    last_asked: int = 0  # newest round in which it was asked to train
    times_asked: int = 0
    totals: DeviceTotals = DeviceTotals()
    software: str | None = None  # its version; None: it said none
    denies: tuple[str, ...] = ()  # keys of what its policy does not allow


ModelStage = Literal["challenger", "canary", "champion", "former", "retired"]
"""State of a model in the fleet: the furthest that any device is to have."""


class ModelRecord(Struct, frozen=True, kw_only=True):
    """A model that devices compared at the end of a run."""

    name: str  # RUN-ROUND
    run: str
    round: int
    method: str
    classes: int
    created_at: str  # ISO 8601, UTC
    stage: ModelStage
    rules: dict[str, Any]  # the table [promote] of its run
    reason: str  # of its stage
    changed_at: str
    canary_since: str | None = None  # the first device reported that it is canary


class DeviceModelRecord(Struct, frozen=True, kw_only=True):
    """A model on one device: its comparison, the wanted state and the actual one."""

    model: str
    device: str
    labels: dict[str, str] = {}  # when it compared
    comparison: Comparison | None = None  # None: it has none yet
    paired: bool = False  # with a champion
    wanted: WantedState | None = None  # None: it stays unused
    actual: ModelState | None = None  # of the device's newest report; None: it does not have the model
    failed: bool = False  # the device stopped to use it by itself
    reason: str = ""  # of the device
    answered: int = 0  # pictures
    confidence: float = 0.0  # sum over them
    changed_at: str = ""  # of `wanted` or `actual`
    drifted_since: str | None = None  # ISO 8601, UTC: the pictures that it answers have drifted; None: they have not

    @property
    def mean_confidence(self) -> float | None:
        """Mean confidence, at most 1 whatever the device claims."""
        return min(1.0, self.confidence / self.answered) if self.answered else None


PromotionAct = Literal["compared", "canary", "promoted", "rolled back", "retired"]


class Promotion(Struct, frozen=True, kw_only=True):
    """A change of the wanted states of a model, with the scores that it rests on."""

    model: str
    at: str
    act: PromotionAct
    actor: str  # an operator, or "rule"
    reason: str
    devices: int  # whose wanted state changed
    former: str | None = None  # the model that it replaces on most of them
    challenger: float | None = None  # accuracies on the same images; None: not measured
    champion: float | None = None
    images: int = 0
    low: float | None = None  # 95 % interval of the gain, or without a champion of the accuracy
    high: float | None = None


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One act of an operator; see `coordinator.record.audit`."""

    id: int  # 1, 2, ... without gaps
    at: str  # ISO 8601, UTC
    who: str
    origin: str
    act: str
    subject: str  # a run, a device, a token or a folder
    details: str
    former: str  # digest of the entry before
    digest: str  # of all other fields


_TYPES: dict[Any, Any] = {str: String, int: Integer, bool: Boolean}


def _columns(kind: type[Struct], *key: str, without: tuple[str, ...] = ()) -> list[Column[Any]]:
    """One column per field of a class; `key`: the primary key."""
    made = []
    for field in msgspec.structs.fields(kind):
        if field.name in without:
            continue
        held = [entry for entry in typing.get_args(field.type) if entry is not type(None)]
        may_be_none = type(None) in typing.get_args(field.type)
        plain = held[0] if may_be_none else field.type
        column = String if typing.get_origin(plain) is typing.Literal else _TYPES.get(plain)
        empty = may_be_none or (column is None and not field.required)
        made.append(Column(field.name, column or _JSON, primary_key=field.name in key, nullable=empty))
    return made


def _run() -> Column[Any]:
    return Column("run", String, nullable=False)


def _id() -> Column[Any]:
    return Column("id", Integer, primary_key=True)


def _seal() -> Column[Any]:
    return Column(SEAL, String)


RUNS = Table("runs", TABLES, *_columns(RunRecord, "id"), _seal())

ROUNDS = Table(
    "rounds",
    TABLES,
    *_columns(RoundRecord, "run", "round"),
    _seal(),
    ForeignKeyConstraint(["run"], ["runs.id"]),
)

RESULTS = Table(
    "results",
    TABLES,
    *_columns(ResultRecord, "run", "round", "device", "kind"),
    Column("received_at", String, nullable=False),
    _seal(),
)
Index("results_by_use", RESULTS.c.run, RESULTS.c.used_in, RESULTS.c.kind, RESULTS.c.device)

TASKS = Table(
    "tasks",
    TABLES,
    Column("run", String, primary_key=True),
    *_columns(TaskRecord, "round", "device", without=("expected",)),
    Column("asked_at", String, nullable=False),
    Column("outcome", String),  # an end of `TaskState`; NULL: under way
    *(Column(name, String) for name in TaskTimes._fields),
    Column("expected", String),  # id of a row of `expectations`
)
TASKS_AT_WORK = Index("tasks_at_work", TASKS.c.run, TASKS.c.round)
"""Index of tasks without an outcome: `coordinator.record.migrations.versions` adds the condition, since naming an
option of PostgreSQL would load all its drivers in each command."""

EXPECTATIONS = Table(
    "expectations",
    TABLES,
    Column("run", String, primary_key=True),
    Column("id", String, primary_key=True),  # digest of the content
    Column("content", _JSON, nullable=False),
)
"""Predicted costs of tasks, stored once, since most of a device's rounds are alike."""

REFUSALS = Table("refusals", TABLES, _id(), _run(), *_columns(RefusalRecord))
Index("refusals_by_run", REFUSALS.c.run)

STRIKES = Table("strikes", TABLES, _id(), _run(), *_columns(StrikeRecord), _seal())
Index("strikes_by_device", STRIKES.c.run, STRIKES.c.device)

QUARANTINES = Table("quarantines", TABLES, _id(), _run(), *_columns(QuarantineRecord), _seal())
Index("quarantines_by_device", QUARANTINES.c.run, QUARANTINES.c.device)

DEVICES = Table("devices", TABLES, *_columns(DeviceRecord, "run", "device"), _seal())

LOGS = Table("logs", TABLES, _id(), *_columns(DeviceLog))
Index("logs_by_device", LOGS.c.device, LOGS.c.run)

LABELS = Table(
    "labels",
    TABLES,
    Column("device", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("value", String, nullable=False),
)
"""Labels that the coordinator's operator set, in all runs; they replace those of the device's owner."""

MODELS = Table("models", TABLES, *_columns(ModelRecord, "name"))

DEVICE_MODELS = Table("device_models", TABLES, *_columns(DeviceModelRecord, "model", "device"))
Index("device_models_by_device", DEVICE_MODELS.c.device)

PROMOTIONS = Table("promotions", TABLES, _id(), *_columns(Promotion))
Index("promotions_by_model", PROMOTIONS.c.model)

OF_ALL_RUNS = (LABELS, MODELS, DEVICE_MODELS, PROMOTIONS)
"""Tables that keep their rows when a run is removed."""

AUDIT = Table("audit", TABLES, *_columns(AuditEntry, "id"))

VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""The version table of Alembic."""
