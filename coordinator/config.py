"""What an operator can say of a run: a TOML file, every key of which is also a flag."""

import difflib
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from fedvit.errors import ConfigError
from fedvit.program import Role
from fedvit.quantities import parse_bytes, parse_flops, parse_seconds
from fedvit.resources import Budget
from fedvit.updates import NONE, make_codec
from fedvit.wire.topics import check_name

if TYPE_CHECKING:
    from fedvit.methods.base import ServerRule


class ImageConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How devices vary their pictures in training: the table [images]."""

    crop_padding: Annotated[
        int, Meta(ge=0, le=64, description="Random crop after reflecting this many pixels at each border.")
    ] = 0
    flip: Annotated[bool, Meta(description="Random left-right flip.")] = False
    brightness: Annotated[float, Meta(ge=0, lt=1, description="Random brightness factor in [1 - this, 1 + this].")] = (
        0.0
    )


class UpdatesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tensors are coded on their way: the table [updates]. Raises ConfigError on construction.

    A codec is one of none, fp16, int8 and top_k:share=0.05 (docs/updates.md).
    """

    up: Annotated[str, Meta(description="Codec of what devices send back of trained tensors.")] = NONE
    up_groups: Annotated[dict[str, str], Meta(description="Another codec for a group that is sent back.")] = field(
        default_factory=dict
    )
    features: Annotated[str, Meta(description="Codec of what devices collect and upload: none, fp16 or int8.")] = NONE
    down: Annotated[
        str, Meta(description="Codec of what changes from round to round, for devices that have what was before.")
    ] = NONE
    down_whole: Annotated[
        str, Meta(description="Codec of whole values for devices, also of those made for one device: none, fp16, int8.")
    ] = NONE

    def __post_init__(self) -> None:
        given = {"up": self.up, "features": self.features, "down": self.down, "down_whole": self.down_whole}
        for key, text in (given | {f"up_groups.{group}": text for group, text in self.up_groups.items()}).items():
            try:
                codec = make_codec(text)
            except ConfigError as error:
                raise ConfigError(f"updates: {key}: {error}") from None
            if key in ("features", "down_whole") and not codec.keeps_shape:
                raise ConfigError(f"updates: {key} = {text!r}: {codec.name} is for changes of trained tensors alone")

    def up_of(self, group: str) -> str:
        return make_codec(self.up_groups.get(group, self.up)).text

    @property
    def codes_down(self) -> bool:
        return {self.down, self.down_whole} != {NONE}


Amount = float | str
"""A number, or text with a unit such as "512MB"."""


class BudgetConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every device may spend, beside its own limits: the table [budget]. Raises ConfigError on construction."""

    memory_budget: Annotated[
        Amount | None, Meta(description="Resident memory of a device's process, e.g. 512MB; it gets what fits.")
    ] = None
    flops_budget: Annotated[Amount | None, Meta(description="FLOPs of a round's training, e.g. 2TFLOP.")] = None
    round_deadline: Annotated[
        Amount | None, Meta(description="Time of a round's training on a device, without transfers, e.g. 10m.")
    ] = None
    upload_budget: Annotated[Amount | None, Meta(description="Bytes of one round's result, e.g. 5MB.")] = None

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> Budget:
        return Budget(
            memory_bytes=_amount("memory_budget", self.memory_budget, parse_bytes),
            flops_per_round=_amount("flops_budget", self.flops_budget, parse_flops),
            round_deadline_s=_amount("round_deadline", self.round_deadline, parse_seconds),
            upload_bytes=_amount("upload_budget", self.upload_budget, parse_bytes),
        )


Number = TypeVar("Number", int, float)


def _amount(key: str, given: Amount | None, parse: Callable[[str], Number]) -> Number | None:
    try:
        return None if given is None else parse(str(given))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


class BrokerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where messages meet: the table [broker]. Not part of a run; a resumed run may use another."""

    broker: Annotated[
        str,
        Meta(description="auto, mosquitto, embedded, or a broker that is there: mqtt(s)://[USER:PASSWORD@]HOST:PORT."),
    ] = "auto"
    listen: Annotated[
        str, Meta(description="Address that our own broker listens on; beyond this machine it needs a password.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of our own broker; 0 takes a free one.")] = 1883
    password: Annotated[
        str | None, Meta(description="Secret of user 'fedvit' at our own broker; or set FEDVIT_BROKER_PASSWORD.")
    ] = None
    ca_file: Annotated[str | None, Meta(description="Certificate authority of an mqtts:// broker.")] = None
    deployment: Annotated[
        str | None,
        Meta(description="Folder of `coordinator init`: mosquitto lets in its devices alone, by their certificates."),
    ] = None


class ProtectionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server keeps devices that lie from ruining a run: the table [protection] (docs/security.md).

    Raises ConfigError on construction when keys do not fit together.
    """

    aggregator: Annotated[
        Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"],
        Meta(description="How shared tensors' updates become one; all but mean treat devices as equals."),
    ] = "mean"
    malicious_share: Annotated[
        float,
        Meta(ge=0, lt=0.5, description="Share of a cohort that may be malicious: trimmed_mean, krum, multi_krum."),
    ] = 0.3
    clip_norm: Annotated[
        float | Literal["median"] | None,
        Meta(description="Updates are scaled down to this norm; median: to the cohort's median norm."),
    ] = None
    reject_scale: Annotated[
        float | None,
        Meta(description="Updates longer than so many medians of the cohort are left out, and features so far off."),
    ] = None
    max_weight: Annotated[
        float | None, Meta(description="A device's samples count up to so many times the cohort's median.")
    ] = None
    strikes: Annotated[
        int, Meta(ge=0, description="Refused or out-of-scale results that put a device into quarantine; 0: none do.")
    ] = 3
    quarantine_rounds: Annotated[
        int | None, Meta(description="Rounds that a quarantine lasts; by default until the operator ends it.")
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.clip_norm, float) and not 0 < self.clip_norm < math.inf:
            raise ConfigError(f"clip_norm = {self.clip_norm} must be above 0, or median")
        for key, least in (("reject_scale", 1.0), ("max_weight", 1.0), ("quarantine_rounds", 1)):
            value = getattr(self, key)
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"{key} = {value} must be at least {least:g}")

    def check(self, method: str, roles: set[Role]) -> None:
        """Raises ConfigError, naming the method, where there is nothing for the aggregator to aggregate."""
        if self.aggregator != "mean" and Role.SHARED not in roles:
            raise ConfigError(
                f"aggregator = {self.aggregator!r}: method {method!r} averages no tensors; "
                "of these keys reject_scale, max_weight and strikes protect it"
            )


class PrivacyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Differential privacy: the table [privacy] (docs/security.md). Raises ConfigError on construction."""

    noise_multiplier: Annotated[
        float, Meta(ge=0, description="Noise in the mean of shared tensors' updates, times clip; 0: no privacy.")
    ] = 0.0
    clip: Annotated[float | None, Meta(description="Norm that a device's update is scaled down to.")] = None
    delta: Annotated[float, Meta(gt=0, lt=1, description="Of (epsilon, delta); below 1 / devices.")] = 1e-5
    accounting: Annotated[
        Literal["every_round", "sampled"],
        Meta(description="What epsilon assumes: any device may be in every round, or cohorts are drawn in secret."),
    ] = "every_round"
    feature_noise: Annotated[
        float, Meta(ge=0, description="Noise that devices add to features, times feature_clip; 0: none.")
    ] = 0.0
    feature_clip: Annotated[
        float | None, Meta(description="Norm that each image's features are scaled down to on the device.")
    ] = None
    rehearsal: Annotated[
        bool, Meta(description="Noise follows from the run's seed: repeatable, and no protection at all.")
    ] = False

    def __post_init__(self) -> None:
        for noise, clip in (("noise_multiplier", "clip"), ("feature_noise", "feature_clip")):
            limit = getattr(self, clip)
            if getattr(self, noise) and limit is None:
                raise ConfigError(f"{noise} = {getattr(self, noise)} needs {clip}")
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError(f"{clip} = {limit} must be above 0")

    def check(self, method: str, roles: set[Role], collects: bool, protection: ProtectionConfig) -> None:
        """Raises ConfigError where the noise would not make private what the method sends, or not as promised."""
        if self.feature_noise and not collects:
            raise ConfigError(f"feature_noise = {self.feature_noise}: method {method!r} uploads no features")
        if not self.noise_multiplier:
            return
        what = f"noise_multiplier = {self.noise_multiplier}"
        if Role.SHARED not in roles:
            raise ConfigError(f"{what}: method {method!r} averages no tensors")
        if Role.GENERATED in roles or collects:
            other = "features" if collects else "updates of generated tensors"
            raise ConfigError(f"{what}: method {method!r} also uploads {other}, which no noise would cover")
        for key, allowed in (("aggregator", "mean"), ("clip_norm", None), ("reject_scale", None), ("max_weight", None)):
            if getattr(protection, key) != allowed:
                raise ConfigError(
                    f"{what}: protection's {key} looks at updates before the noise, which the promise does not allow"
                )


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run. Raises ConfigError on construction when names, or options of method or model, are wrong."""

    method: Annotated[str, Meta(description="Federated method.")] = "eftvit"
    options: Annotated[dict[str, Any], Meta(description="Hyperparameter of the method.")] = field(default_factory=dict)
    variants: Annotated[
        dict[str, dict[str, Any]],
        Meta(description="Other hyperparameters for some devices: a pattern of device names, then options."),
    ] = field(default_factory=dict)
    model: Annotated[str, Meta(description="Name of a timm Vision Transformer, or vit_small_images.")] = (
        "vit_small_images"
    )
    model_options: Annotated[dict[str, Any], Meta(description="Option of the model, e.g. image_size or depth.")] = (
        field(default_factory=dict)
    )
    pretrained: Annotated[bool | str, Meta(description="true for timm's weights, or the path of a checkpoint.")] = False
    start_from: Annotated[
        str | None, Meta(description="Begin with what an earlier run of the same folder ended with: its name.")
    ] = None
    classes: Annotated[
        tuple[str, ...], Meta(description="Class of the run; without any: all that the first devices have.")
    ] = ()
    rounds: Annotated[int, Meta(ge=1, description="Rounds to train.")] = 10
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1, description="Every random draw of the run follows from it.")] = 0
    devices: Annotated[int, Meta(ge=1, description="Devices to wait for before the first round.")] = 1
    cohort: (
        Annotated[float, Meta(gt=0, le=1, description="Devices asked per round: a share (0.1, 1.0) or a number (8).")]
        | Annotated[int, Meta(ge=1)]
    ) = 1.0
    quorum: Annotated[
        float, Meta(gt=0, le=1, description="Share of the cohort whose results close a round at once.")
    ] = 1.0
    over_select: Annotated[
        float, Meta(ge=0, le=4, description="Share of the cohort that is asked beside it; the first answers count.")
    ] = 0.0
    selection: Annotated[
        Literal["uniform", "fair"],
        Meta(description="Who is asked: anybody at random, or who was not asked for the longest time."),
    ] = "uniform"
    deadline_s: (
        Annotated[
            float,
            Meta(gt=0, description="Seconds that a device is waited for; auto: as predicted, and while it is alive."),
        ]
        | Literal["auto"]
    ) = "auto"
    deadline_limit_s: Annotated[
        float, Meta(gt=0, description="Seconds after which a task is over, however much its device is alive.")
    ] = 21600.0
    late: Annotated[
        Literal["refuse", "use", "discount"],
        Meta(
            description="Results that come after their round: refused, used in the round that is open then, or used "
            "by 1/sqrt(1 + rounds late)."
        ),
    ] = "refuse"
    max_staleness: Annotated[
        int, Meta(ge=0, description="Rounds by which a result may be late, where late results are used.")
    ] = 10
    mode: Annotated[
        Literal["rounds", "buffered"],
        Meta(description="buffered: devices get new tasks as they answer; each `buffer` results make a round."),
    ] = "rounds"
    buffer: Annotated[int, Meta(ge=1, description="Results that make a round in mode buffered.")] = 4
    concurrency: (
        Annotated[int, Meta(ge=1, description="Devices at work at a time in mode buffered; by default all.")] | None
    ) = None
    rejoin_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds to wait for devices that went offline: once all others answered, and before a round.",
        ),
    ] = 30.0
    evaluate_every: Annotated[
        int, Meta(ge=1, description="Rounds between evaluations on all devices; the last round always has one.")
    ] = 1
    evaluation: Annotated[
        Literal["newest", "pre_aggregation"],
        Meta(
            description="What devices test: the newest tensors of the server, or, on a device that trained in this "
            "round, its own before they were averaged."
        ),
    ] = "newest"
    accelerator: Annotated[
        str, Meta(description="Torch device of the server's training; auto takes CUDA where there is one.")
    ] = "auto"
    federation: Annotated[str, Meta(description="Name under which devices and coordinator meet at the broker.")] = (
        "home"
    )
    images: ImageConfig = field(default_factory=ImageConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    updates: UpdatesConfig = field(default_factory=UpdatesConfig)
    protection: ProtectionConfig = field(default_factory=ProtectionConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)

    def __post_init__(self) -> None:
        check_name(self.federation, "federation")
        if len(set(self.classes)) != len(self.classes):
            twice = sorted({name for name in self.classes if self.classes.count(name) > 1})
            raise ConfigError(f"classes: {twice[0]!r} is listed more than once")
        if len(self.classes) == 1:
            raise ConfigError(f"classes: a run needs at least two, there is only {self.classes[0]!r}")
        if isinstance(self.pretrained, str) and not Path(self.pretrained).is_file():
            raise ConfigError(f"pretrained = {self.pretrained!r}: there is no such file")
        self._check_method_and_model()

    def _check_method_and_model(self) -> None:
        """Now, not when the devices have come: on torch's device "meta" a model is made in no time and memory."""
        import torch  # seconds that `coordinator show` need not wait

        from fedvit.methods import build_model, make_method
        from fedvit.models import SMALL

        method = make_method(self.method, self.options)
        pretrained = self.model == SMALL and self.pretrained  # it has none, and says so
        with torch.device("meta"):
            vit = build_model(
                method,
                self.model,
                max(2, len(self.classes)),
                seed=0,
                options=self.model_options,
                pretrained=pretrained,
            )
            groups = method.groups(vit)
            self._check_late_results(method.server_rule(vit))
            roles = {role for role, names in groups.values() if names}
            self.protection.check(self.method, roles)
            collects = any(phase.collect for phase in method.phases(vit))
            self.privacy.check(self.method, roles, collects, self.protection)
            self._check_privacy_of_ways()
            for pattern, options in self.variants.items():
                try:
                    other = make_method(self.method, {**self.options, **options})
                    other.groups(vit)
                    if other.surgery() != method.surgery():
                        raise ConfigError(f"{options} adds other tensors to the model than the run does")
                except ConfigError as error:
                    raise ConfigError(f"variants: {pattern!r}: {error}") from None
            self._check_updates(method.groups(vit), any(phase.collect for phase in method.phases(vit)))

    def _check_updates(self, groups: dict[str, tuple[Role, list[str]]], collects: bool) -> None:
        """A codec of something that this method never sends is a mistake."""
        updates, who = self.updates, f"method {self.method!r}"
        back = [group for group, (role, names) in groups.items() if role.sent_back and names]
        for group in updates.up_groups:
            if group not in back:
                known = ", ".join(back) or "none"
                raise ConfigError(f"updates: up_groups: group {group!r} is not sent back; of {who} these are: {known}")
        down = any(role.from_server_each_round and names for role, names in groups.values())
        senders = {"up": bool(back), "features": collects, "down": down, "down_whole": down}
        for key, sends in senders.items():
            if getattr(updates, key) != NONE and not sends:
                raise ConfigError(f"updates: {key} = {getattr(updates, key)!r}: {who} sends nothing of that kind")

    def _check_privacy_of_ways(self) -> None:
        """What accounting and the aggregators say holds for whole rounds of plain updates only."""
        late = "mode = 'buffered'" if self.mode == "buffered" else f"late = {self.late!r}"
        if self.protection.aggregator != "mean" and (self.mode == "buffered" or self.late == "discount"):
            raise ConfigError(
                f"aggregator = {self.protection.aggregator!r} treats updates as equals, {late} discounts late ones"
            )
        if not self.privacy.noise_multiplier:
            return
        if self.mode == "buffered" or self.late != "refuse":
            raise ConfigError(f"{late}: noise_multiplier is accounted for in whole rounds without late results")
        if self.privacy.accounting == "sampled" and self.selection != "uniform":
            raise ConfigError(f"selection = {self.selection!r}: accounting = 'sampled' wants cohorts drawn at random")
        of_groups = {f"up_groups: {group}": codec for group, codec in self.updates.up_groups.items()}
        for key, codec in ({"up": self.updates.up} | of_groups).items():
            if codec != NONE:
                raise ConfigError(
                    f"updates: {key} = {codec!r}: what coding leaves out is sent later, beyond the clip that "
                    "noise_multiplier rests on"
                )

    def _check_late_results(self, rule: "ServerRule") -> None:
        """Whether this method's server can use what was made from an older state."""
        if self.mode == "buffered" and self.evaluation == "pre_aggregation":
            raise ConfigError("evaluation = 'pre_aggregation' tests devices of one round: it needs mode = 'rounds'")
        setting = "mode = 'buffered'" if self.mode == "buffered" else f"late = {self.late!r}"
        if self.mode == "rounds" and self.late == "refuse":
            return
        if why := rule.why_never_late:
            raise ConfigError(f"{setting} cannot be used with method {self.method!r}: {why}")
        if self.late == "discount" and not rule.discounts:
            raise ConfigError(f"{setting} cannot be used with method {self.method!r}: its uploads have no weight")

    def uses_late_results(self) -> bool:
        return self.mode == "buffered" or self.late != "refuse"

    def discount(self, staleness: int) -> float:
        """Weight of a result that was made from a state so many rounds old (FedBuff, arXiv:2106.06639, section 5)."""
        discounted = self.mode == "buffered" or self.late == "discount"
        return (1 + staleness) ** -0.5 if discounted else 1.0


