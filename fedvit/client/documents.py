"""Answers of the HTTP API, with the fields that most programs need; `Service.get` returns all of them."""

from typing import Any, Literal

from msgspec import Struct

Status = Literal["queued", "waiting", "running", "interrupted", "finished", "failed", "cancelled"]
ENDED: tuple[Status, ...] = ("finished", "failed", "cancelled")


class Run(Struct, frozen=True, kw_only=True):
    """A run and its progress."""

    run: str
    created_at: str  # ISO 8601, UTC
    status: Status
    reason: str | None  # why it failed or was interrupted
    method: str
    model: str
    seed: int
    rounds_planned: int
    rounds: int
    mean_accuracy: float | None  # of its newest evaluation
    settings: dict[str, Any]


class Page(Struct, frozen=True, kw_only=True):
    """Some runs of a list, newest first."""

    runs: list[Run]
    total: int  # of the whole list


class Round(Struct, frozen=True, kw_only=True):
    """A closed round."""

    round: int
    cohort: int
    accepted: int
    accuracy_mean: float | None
    train_loss: float | None
    bytes_down: int
    bytes_up: int
    figures: dict[str, float | None]


class Submitted(Struct, frozen=True, kw_only=True):
    """A run that was put into the queue."""

    run: str
    status: Status
    warning: str | None


class Changed(Struct, frozen=True, kw_only=True):
    """A run after a request."""

    run: str
    status: Status
    paused_at: str | None  # ISO 8601, UTC
    done: str


class Device(Struct, frozen=True, kw_only=True):
    """A device of the deployment."""

    device: str
    state: str  # valid, expired, not yet valid, revoked
    joined: str | None  # ISO 8601, UTC
    last_seen: str | None
    expires: str | None
    revoked: str | None


class UsedModel(Struct, frozen=True, kw_only=True):
    """A model that devices have compared or use."""

    model: str
    run: str
    round: int
    stage: str  # challenger, canary, champion, former, retired
    reason: str
    states: dict[str, int]  # number of devices by state
    pending: int  # devices that are not in their wanted state yet


class ChangedModel(Struct, frozen=True, kw_only=True):
    """A model after a request."""

    model: str
    stage: str
    done: str


class Labels(Struct, frozen=True, kw_only=True):
    """Labels of a device that an operator set."""

    device: str
    labels: dict[str, str]
