"""The policy of a device's owner: what may leave the device, and when and with what it trains.

It is read by the device alone and never changed over the network. The coordinator checks one that it seals into a join
token, and asks only devices that allow what a run needs.
"""

import datetime
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import msgspec
from msgspec import Meta, Struct

from fedvit.choices import did_you_mean, why_invalid
from fedvit.errors import ConfigError
from fedvit.public_keys import format_key, parse_key
from fedvit.quantities import format_bytes, parse_bytes, parse_celsius, parse_flops, parse_seconds
from fedvit.resources import Budget
from fedvit.roles import Role

if TYPE_CHECKING:  # imports numpy, for which errors in flags need not wait
    from fedvit.program import Program

POLICY_FILE = "policy.toml"


class Hours(NamedTuple):
    """A part of each day by the device's own clock; it may span midnight."""

    first: datetime.time
    end: datetime.time

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigError.

        >>> Hours.parse("22:00-06:30").end
        datetime.time(6, 30)
        """
        match = re.fullmatch(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", text.strip())
        try:
            if match is None:
                raise ValueError
            numbers = [int(number) for number in match.groups()]
            hours = cls(datetime.time(numbers[0], numbers[1]), datetime.time(numbers[2], numbers[3]))
        except ValueError:
            raise ConfigError("FV1416", f"hours {text!r} must be written HH:MM-HH:MM, as in 22:00-06:30") from None
        if hours.first == hours.end:
            raise ConfigError("FV1416", f"hours {text!r}: start and end are equal")
        return hours

    def __str__(self) -> str:
        return f"{self.first:%H:%M}-{self.end:%H:%M}"

    @property
    def others(self) -> "Hours":
        """The rest of the day."""
        return Hours(self.end, self.first)

    def contains(self, time: datetime.time) -> bool:
        if self.first < self.end:
            return self.first <= time < self.end
        return time >= self.first or time < self.end

    def remaining_s(self, now: datetime.datetime) -> float:
        """Return the seconds until they end; 0 outside of them."""
        if not self.contains(now.time()):
            return 0.0
        end = datetime.datetime.combine(now.date(), self.end, now.tzinfo)
        if end <= now:
            end += datetime.timedelta(days=1)
        return (end - now).total_seconds()


Bytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Measure = Annotated[float, Meta(gt=0.0, le=1e18)]
Denial = Literal["updates", "single_updates", "features", "class_counts", "methods"]
"""Keys by which a device announces what it does not allow; "methods": those with unknown graphs."""


class SendPolicy(Struct, frozen=True, kw_only=True):
    """Limits of what leaves the device. None: not limited."""

    updates: Literal["none", "sum", "single"] = "single"  # "sum": only inside a sum over devices
    features: Literal["none", "masked", "any"] = "masked"
    min_mask: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.5  # least share of patches left out of features
    min_cohort: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1  # fewest devices of a sum
    min_noise: Annotated[float, Meta(ge=0.0, le=1e4)] = 0.0  # of a sum of updates, in multiples of its clip
    class_counts: bool = False  # with an evaluation: answers by class
    logs: bool = True  # with the failure of a task
    upload: Bytes | None = None  # of one round's result
    max_bytes_per_day: Bytes | None = None  # of results in 24 hours

    @property
    def least_mask(self) -> float:
        """Least share of patches that must be left out of features; 0 if any may be sent."""
        return self.min_mask if self.features == "masked" else 0.0


class TrainPolicy(Struct, frozen=True, kw_only=True):
    """When the device trains, with what, and which methods. None: not limited."""

    methods: Literal["known", "checked"] | None = None  # None: "known" once a publisher is trusted, else "checked"
    publisher: str = ""  # public key of the publisher that is trusted; "": none
    hours: Hours | None = None  # tasks are declined at other times
    quiet_hours: Hours | None = None  # tasks are declined
    memory: Bytes | None = None
    disk: Bytes | None = None
    flops: Bytes | None = None  # of a round's training
    round_deadline: Measure | None = None  # seconds of a round's training, without transfers
    temperature_limit: Measure | None = None  # a task is stopped above it
    max_temperature: Measure | None = None  # a task is declined above it
    min_battery: Annotated[int, Meta(ge=0, le=100)] | None = None  # a task is declined below it, unless it is charged
    busy_file: Path | None = None  # a task is declined while it exists
    keep_features: bool = True  # features of layers that a task does not train stay on the disk
    keep_runs: Annotated[int, Meta(ge=1)] | None = None  # vaults of older runs that are over are removed


class ModelsPolicy(Struct, frozen=True, kw_only=True):
    """The choice of the device's own model that answers pictures."""

    from_coordinator: bool = True  # the coordinator chooses, and devices compare models for it; False: the owner alone
    report_drift: bool = True  # the coordinator learns that pictures have drifted, as one flag


