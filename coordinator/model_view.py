"""The read model of models in use: every view of them reads only these."""

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from coordinator.record.record import Record
from coordinator.record.tables import DeviceModelRecord, ModelRecord, ModelStage, Promotion, PromotionAct
from fedvit.wire.messages import ModelState, WantedState


class ScoreView(Struct, frozen=True, kw_only=True):
    """The accuracy of a model and of those that it was compared with, on the same images of all devices."""

    accuracy: float
    champion_accuracy: float | None  # None: no device had a champion
    images: int
    low: float  # 95 % interval of the gain, or without a champion of the accuracy
    high: float


class ModelOnDevice(Struct, frozen=True, kw_only=True):
    """A model on one device."""

    device: str
    wanted: WantedState | None  # None: it stays unused
    state: ModelState | None  # as the device reported; None: it does not have the model
    accuracy: float | None  # on its own test images
    champion_accuracy: float | None
    images: int
    pictures: int  # answered
    confidence: float | None  # mean over them
    reason: str
    drifted_since: str | None = None  # ISO 8601, UTC: the pictures differ from those of training


class PromotionView(Struct, frozen=True, kw_only=True):
    """A change of the states that devices are to have."""

    at: str
    act: PromotionAct
    by: str
    reason: str
    devices: int
    former: str | None


class ModelView(Struct, frozen=True, kw_only=True):
    """A model, its scores, and its states on devices."""

    model: str
    run: str
    round: int
    method: str
    stage: ModelStage
    reason: str
    created_at: str  # ISO 8601, UTC
    changed_at: str
    canary_since: str | None
    states: dict[str, int]  # number of devices by actual state
    pending: int  # devices that are not in their wanted state yet
    score: ScoreView | None
    devices: list[ModelOnDevice]
    history: list[PromotionView]

    @property
    def drift_count(self) -> int:
        """Return the number of devices whose pictures have drifted."""
        return sum(device.drifted_since is not None for device in self.devices)

    @property
    def is_usable(self) -> bool:
        """Return whether devices may still be told to use it."""
        return self.stage != "retired"

    @property
    def is_used(self) -> bool:
        """Return whether a device is to use it."""
        return self.stage in ("canary", "champion")


def list_models(store: Record) -> list[ModelView]:
    """Return all models, the newest first."""
    devices: dict[str, list[DeviceModelRecord]] = {}
    for row in store.models.read_devices():
        devices.setdefault(row.model, []).append(row)
    acts: dict[str, list[Promotion]] = {}
    for act in store.models.read_promotions():
        acts.setdefault(act.model, []).append(act)
    return [_view(model, devices.get(model.name, []), acts.get(model.name, [])) for model in store.models.read_all()]


def read_model(store: Record, name: str) -> ModelView:
    """Return one model. Raises ConfigError if there is none of this name."""
    return _view(store.models.read(name), store.models.read_devices(name), store.models.read_promotions([name]))


def _view(model: ModelRecord, rows: Sequence[DeviceModelRecord], acts: Sequence[Promotion]) -> ModelView:
    return ModelView(
        model=model.name,
        run=model.run,
        round=model.round,
        method=model.method,
        stage=model.stage,
        reason=model.reason,
        created_at=model.created_at,
        changed_at=model.changed_at,
        canary_since=model.canary_since,
        states=dict(sorted(Counter(row.actual for row in rows if row.actual).items())),
        pending=sum(is_pending(row) for row in rows),
        score=_find_score(acts),
        devices=[_describe(row) for row in rows],
        history=[
            PromotionView(
                at=act.at, act=act.act, by=act.actor, reason=act.reason, devices=act.devices, former=act.former
            )
            for act in acts
        ],
    )


def is_pending(row: DeviceModelRecord) -> bool:
    """Return whether a device is to change the state of a model that it has."""
    if row.wanted in (None, "retired"):
        return row.wanted is not None and row.actual is not None
    return row.actual is not None and row.actual != row.wanted and not row.failed


def _describe(row: DeviceModelRecord) -> ModelOnDevice:
    compared = row.comparison
    return ModelOnDevice(
        device=row.device,
        wanted=row.wanted,
        state=row.actual,
        accuracy=compared.challenger_accuracy if compared else None,
        champion_accuracy=compared.champion_accuracy if compared and row.paired else None,
        images=compared.images if compared else 0,
        pictures=row.answered,
        confidence=row.mean_confidence,
        reason=row.reason,
        drifted_since=row.drifted_since,
    )


def _find_score(acts: Iterable[Promotion]) -> ScoreView | None:
    """Return the score of the newest act that has one."""
    for act in reversed(list(acts)):
        if act.challenger is not None and act.low is not None and act.high is not None:
            return ScoreView(
                accuracy=act.challenger, champion_accuracy=act.champion, images=act.images, low=act.low, high=act.high
            )
    return None


def describe_score(score: ScoreView | None) -> str:
    """Write a score for people: the accuracies, and the interval of their difference.

    >>> describe_score(ScoreView(accuracy=0.9, champion_accuracy=0.8, images=50, low=0.02, high=0.18))
    '0.900 against 0.800 on 50 images: gain +0.020 to +0.180'
    >>> describe_score(ScoreView(accuracy=0.9, champion_accuracy=None, images=50, low=0.79, high=0.96))
    '0.900 (0.790 to 0.960) on 50 images'
    """
    if score is None:
        return "–"
    if score.champion_accuracy is None:
        return f"{score.accuracy:.3f} ({score.low:.3f} to {score.high:.3f}) on {score.images} images"
    return (
        f"{score.accuracy:.3f} against {score.champion_accuracy:.3f} on {score.images} images: "
        f"gain {score.low:+.3f} to {score.high:+.3f}"
    )
