"""Changes of the states that devices' models are to have, by operators and by rule: in the record, with their traces.

Each change is one transaction. What it rests on is written with it, before any device hears of it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from coordinator.config import PromoteConfig, why_not_asked
from coordinator.record.audit import Actor, acting_as, current_actor
from coordinator.record.record import Record
from coordinator.record.tables import DeviceModelRecord, ModelRecord, Promotion, PromotionAct, now
from coordinator.rounds.models import rules
from coordinator.rounds.models.rules import Score, Wanted
from fedvit.errors import ConfigError
from fedvit.quantities import format_count
from fedvit.wire.messages import WantedState

RULE = Actor("fedvit", "rule")
"""The actor of changes that no operator asked for."""

Change = Callable[[Mapping[str, WantedState], str], Wanted]


class Act(NamedTuple):
    """A change of a model's wanted states, as the record and the audit describe it."""

    kind: PromotionAct
    reason: str
    score: Score | None = None


def promote(store: Record, name: str, where: str = "") -> str:
    """Let devices use a model: all that have it, or those with labels. Returns what happens.

    Raises ConfigError if there is no such model, or no such device has it.
    """
    with store.database.together():
        store.audit.add("promote model", name, where)  # first: it locks the record
        model = store.models.read(name)
        labels = store.devices.read_labels()
        rows = store.models.read_devices(name)
        having = [row for row in rows if row.wanted != "retired" and row.actual]
        chosen = [
            row for row in having if why_not_asked(where, {**row.labels, **labels.get(row.device, {})}, "where") is None
        ]
        if not chosen:
            which = f"no device with {where}" if where and having else "no device"
            raise ConfigError("FV1652", f"{which} has model {name!r}, which is {model.stage}")
        if all(row.wanted == "champion" for row in chosen):
            raise ConfigError("FV1652", f"model {name!r} is champion on {_count(chosen)} already")
        reason = f"by an operator{f', where {where}' if where else ''}"
        devices = {row.device for row in chosen}
        changed = change(store, name, rules.want_champion, devices, Act("promoted", reason, score_of(model, rows)))
    return f"model {name} becomes champion on {format_count(changed, 'device')}"


def roll_back(store: Record, name: str, reason: str = "by an operator", devices: Collection[str] | None = None) -> str:
    """Stop the use of a model, on some devices or on all: their former champions are used again. Returns what happens.

    Raises ConfigError if there is no such model, or none of these devices is to use it or has another one.
    """
    with store.database.together():
        store.audit.add("roll back model", name, reason)
        model = store.models.read(name)
        rows = store.models.read_devices(name)
        using = [
            row for row in rows if row.wanted in ("canary", "champion") and (devices is None or row.device in devices)
        ]
        if not using:
            raise ConfigError("FV1652", f"model {name!r} is {model.stage}: no device uses it")
        chosen = {row.device for row in (rows if devices is None else using) if row.wanted != "retired"}
        change(store, name, rules.want_back, chosen, Act("rolled back", reason, score_of(model, rows)))
        left = [row for row in store.models.read_devices(name) if row.device in chosen and row.wanted == "champion"]
        if len(left) == len(using):
            raise ConfigError(
                "FV1652", f"{_count(left)} with model {name!r} had none before to go back to: promote another model"
            )
    kept = f"; {_count(left)} had none before: no change there" if left else ""
    return f"model {name} is rolled back on {format_count(len(using) - len(left), 'device')}{kept}"


def retire(store: Record, name: str) -> str:
    """Let devices remove a model that none of them uses. Returns what happens. Raises ConfigError if one does."""
    with store.database.together():
        store.audit.add("retire model", name)
        model = store.models.read(name)
        rows = store.models.read_devices(name)
        if using := [row for row in rows if row.wanted in ("canary", "champion")]:
            raise ConfigError(
                "FV1652",
                f"model {name!r} is {model.stage} on {_count(using)}: promote another one, or roll it back, before",
            )
        chosen = {row.device for row in rows if row.wanted != "retired"}
        if not chosen:
            raise ConfigError("FV1652", f"model {name!r} is retired already")
        change(store, name, rules.want_back, chosen, Act("retired", "by an operator"))
    return f"model {name} is retired on {format_count(len(chosen), 'device')}"