class Policy(Struct, frozen=True, kw_only=True):
    """The policy of a device's owner."""

    send: SendPolicy = SendPolicy()
    train: TrainPolicy = TrainPolicy()
    models: ModelsPolicy = ModelsPolicy()

    @property
    def budget(self) -> Budget:
        """The limits of a round's training, which the device announces."""
        train = self.train
        return Budget(
            memory_bytes=train.memory,
            flops_per_round=train.flops,
            round_deadline_s=train.round_deadline,
            upload_bytes=self.send.upload,
        )

    @property
    def only_known(self) -> bool:
        """True if the device runs known graphs only."""
        train = self.train
        return train.methods == "known" if train.methods else bool(train.publisher)

    def describe_methods(self) -> str:
        """Describe which Programs the device runs."""
        if not self.only_known:
            trusted = ", as no publisher is trusted" if self.train.methods is None else ""
            return f"all that pass the device's checks{trusted}"
        signed = f", and those that publisher {self.train.publisher} signed" if self.train.publisher else ""
        return f"fedvit's own on standard models{signed}"

    def denials(self, *, certified: bool = True) -> tuple[Denial, ...]:
        """Keys of everything that no task of this device may send, or run.

        `certified`: whether the device has a certificate, without which it does not know who is in a sum.
        """
        send = self.send
        denied: dict[Denial, bool] = {
            "updates": send.updates == "none" or (send.updates == "sum" and not certified),
            "single_updates": send.updates == "sum",
            "features": send.features == "none",
            "class_counts": not send.class_counts,
            "methods": self.only_known,
        }
        return tuple(key for key, is_denied in denied.items() if is_denied)


PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("upload", "max_bytes_per_day", "memory", "disk"), parse_bytes),
    **dict.fromkeys(("temperature_limit", "max_temperature"), parse_celsius),
    **dict.fromkeys(("hours", "quiet_hours"), Hours.parse),
    "flops": parse_flops,
    "round_deadline": parse_seconds,
    "publisher": lambda text: format_key(parse_key(text)),
}
"""Readers of values that are written as text."""
_TABLES: dict[str, type[Struct]] = {"send": SendPolicy, "train": TrainPolicy, "models": ModelsPolicy}


def parse_policy(text: str, where: str) -> dict[str, Any]:
    """Return the values of a policy that is written as TOML. Raises ConfigError, naming `where`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("FV1431", f"{where} is not TOML: {error}") from error


def read_policy_file(file: Path) -> str:
    """Return the text of a policy. Raises ConfigError if the file cannot be read."""
    try:
        return file.read_text()
    except OSError as error:
        raise ConfigError("FV1431", f"policy {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("FV1431", f"policy {file} is not TOML: {error}") from error


def make_policy(values: Mapping[str, Any], where: str) -> Policy:
    """Validate the values of a policy. Raises ConfigError, naming `where`, the key and its value."""
    _check_names(values, _TABLES, where)
    tables = {}
    for name, kind in _TABLES.items():
        given = values.get(name, {})
        if not isinstance(given, Mapping):
            raise ConfigError("FV1431", f"{where}: {name} = {given!r} must be a table: [{name}]")
        tables[name] = _read_table(given, kind, f"{where} [{name}]")
    policy = msgspec.convert(tables, Policy)
    send, train = policy.send, policy.train
    if send.min_noise and send.updates == "single":
        raise ConfigError(
            "FV1431", f'{where} [send]: min_noise = {send.min_noise:g}: updates = "single" leave without noise'
        )
    if train.hours and train.quiet_hours and not _has_other_minute(train.hours, train.quiet_hours):
        raise ConfigError(
            "FV1431", f'{where} [train]: hours = "{train.hours}": quiet_hours = "{train.quiet_hours}" leave no time'
        )
    return policy


def _read_table(given: Mapping[str, Any], kind: type[Struct], where: str) -> Struct:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    _check_names(given, fields, where)
    values = {}
    for key, value in given.items():
        try:
            read = PARSERS[key](value) if key in PARSERS and isinstance(value, str) else value
            values[key] = msgspec.convert(read, fields[key], dec_hook=lambda kind, value: kind(value))
        except ConfigError as error:
            raise ConfigError("FV1431", f"{where}: {key} = {value!r}: {error}") from None
        except msgspec.ValidationError as error:
            reason = why_invalid(error, value, fields[key])
            raise ConfigError("FV1431", f"{where}: {key} = {value!r}: {reason[:1].lower()}{reason[1:]}") from None
    return kind(**values)


def _check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known, most=1) or f"; known are {', '.join(known)}"
            raise ConfigError("FV1431", f"{where}: unknown key {key!r}{hint}")


def _has_other_minute(hours: Hours, quiet: Hours) -> bool:
    """Return whether a minute of `hours` is outside of `quiet`: then one of the two ends of time is."""
    return any(hours.contains(time) and not quiet.contains(time) for time in (hours.first, quiet.end))


# --- in words -----------------------------------------------------------------------------------------


def describe_policy(policy: Policy) -> Iterator[str]:
    """Describe a policy for the device's owner in six lines, and a warning if hardly any method fits."""
    send, train = policy.send, policy.train
    noise = f", with noise of {send.min_noise:g} times their clip" if send.min_noise else ""
    summed = f"updates inside sums of {max(3, send.min_cohort)} devices or more only{noise}"
    updates = {"none": "no update", "sum": summed, "single": "updates of single devices"}
    features = {
        "none": "no features",
        "masked": f"features with at least {send.min_mask:.0%} of the patches left out",
        "any": "features of whole images",
    }
    counts = "counts by class" if send.class_counts else "no counts by class"
    day = "" if send.max_bytes_per_day is None else f"; at most {format_bytes(send.max_bytes_per_day)} a day"
    yield f"may be sent: {updates[send.updates]}; {features[send.features]}; {counts}{day}"
    logs = "and logs" if send.logs else "without logs"
    yield f"always sent: numbers of images, names of classes, losses, accuracies; failures {logs}"
    yield "not sent: images, personal tensors"
    yield f"methods: {policy.describe_methods()}"
    limits = [f"{name} {format_bytes(size)}" for name, size in (("memory", train.memory), ("disk", train.disk)) if size]
    limits += [f"{name} {hours}" for name, hours in (("hours", train.hours), ("quiet", train.quiet_hours)) if hours]
    limits += [f"battery above {train.min_battery} %"] if train.min_battery else []
    limits += [f"starts below {train.max_temperature:g} C"] if train.max_temperature else []
    yield f"trains: {', '.join(limits) or 'at any time, without limits'}"
    chooser = "the coordinator" if policy.models.from_coordinator else "the owner"
    drift = "drift is reported" if policy.models.report_drift else "drift is not reported"
    yield f"models: {chooser} chooses which one is used; {drift}"
    if warning := find_narrowness(policy):
        yield f"warning: {warning}"


