"""The description of a bundle: `card.json` for programs, `README.md` for people. Missing figures are None, never 0."""

from msgspec import Struct

from export.bundle.calibration import Calibration
from fedvit.label_forms import LabelForm
from fedvit.program import Batch, Channel, Deviation, Pixels

CARD_VERSION = 1


class Preprocessing(Struct, frozen=True, kw_only=True):
    """The steps from a picture to the model's input; `preprocessing.json`."""

    image_size: Pixels
    patch_size: Pixels
    mean: tuple[Channel, Channel, Channel]  # of red, green, blue on the scale 0..1
    std: tuple[Deviation, Deviation, Deviation]
    colours: str = "RGB"
    layout: str = "NCHW"
    resize: str = "both sides to image_size, bilinear (Pillow); nothing is cut off, other shapes are squeezed"
    orientation: str = "upright, as the EXIF tag says"
    formula: str = "(value / 255 - mean) / std"
    labels: LabelForm | None = None  # of a task without one class for each image

    @classmethod
    def of(cls, batch: Batch) -> "Preprocessing":
        return cls(
            image_size=batch.image_size,
            patch_size=batch.patch_size,
            mean=batch.mean,
            std=batch.std,
            labels=batch.labels,
        )

    @property
    def batch(self) -> Batch:
        """The same as a Program's `Batch`, for one image at a time."""
        return Batch(
            image_size=self.image_size,
            patch_size=self.patch_size,
            batch_size=1,
            mean=self.mean,
            std=self.std,
            labels=self.labels,
        )


class MeasuredAccuracy(Struct, frozen=True):
    """Right answers on images whose label is known."""

    correct: int | float
    images: int

    @property
    def share(self) -> float:
        return self.correct / self.images


class Parity(Struct, frozen=True):
    """Distance of a file from the run's own predict graph: largest difference over the largest value."""

    difference: float
    tolerance: float
    images: int


class Agreement(Struct, frozen=True):
    """Comparison of a file's answers with those of the fp32 file on the same pictures."""

    equal_answers: float  # share of the pictures
    largest_logit_difference: float
    images: int


class Latency(Struct, frozen=True):
    """One picture at a time, without reading it from disk."""

    median_s: float
    runs: int
    threads: int


class FileCard(Struct, frozen=True, kw_only=True):
    file: str
    size_bytes: int
    weights: str  # their type in the file
    tensors: int
    tensors_not_float32: int
    parity: Parity
    agreement: Agreement | None  # None for fp32 itself, and where there is no fp32 file
    accuracy: MeasuredAccuracy | None
    latency: Latency


class Origin(Struct, frozen=True, kw_only=True):
    """The origin of a model."""

    run: str
    method: str
    model: str
    round: int  # the last one that its tensors know of
    device: str | None  # the device of a personal model; None: a common model
    made_by: str  # program and version
    personal_tensors: int = 0  # local tensors of the device
    adapted: bool = False  # tuned on the device's training images
    remembered: int = 0  # training images whose features the model holds


class Reported(Struct, frozen=True, kw_only=True):
    """Accuracy as the devices measured it during the run."""

    accuracy: float
    devices: int
    round: int
    protocol: str | None


class Training(Struct, frozen=True, kw_only=True):
    """The data that a model was trained with, and what protected it."""

    devices: int
    train_images: int
    test_images: int
    policy: tuple[str, ...] = ()  # what limited the data that left devices, in words


class BundleMachine(Struct, frozen=True):
    """The machine on which a bundle was made and measured."""

    machine: str  # x86_64, aarch64, ...
    cores: int
    onnxruntime: str


class Card(Struct, frozen=True, kw_only=True):
    v: int = CARD_VERSION
    origin: Origin
    classes: int
    files: dict[str, FileCard]  # by precision
    pictures: str  # what parity, agreement and accuracy were measured on
    reported: Reported | None
    machine: BundleMachine
    training: Training | None = None
    licence: str | None = None  # as its writer named it; None: not named
    calibration: Calibration | None = None  # None: too few test images


