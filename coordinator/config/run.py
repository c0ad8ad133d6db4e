"""One run: its own keys, and its tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct, field

from coordinator.config.alerts import AlertsConfig
from coordinator.config.blobs import BlobsConfig
from coordinator.config.budget import BudgetConfig
from coordinator.config.images import ImageConfig
from coordinator.config.labels import parse_labels
from coordinator.config.modes import MODES
from coordinator.config.privacy import PrivacyConfig
from coordinator.config.promote import PromoteConfig
from coordinator.config.robust import RobustConfig
from coordinator.config.selection import READ_NO_ANSWERS, SELECTIONS
from coordinator.config.stop import StopConfig
from coordinator.config.sums import SumsConfig
from coordinator.config.trackers import TrackersConfig
from coordinator.config.updates import UpdatesConfig
from fedvit.errors import ConfigError
from fedvit.label_forms import LabelForm, TaskName
from fedvit.roles import NONE, ProductPrecision
from fedvit.wire.topics import check_name

if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[tuple(MODES)]


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run. Raises ConfigError on construction if keys are wrong or do not fit together.

    `coordinator.compute.planning.checks`, which needs torch, checks that they fit the method and the model.
    """

    method: Annotated[str, Meta(description="Federated method.")] = "eftvit"
    options: Annotated[
        dict[str, Any], Meta(description="Hyperparameter of the method.", extra={"flags": ["option", "o"]})
    ] = field(default_factory=dict)
    variants: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="Other hyperparameters for some devices: a pattern of device names, then options.",
            extra={"flags": ["variant"], "metavar": "DEVICES:KEY=VALUE"},
        ),
    ] = field(default_factory=dict)
    model: Annotated[str, Meta(description="Name of a timm Vision Transformer or ResNet, or of a small model.")] = (
        "vit_small_images"
    )
    model_options: Annotated[
        dict[str, Any],
        Meta(description="Option of the model, e.g. image_size or depth.", extra={"flags": ["model-option"]}),
    ] = field(default_factory=dict)
    pretrained: Annotated[
        bool | str,
        Meta(description="true for timm's weights, or the path of a checkpoint.", extra={"metavar": "true|FILE"}),
    ] = False
    start_from: Annotated[
        str | None, Meta(description="Begin with the final tensors of this earlier run in the same folder.")
    ] = None
    server_data: Annotated[
        str | None,
        Meta(
            description="Folder of images on the server, for methods that distil, such as feddf; labels are not read.",
            extra={"metavar": "PATH"},
        ),
    ] = None
    classes: Annotated[
        tuple[str, ...],
        Meta(
            description="Class of the run; by default all classes of the first devices.",
            extra={"flags": ["class"], "metavar": "NAME"},
        ),
    ] = ()
    task: Annotated[
        TaskName,
        Meta(description="Label of an image: a class, a set of classes, a number, or a class for each patch."),
    ] = "classification"
    number_range: Annotated[
        tuple[Annotated[float, Meta(ge=-1e9, le=1e9)], ...],
        Meta(
            max_length=2,
            description="Least, then greatest number of task regression.",
            extra={"flags": ["number-range"], "metavar": "NUMBER"},
        ),
    ] = ()
    max_classes: Annotated[
        int,
        Meta(
            ge=2,
            le=100_000,
            description="Most classes that the first devices may announce together, if none are listed.",
        ),
    ] = 1000
    start_round: (
        Annotated[int, Meta(ge=1, description="Round of the earlier run whose tensors are used.")]
        | Annotated[Literal["last", "best"], Meta(description="By default the last.")]
    ) = "last"
    rounds: Annotated[
        int, Meta(ge=0, description="Rounds to train; 0: devices only test the tensors of --start-from.")
    ] = 10
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1, description="Every random draw of the run follows from it.")] = 0
    devices: Annotated[int, Meta(ge=1, description="Devices to wait for before the first round.")] = 1
    devices_where: Annotated[
        str,
        Meta(description="Labels of the devices that the run selects: site=berlin,board=rpi5; by default all devices."),
    ] = ""
    min_device_version: (
        Annotated[
            str,
            Meta(
                pattern=r"^\d+(\.\d+){0,3}$",
                description="Oldest version of the device's software that the run admits, e.g. 0.2; by default any.",
            ),
        ]
        | None
    ) = None
    cohort: (
        Annotated[float, Meta(gt=0, le=1, description="Devices asked per round: a share (0.1, 1.0) or a number (8).")]
        | Annotated[int, Meta(ge=1)]
    ) = 1.0
    quorum: Annotated[
        float, Meta(gt=0, le=1, description="Share of the cohort whose results close a round at once.")
    ] = 1.0
    over_select: Annotated[
        float,
        Meta(ge=0, le=4, description="Additional devices to ask, as a share of the cohort; the first answers count."),
    ] = 0.0
    selection: Annotated[
        str,
        Meta(
            description="Which devices are asked: uniformly random, those not asked for the longest time, those with "
            "high losses, those with high losses that are fast, or by a package's selector.",
            extra={"metavar": "|".join((*SELECTIONS, "NAME"))},
        ),
    ] = "uniform"
    deadline_s: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=1e9,
                description="Seconds to wait for a device; auto: the predicted time, extended while it makes progress.",
            ),
        ]
        | Literal["auto"]
    ) = "auto"
    deadline_limit_s: Annotated[
        float, Meta(gt=0, description="Seconds after which a task ends, even if its device makes progress.")
    ] = 21600.0
    late: Annotated[
        Literal["refuse", "use", "discount"],
        Meta(
            description="Results that arrive after their round: refused, used in the open round, or used there with "
            "weight 1/sqrt(1 + rounds late)."
        ),
    ] = "refuse"
    max_staleness: Annotated[
        int, Meta(ge=0, description="Most rounds by which a result may be late, if late results are used.")
    ] = 10
    mode: Annotated[
        ModeName,
        Meta(description="buffered: devices get a new task after each answer; every `buffer` results make a round."),
    ] = "rounds"
    buffer: Annotated[int, Meta(ge=1, description="Results that make a round in mode buffered.")] = 4
    concurrency: (
        Annotated[int, Meta(ge=1, description="Most devices at work at a time in mode buffered; by default all.")]
        | None
    ) = None
    rejoin_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds to wait for devices that went offline: after all others answered, and before a round.",
        ),
    ] = 30.0
    secure: Annotated[
        bool, Meta(description="Add up the devices' results in secret: the server learns their sum alone.")
    ] = False
    evaluate_every: Annotated[
        int, Meta(ge=1, description="Rounds between evaluations on all devices; the last round always has one.")
    ] = 1
    evaluation_cohort: (
        Annotated[
            float, Meta(gt=0, le=1, description="Devices asked per evaluation: a share (0.1, 1.0) or a number (8).")
        ]
        | Annotated[int, Meta(ge=1)]
    ) = 1.0
    evaluation_quorum: Annotated[
        float, Meta(gt=0, le=1, description="Share of the evaluation's cohort whose results close it at once.")
    ] = 1.0
    auc: Annotated[
        bool, Meta(description="Devices count scores of their answers by class, too, from which AUC follows.")
    ] = False
    evaluation: Annotated[
        Literal["newest", "pre_aggregation"],
        Meta(
            description="Tensors that devices test: the newest ones of the server, or, on a device that trained in "
            "this round, its own before they were averaged."
        ),
    ] = "newest"
    backup_every: Annotated[
        int,
        Meta(
            ge=0,
            description="Fewest rounds between copies of the record, of which the last two are kept; 0: neither copies "
            "nor notes.",
        ),
    ] = 1
    keep_rounds: (
        Annotated[
            int, Meta(ge=1, description="Number of newest rounds whose details stay in the record; by default all.")
        ]
        | None
    ) = None
    keep_runs: (
        Annotated[int, Meta(ge=0, description="Number of finished runs that `coordinator gc` keeps; by default all.")]
        | None
    ) = None
    accelerator: Annotated[
        str,
        Meta(
            description="Torch device of the server's training: cpu, cuda, cuda:1; cuda:0,1 or cpu:2: two processes. "
            "auto: CUDA if available."
        ),
    ] = "auto"
    server_precision: Annotated[
        ProductPrecision,
        Meta(description="Precision of matrix products in the server's training; weights are always float32."),
    ] = "fp32"
    federation: Annotated[str, Meta(description="Name under which devices and coordinator meet at the broker.")] = (
        "home"
    )
    images: ImageConfig = field(default_factory=ImageConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    updates: UpdatesConfig = field(default_factory=UpdatesConfig)
    robust: RobustConfig = field(default_factory=RobustConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    sums: SumsConfig = field(default_factory=SumsConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    blobs: BlobsConfig = field(default_factory=BlobsConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    promote: PromoteConfig | None = None  # None: devices compare and use nothing
    stop: StopConfig = field(default_factory=StopConfig)

    def __post_init__(self) -> None:
        check_name(self.federation, "federation")
        parse_labels(self.devices_where)
        if len(set(self.classes)) != len(self.classes):
            twice = sorted({name for name in self.classes if self.classes.count(name) > 1})
            raise ConfigError("FV1008", f"classes: {twice[0]!r} is listed more than once")
        self._check_task()
        if len(self.classes) == 1 and self.task != "regression":
            raise ConfigError("FV1008", f"classes: a run needs at least two, there is only {self.classes[0]!r}")
        if isinstance(self.pretrained, str) and not Path(self.pretrained).is_file():
            raise ConfigError("FV1009", f"pretrained = {self.pretrained!r}: there is no such file")
        if self.promote and self.secure:
            raise ConfigError(
                "FV1024",
                "secure = true hides the counts of single devices, on which [promote] compares models: leave one out",
            )
        if self.rounds == 0 and self.start_from is None:
            raise ConfigError("FV1028", "rounds = 0: devices test the tensors of an earlier run, name it by start_from")
        if self.stop.epsilon is not None and not self.privacy.noise_multiplier:
            raise ConfigError("FV1028", f"stop: epsilon = {self.stop.epsilon:g} needs a noise_multiplier in [privacy]")

    @property
    def label_form(self) -> LabelForm | None:
        """Labels of another task than one class for each image; None: that task."""
        if self.task == "classification":
            return None
        low, high = self.number_range or (0.0, 1.0)
        return LabelForm(task=self.task, low=low, high=high)

    @property
    def least_classes(self) -> int:
        """Fewest classes of the task; a regression has the name of its number."""
        return 1 if self.task == "regression" else 2

    def _check_task(self) -> None:
        """Raise ConfigError if keys do not fit the task."""
        if self.task == "regression":
            if len(self.number_range) != 2 or self.number_range[0] >= self.number_range[1]:
                raise ConfigError(
                    "FV2490",
                    f"number_range = {list(self.number_range)}: task regression needs least and greatest number",
                )
            if len(self.classes) > 1:
                raise ConfigError("FV2490", f"classes: task regression has one number, not {list(self.classes)}")
        elif self.number_range:
            raise ConfigError("FV2490", f"number_range is for task regression, the task is {self.task}")
        if self.task == "classification":
            return
        unfit = {"secure = true": self.secure, "[promote]": self.promote, "server_data": self.server_data}
        if key := next((key for key, is_set in unfit.items() if is_set), None):
            raise ConfigError("FV2490", f"{key} needs one class for each image, the task is {self.task}: leave it out")
        if self.task == "segmentation" and (self.images.crop_padding or self.images.flip):
            raise ConfigError(
                "FV2490",
                "[images]: masks are not cropped or mirrored with pictures: leave crop_padding and flip out",
            )

    def check_privacy_of_modes(self) -> None:
        """Raise ConfigError if the mode or a codec violates the assumptions of the aggregator or of the accounting."""
        late = self.late_setting()
        if self.robust.aggregator != "mean" and self.discounts_late_results():
            raise ConfigError(
                "FV1013",
                f"aggregator = {self.robust.aggregator!r} weighs updates equally, but {late} discounts late ones",
            )
        if not self.privacy.noise_multiplier:
            return
        if self.privacy.clip_quantile is not None and not self.secure:
            raise ConfigError(
                "FV1014",
                f"clip_quantile = {self.privacy.clip_quantile}: updates are counted in secure sums; set secure = true",
            )
        if self.uses_late_results():
            raise ConfigError(
                "FV1014", f"{late}: noise_multiplier is accounted for in whole rounds without late results"
            )
        if self.selection not in READ_NO_ANSWERS:
            raise ConfigError(
                "FV1014",
                f'selection = {self.selection!r} reads losses, which noise_multiplier does not cover: set "uniform" '
                'or "fair"',
            )
        if self.privacy.accounting == "sampled" and self.selection != "uniform":
            raise ConfigError(
                "FV1014", f"selection = {self.selection!r}: accounting = 'sampled' requires cohorts drawn at random"
            )
        of_groups = {f"up_groups: {group}": codec for group, codec in self.updates.up_groups.items()}
        for key, codec in ({"up": self.updates.up} | of_groups).items():
            if codec != NONE:
                raise ConfigError(
                    "FV1014",
                    f"updates: {key} = {codec!r}: the error feedback of a codec exceeds the clip on which "
                    "noise_multiplier is based",
                )

    def asks_cohorts(self) -> bool:
        """Return whether a round has the results of the cohort that it asked."""
        return MODES[self.mode].asks_cohorts

    def uses_late_results(self) -> bool:
        return MODES[self.mode].discounts_late_results or self.late != "refuse"

    def discounts_late_results(self) -> bool:
        return MODES[self.mode].discounts_late_results or self.late == "discount"

    def late_setting(self) -> str:
        """Return the key that decides on late results, with its value."""
        if MODES[self.mode].discounts_late_results:
            return f"mode = {self.mode!r}"
        return f"late = {self.late!r}"

    def discount(self, staleness: int) -> float:
        """Weight of a result made from a state `staleness` rounds old (FedBuff, arXiv:2106.06639, section 5)."""
        return (1 + staleness) ** -0.5 if self.discounts_late_results() else 1.0


TABLES: dict[str, type[Struct]] = {
    "images": ImageConfig,
    "budget": BudgetConfig,
    "updates": UpdatesConfig,
    "robust": RobustConfig,
    "privacy": PrivacyConfig,
    "sums": SumsConfig,
    "trackers": TrackersConfig,
    "blobs": BlobsConfig,
    "alerts": AlertsConfig,
    "promote": PromoteConfig,
    "stop": StopConfig,
}
"""Tables of a run's configuration, with keys of their own."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Model and method": (
        "method", "options", "variants", "model", "model_options", "pretrained", "start_from", "start_round",
        "server_data", "task", "number_range", "classes", "max_classes", "seed", "accelerator", "server_precision",
    ),
    "Rounds and devices": (
        "rounds", "devices", "devices_where", "min_device_version", "federation", "cohort", "quorum", "over_select",
        "selection", "deadline_s", "deadline_limit_s", "late", "max_staleness", "mode", "buffer", "concurrency",
        "rejoin_grace_s", "secure",
    ),
    "Evaluation": ("evaluate_every", "auc", "evaluation", "evaluation_cohort", "evaluation_quorum"),
    "Storage": ("backup_every", "keep_rounds", "keep_runs"),
}  # fmt: skip
"""Keys outside of tables, by section, as `--help` shows them."""