def find_narrowness(policy: Policy) -> str | None:
    """Return why hardly any method can use the device; None if many can."""
    if policy.only_known and not policy.train.publisher:
        return 'methods = "known": no publisher is trusted, so only fedvit\'s own graphs on standard models'
    if {"updates", "features"} <= set(policy.denials()):
        return f'updates = "{policy.send.updates}" and features = "none": only methods that send nothing, as local'
    return None


# --- what a run needs ---------------------------------------------------------------------------------


UNSIGNED = "graphs that"
"""The first words of a denial for unknown graphs."""


class Needs(Struct, frozen=True):
    """The parts of a policy that the training of a Program needs."""

    updates: bool
    features: bool
    mask: float  # share of patches that its features leave out; 1 without features
    publisher: str | None = None  # that signed all graphs, "" nobody; None: all are fedvit's own, or not made yet
    secure: bool = False  # updates are sent inside sums of devices only

    def find_denial(self, denials: Iterable[str], least_mask: float, publisher: str = "") -> str | None:
        """Return the key of a device's policy that does not allow it, in words; None if all do.

        `publisher`: the one that the device trusts.
        """
        if "methods" in denials and self.publisher is not None and (not publisher or self.publisher != publisher):
            return f"{UNSIGNED} {f'publisher {publisher} has not' if publisher else 'no trusted publisher has'} signed"
        if self.updates and "updates" in denials:
            return "updates"
        if self.updates and not self.secure and "single_updates" in denials:
            return "updates of single devices"
        if self.features and "features" in denials:
            return "features"
        if self.features and self.mask < least_mask - 1e-9:
            return f"features with less than {least_mask:.0%} of the patches left out"
        return None

    def __str__(self) -> str:
        words = ["updates in sums" if self.secure else "updates"] if self.updates else []
        if self.features:
            words.append(f"features masked {self.mask:.2g}" if self.mask else "features")
        return ", ".join(words) or "nothing"


def find_needs(program: "Program") -> Needs:
    """Return what the training of a Program sends."""
    batch = program.batch
    features = any(phase.collect for phase in program.train)
    masked = 0.0 if batch.text else 1.0 - batch.kept_patches / batch.patches
    updates = bool(program.with_role(*(role for role in Role if role.is_sent_back)))
    return Needs(updates, features, masked if features else 1.0, secure=program.secure)