def readme(card: Card, labels: tuple[str, ...], preprocessing: Preprocessing) -> str:
    """The card for a person."""
    origin, side = card.origin, preprocessing.image_size
    whose = f"the model of device {origin.device}" if origin.device else "one model for all devices"
    lines = [
        f"# {origin.model}, trained by {origin.method}",
        "",
        f"Run {origin.run}, after round {origin.round}; {whose}. Made by {origin.made_by}.",
        *describe_personal(origin),
        *describe_training(card.training, card.licence, card.reported),
        "",
        "## Files",
        "",
        "| precision | file | bytes | accuracy | equal answers | largest logit difference | seconds per image |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row(precision, entry) for precision, entry in card.files.items()),
        "",
        f"Measured on {card.pictures}. Equal answers and differences are against the fp32 file. Seconds: median, one "
        f"image at a time, {_threads(card)}, on {card.machine.machine} with {card.machine.cores} cores, onnxruntime "
        f"{card.machine.onnxruntime}.",
        *_describe_calibration(card.calibration),
        "",
        "How the weights lie in the files (all calculations are float32):",
        "",
        *(
            f"- {precision}: {entry.weights} ({entry.tensors_not_float32} of {entry.tensors} tensors are not float32)"
            for precision, entry in card.files.items()
        ),
        "",
        "Every file was compared with the run's own predict graph; difference over the largest value: "
        + ", ".join(
            f"{precision} {entry.parity.difference:.1e} (allowed {entry.parity.tolerance:.0e})"
            for precision, entry in card.files.items()
        )
        + ".",
        "",
        "## Use",
        "",
        "```sh",
        "edge-client predict --bundle . photo.jpg",
        "```",
        "",
        f"or any ONNX runtime: input `image` (batch, 3, {side}, {side}) float32, outputs "
        f"{_describe_outputs(card, preprocessing)}. A picture is made {preprocessing.orientation.split(',')[0]}, "
        f"RGB, and resized: {preprocessing.resize}; then {preprocessing.formula} with mean "
        f"{list(preprocessing.mean)} and std {list(preprocessing.std)}, red first. `labels.json` names the classes in "
        "order, `preprocessing.json` holds these figures.",
        "",
        f"Classes: {', '.join(labels[:20])}{', ...' if len(labels) > 20 else ''}",
        "",
    ]
    return "\n".join(lines)


def _describe_outputs(card: Card, preprocessing: Preprocessing) -> str:
    form = preprocessing.labels
    if form is None:
        return f"`logits` and `probabilities` (batch, {card.classes})"
    if form.labels_patches:
        return f"`logits` and `probabilities` (batch, patches, {card.classes}), of each patch by rows"
    if form.task == "multi_label":
        return (
            f"`logits` and `probabilities` (batch, {card.classes}), of each class by itself: several may be above 0.5"
        )
    return f"`logits` (batch, 1), -1 at {form.low:g} and 1 at {form.high:g}, and `numbers` (batch, 1) in that range"


def summary(card: Card) -> list[str]:
    """One line for each file, for a terminal."""
    lines = []
    for entry in card.files.values():
        parts = [
            f"{entry.file:<15} {entry.size_bytes / 1e6:>8.2f} MB",
            f"{1e3 * entry.latency.median_s:>7.1f} ms an image",
        ]
        parts.append(f"accuracy {entry.accuracy.share:.3f}" if entry.accuracy else "accuracy not measured")
        if entry.agreement:
            parts.append(f"answers as fp32 {entry.agreement.equal_answers:.3f}")
        lines.append("   ".join(parts))
    return lines


def describe_personal(origin: Origin) -> list[str]:
    """Say what a model holds of a device alone."""
    held = {
        f"{origin.personal_tensors} tensors that the device trained for itself alone": origin.personal_tensors,
        "tensors tuned on the device's own images": origin.adapted,
        f"features and labels of {origin.remembered} of the device's images": origin.remembered,
    }
    named = [what for what, there in held.items() if there]
    if not named:
        return []
    return ["", f"**Personal.** It holds {', '.join(named)}: nothing of this left the device during the run."]


def _row(precision: str, entry: FileCard) -> str:
    accuracy = "not measured"
    if entry.accuracy:
        accuracy = f"{entry.accuracy.share:.3f} ({entry.accuracy.correct} of {entry.accuracy.images})"
    equal, difference = "", ""
    if entry.agreement:
        equal = f"{entry.agreement.equal_answers:.3f} of {entry.agreement.images}"
        difference = f"{entry.agreement.largest_logit_difference:.2g}"
    cells = (precision, entry.file, entry.size_bytes, accuracy, equal, difference, f"{entry.latency.median_s:.4f}")
    return f"| {' | '.join(map(str, cells))} |"


def _threads(card: Card) -> str:
    [threads, *_] = [entry.latency.threads for entry in card.files.values()]
    return f"{threads} thread{'s' if threads > 1 else ''}"


def describe_training(training: Training | None, licence: str | None, reported: Reported | None) -> list[str]:
    """Say what a model was trained with, what protected it, how good it was, and under which licence it is."""
    lines = []
    if training:
        images = f"{training.train_images} images to train and {training.test_images} to test"
        whose = f"{training.devices} devices" if training.devices != 1 else "one device"
        lines += ["", f"Data: {whose} with {images}."]
        lines += [f"Policy: {'; '.join(training.policy)}."] if training.policy else []
    lines += _report_accuracy(reported)
    return [*lines, "", f"Licence: {licence or 'not named'}."]


def _describe_calibration(calibration: Calibration | None) -> list[str]:
    if calibration is None:
        return []
    return [
        "",
        f"Confidences: softmax of the logits divided by {calibration.temperature:g}. An answer below "
        f"{calibration.unsure_below:g} is unsure. Both were chosen on {calibration.images} test images.",
    ]


def _report_accuracy(reported: Reported | None) -> list[str]:
    if reported is None:
        return []
    whose = f"mean of {reported.devices} devices" if reported.devices > 1 else "one device"
    how = f" ({reported.protocol})" if reported.protocol else ""
    return ["", f"Accuracy during the run, round {reported.round}, {whose}: {reported.accuracy:.3f}{how}."]