def add_model(store: Record, model: ModelRecord, rows: Iterable[DeviceModelRecord]) -> str:
    """Store a model that devices have compared, and let devices use it as its run's rules say. Returns what happens.

    Nothing changes if it was stored before.
    """
    with acting_as(RULE), store.database.together():
        if store.models.has(model.name):
            return f"model {model.name} is {store.models.read(model.name).stage}"
        rows = list(rows)
        settings = read_rules(model)
        selected = rules.select_devices(rows, model.classes, settings)
        store.audit.add("compare model", model.name, selected.reason)
        store.models.add(msgspec.structs.replace(model, reason=selected.reason), rows)
        store.models.add_promotion(_describe(model.name, Act("compared", selected.reason, selected.score), len(rows)))
        if not selected.devices:
            return f"model {model.name} stays a challenger: {selected.reason}"
        if settings.after_s() == 0:
            act = Act("promoted", selected.reason, selected.score)
            changed = change(store, model.name, rules.want_champion, selected.devices, act)
            return f"model {model.name} becomes champion on {format_count(changed, 'device')}: {selected.reason}"
        canaries = rules.select_canaries(rows, selected.devices, store.devices.read_labels(), settings)
        if not canaries:
            return (
                f"model {model.name} stays a challenger: no device with {settings.canary or 'any label'} may be its "
                f"canary ({selected.reason})"
            )
        act = Act("canary", selected.reason, selected.score)
        changed = change(store, model.name, rules.want_canary, canaries, act)
    return f"model {model.name} becomes canary on {format_count(changed, 'device')}: {selected.reason}"


def promote_canary(store: Record, name: str, reason: str) -> str:
    """Let all devices that may use a canary use it. Returns what happens; "": an operator has just ended its stage."""
    with acting_as(RULE), store.database.together():
        model = store.models.read(name)
        if model.stage != "canary":
            return ""
        store.audit.add("promote model", name, reason)
        rows = [row for row in store.models.read_devices(name) if row.actual]  # a newer challenger may have replaced it
        selected = rules.select_devices(rows, model.classes, read_rules(model))
        canaries = {row.device for row in rows if row.wanted == "canary"}
        devices = canaries.union(selected.devices)
        act = Act("promoted", reason, selected.score)
        changed = change(store, name, rules.want_champion, devices, act)
    return f"model {name} becomes champion on {format_count(changed, 'device')}: {reason}"


def roll_back_by_rule(store: Record, name: str, reason: str, devices: Collection[str] | None = None) -> str:
    """Stop the use of a model that failed, on some devices or on all. Returns what happens; "": it is not used now."""
    with acting_as(RULE):
        try:
            return f"{roll_back(store, name, reason, devices)}: {reason}"
        except ConfigError:  # an operator has just rolled it back
            return ""


def change(store: Record, name: str, wanted: Change, devices: Collection[str], act: Act) -> int:
    """Change the wanted states of some devices, and the stages of all models that they concern.

    To be called inside `Database.together`. Returns the number of devices whose states changed.
    """
    by_device: dict[str, dict[str, DeviceModelRecord]] = {}
    for row in store.models.read_devices():
        if row.device in devices:
            by_device.setdefault(row.device, {})[row.model] = row
    at, changed, formers = now(), dict[str, list[DeviceModelRecord]](), list[str]()
    for device, rows in by_device.items():
        before: Wanted = {model: row.wanted for model, row in rows.items() if row.wanted}
        after = wanted(before, name)
        formers += [model for model, state in after.items() if state == "former" and before.get(model) == "champion"]
        if new := {model: state for model, state in after.items() if state != before.get(model)}:
            changed[device] = [_want(rows[model], state, at) for model, state in new.items() if model in rows]
    written = [row for rows_of_device in changed.values() for row in rows_of_device]
    store.models.write_devices(written)
    former = max(set(formers), key=formers.count) if formers else None
    for model in {name, *(row.model for row in written)}:
        stage = rules.find_stage(store.models.read_devices(model))
        reason = act.reason if model == name else f"{act.kind}: {name}"
        if model == name or stage != store.models.read(model).stage:
            store.models.change(model, stage=stage, reason=reason)
    store.models.add_promotion(_describe(name, act, len(changed), former))
    return len(changed)


def _want(row: DeviceModelRecord, state: WantedState, at: str) -> DeviceModelRecord:
    """Return a model on a device with another wanted state; one that failed before gets another chance."""
    if state in ("canary", "champion"):
        row = msgspec.structs.replace(row, failed=False, reason="")
    return msgspec.structs.replace(row, wanted=state, changed_at=at)


def score_of(model: ModelRecord, rows: Iterable[DeviceModelRecord]) -> Score | None:
    """Return the score of a model by what devices have compared."""
    return rules.select_devices(rows, model.classes, read_rules(model)).score


def read_rules(model: ModelRecord) -> PromoteConfig:
    """Return the rules of a model's run."""
    return msgspec.convert(model.rules, PromoteConfig)


def _describe(name: str, act: Act, devices: int, former: str | None = None) -> Promotion:
    score = act.score
    return Promotion(
        model=name,
        at=now(),
        act=act.kind,
        actor=current_actor().who,
        reason=act.reason,
        devices=devices,
        former=former,
        challenger=score.challenger if score else None,
        champion=score.champion if score else None,
        images=score.images if score else 0,
        low=score.interval.low if score else None,
        high=score.interval.high if score else None,
    )


def _count(rows: Collection[DeviceModelRecord]) -> str:
    return format_count(len(rows), "device")