TABLES: dict[str, type[Struct]] = {
    "images": ImageConfig,
    "budget": BudgetConfig,
    "updates": UpdatesConfig,
    "protection": ProtectionConfig,
    "privacy": PrivacyConfig,
}
"""Tables of a run's configuration, with keys of their own."""


class StartConfig(Struct, frozen=True):
    run: RunConfig
    broker: BrokerConfig


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError naming the file, and the line when it is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error


def make_config(values: dict[str, Any], where: str) -> StartConfig:
    """Validate what a file and flags said together.

    Raises ConfigError naming the key, its value and what is allowed.
    """
    values = dict(values)
    broker = values.pop("broker", {})
    if not isinstance(broker, dict):
        raise ConfigError(f'{where}: broker = {broker!r} must be a table: [broker] with broker = "..."')
    return StartConfig(_convert(values, RunConfig, where), _convert(broker, BrokerConfig, f"{where} [broker]"))


Config = TypeVar("Config", bound=Struct)


def _convert(values: dict[str, Any], kind: type[Config], where: str) -> Config:
    known = kind.__struct_fields__
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    for table, inner in TABLES.items() if kind is RunConfig else ():
        given = values.get(table)
        if isinstance(given, dict):
            values = {**values, table: _convert(given, inner, f"{where} [{table}]")}
    for key, value in values.items():  # one key at a time, so that the message can name key and value
        try:
            msgspec.convert({key: value} if not isinstance(value, Struct) else {}, _alone(kind, key))
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at")[0].lower().replace("`object`", "a table")
            raise ConfigError(f"{where}: {key} = {value!r}: {reason}") from None
    try:
        return msgspec.convert(values, kind)
    except (ConfigError, msgspec.ValidationError) as error:  # the latter from a ValueError or TypeError inside
        raise ConfigError(f"{where}: {error}") from None


def _alone(kind: type[Struct], key: str) -> type[Struct]:
    """A struct with only the one field, so that checks across fields do not run on half a config."""
    hint = {field.name: field.type for field in msgspec.structs.fields(kind)}[key]
    return msgspec.defstruct("Alone", [(key, hint, None)], kw_only=True)
