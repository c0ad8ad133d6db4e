"""Validation of hellos and results, before anything is stored or averaged."""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from fedvit.blobs import ALGORITHM
from fedvit.comparison import read_metrics
from fedvit.errors import BadPayload, PeerRefused
from fedvit.label_forms import LARGEST_OUTPUT, LabelForm
from fedvit.program import LABELS, Program, Role
from fedvit.quantities import format_bytes
from fedvit.tensors import Array, Tensors, check_finite, check_tensors, map_tensors, release_pages, unpack
from fedvit.updates import decode_one
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import MAX_CLASS_LIST_BYTES, SCORE_BINS, ClassCount, Hello, Manifest, Result
from fedvit.wire.transfer import chunk_bytes_within

_ERRORS = {"absolute_error", "squared_error"}
_NUMBERS = {"number", "squared_number"}
_SUMS: dict[str, tuple[set[str], ...]] = {
    "regression": (_ERRORS, _ERRORS | _NUMBERS),
    "segmentation": (set(), {"patches"}),
}
"""Sums that an evaluation has by task, with those of labels alone, which a device may keep, and without them."""
MOST_METRIC = 1e100
"""Largest metric: sums over all devices, and their squares, remain numbers."""
_OVERHEAD_BYTES = 64 * 1024
"""Allowance for the names and shapes in an upload's header, per hundred tensors."""
MIN_FREE_BYTES = 16 * 1024 * 1024
"""A disk with less free space counts as full: the run pauses until a file of this size can be written."""
_DIGEST = re.compile(rf"{ALGORITHM}:[0-9a-f]{{64}}")


def check_hello(hello: Hello, classes: tuple[str, ...]) -> None:
    """Raises PeerRefused if the device has no training images, or classes that are not among those of the run."""
    if hello.train_samples < 1:
        raise PeerRefused("FV1407", "it has no training images")
    unknown = sorted(set(hello.classes) - set(classes))
    if classes and unknown:
        which = f"class folder {unknown[0]!r} is" if len(unknown) == 1 else f"class folders {listed(unknown)} are"
        raise PeerRefused(
            "FV1404", f"its {which} not among this run's {len(classes)} classes: {', '.join(few(classes))}"
        )


def check_class_list(hello: Hello, described: Manifest, limits: BrokerLimits) -> None:
    """Raises PeerRefused if the description of a device's class list is invalid, or the broker does not take it."""
    if hello.classes:
        raise PeerRefused("FV1406", f"it names {len(hello.classes)} classes in its hello, and further ones in a blob")
    if not _DIGEST.fullmatch(described.digest):
        raise PeerRefused(
            "FV1406", f"the name {described.digest[:80]!r} of its list of classes is not a {ALGORITHM} digest"
        )
    if described.size > MAX_CLASS_LIST_BYTES:
        raise PeerRefused(
            "FV1406", f"its list of classes has {described.size} bytes, at most {MAX_CLASS_LIST_BYTES} are allowed"
        )
    if min(described.size, described.chunk) > chunk_bytes_within(limits.max_payload_bytes):
        raise PeerRefused(
            "FV1213",
            f"its list of classes has {described.size} bytes, and the broker takes max_payload_bytes = "
            f"{limits.max_payload_bytes}",
        )


def check_new_classes(hello: Hello, brought: Collection[str], most: int) -> None:
    """Raises PeerRefused if a device's classes cannot be added to those that other devices announced before.

    The operator did not choose these names: they determine the model's size, and appear in the record and on terminals.
    """
    if odd := [name for name in hello.classes if not name or not name.isprintable()]:
        raise PeerRefused("FV1406", f"its class folder {odd[0]!r} is not a valid class name: it must be printable")
    together = len({*brought, *hello.classes})
    if together > most:
        others = f"with those of other devices {together}, " if brought else ""
        raise PeerRefused(
            "FV1406",
            f"it has {len(hello.classes)} class folders, {others}and this run allows {most} from devices; "
            "its operator can list `classes`, or raise `max_classes`",
        )


def same_but_for_case(classes: Sequence[str]) -> list[str]:
    """Names that differ only in upper and lower case.

    >>> same_but_for_case(["Deer", "cat", "deer"])
    ['Deer', 'deer']
    """
    seen = Counter(name.casefold() for name in classes)
    return [name for name in classes if seen[name.casefold()] > 1]


def listed(names: Sequence[str]) -> str:
    """The first ten names, quoted."""
    return ", ".join(few([repr(name) for name in names[:10]] + list(names[10:])))


def few(names: Sequence[str]) -> list[str]:
    """The first ten names, and dots if there are more."""
    return [*names[:10], *(["..."] if len(names) > 10 else [])]


def check_result(result: Result, program: Program, hello: Hello) -> None:
    """Check a result's message, before its upload is fetched. Raises BadPayload."""
    for name, value in result.metrics.items():
        if not abs(value) <= MOST_METRIC:
            raise BadPayload("FV1505", f"metric {name!r} is {value}")
    if program.secure:
        if result.samples or result.metrics or result.by_class or result.upload:
            raise BadPayload("FV1505", "it has numbers that devices add up in secret")
        return
    announced = hello.train_samples if result.kind == "train" else hello.test_samples
    if not 0 <= result.samples <= announced:
        raise BadPayload("FV1505", f"it reports {result.samples} samples, the device announced {announced}")
    if result.kind == "train":
        _check_steps(result, program, announced)
    if result.kind == "evaluate" and not 0 <= result.metrics.get("correct", -1) <= result.samples:
        raise BadPayload("FV1505", f"it reports {result.metrics.get('correct')} correct answers of {result.samples}")
    if result.kind == "compare":
        _check_comparison(result)
    _check_sums(result, program)
    if result.by_class:
        if not program.evaluate.counts_classes:
            raise BadPayload("FV1505", "it has counts by class, which this program keeps on devices")
        _check_class_counts(result, program)
    wanted = bool(program.upload_form()) and result.kind == "train"
    if not wanted:
        if result.upload:
            raise BadPayload(
                "FV1505", f"the {result.kind} result has an upload of {result.upload.size} bytes, expected is none"
            )
        return
    if result.upload is None:
        raise BadPayload("FV1505", "the upload is missing")
    if not _DIGEST.fullmatch(result.upload.digest):
        raise BadPayload("FV1505", f"the upload's name {result.upload.digest!r} is not a {ALGORITHM} digest")
    limit = largest_upload_bytes(program, hello.train_samples)
    if result.upload.size > limit:
        raise BadPayload("FV1505", f"an upload of {result.upload.size} bytes, this program allows at most {limit}")


def _check_comparison(result: Result) -> None:
    """Raises BadPayload unless the counts of a comparison are those of its test images."""
    try:
        compared, _ = read_metrics(result.metrics)
    except ValueError as error:
        raise BadPayload("FV1505", str(error)) from None
    if compared.images != result.samples:
        raise BadPayload("FV1505", f"its counts are of {compared.images} images, it reports {result.samples} samples")


def _check_steps(result: Result, program: Program, announced: int) -> None:
    """Check the number of steps, by which server rules divide. An image that could not be decoded may cost a step."""
    planned = sum(program.steps_of(phase, announced) for phase in program.train)
    lost = (announced - result.samples) * sum(phase.repeats * phase.epochs for phase in program.train)
    least, steps = planned - lost, result.use.steps
    if steps and not least <= steps <= planned:  # 0: not counted
        raise BadPayload("FV1505", f"it reports {steps} steps, its images take {max(least, 1)} to {planned}")


def _check_sums(result: Result, program: Program) -> None:
    """Raises BadPayload unless an evaluation, and nothing else, has the sums of its task."""
    form, names = program.batch.labels, result.metrics.keys() & set().union(*chain(*_SUMS.values()))
    task = form.task if form and result.kind == "evaluate" else ""
    if names not in _SUMS.get(task, (set(),)):
        raise BadPayload(
            "FV1505", f"a {result.kind} result of this task has the sums {', '.join(sorted(names)) or '-'}"
        )
    if negative := sorted(name for name in names - {"number"} if result.metrics[name] < 0):
        raise BadPayload("FV1505", f"{negative[0]} is {result.metrics[negative[0]]:g}, it cannot be negative")
    if task == "regression" and result.by_class:
        raise BadPayload("FV1505", f"its counts of {len(result.by_class)} classes are of no regression")


def _check_class_counts(result: Result, program: Program) -> None:
    """Raises BadPayload unless the counts by class add up to those of the evaluation."""
    labels, classes = [count.label for count in result.by_class], len(program.classes)
    if result.kind != "evaluate":
        raise BadPayload("FV1505", f"a {result.kind} result has counts of {len(labels)} classes, expected is none")
    if labels != sorted(set(labels)) or labels[-1] >= classes:
        raise BadPayload("FV1505", f"its counts by class must be of different classes below {classes}, in order")
    if any(count.correct > count.images for count in result.by_class):
        raise BadPayload("FV1505", "a class has more correct answers than images")
    form = program.batch.labels
    if form and form.labels_patches:
        _check_patches(result, program)
        return
    if any(count.images > result.samples for count in result.by_class):
        raise BadPayload("FV1505", f"a class has more images than the {result.samples} of the evaluation")
    for count in result.by_class:
        _check_scores(count, result.samples)
    if form:  # an image may have several classes, or none
        if any(count.wrong for count in result.by_class):
            raise BadPayload("FV1505", "its counts have wrong answers of a class, in a task where images have sets")
        return
    for count in result.by_class:
        _check_wrong_answers(count, classes)
    images, correct = (sum(getattr(count, name) for count in result.by_class) for name in ("images", "correct"))
    if (images, correct) != (result.samples, result.metrics["correct"]):
        reported = f"{result.metrics['correct']:g} correct answers of {result.samples}"
        raise BadPayload(
            "FV1505", f"its counts by class are {correct} correct answers of {images}, it reports {reported}"
        )


def _check_patches(result: Result, program: Program) -> None:
    """Raises BadPayload unless the counts are those of the patches that have a class, without scores."""
    patches, all_patches = sum(count.images for count in result.by_class), result.samples * program.batch.patches
    if patches > all_patches:
        raise BadPayload("FV1505", f"its classes have {patches} patches, more than the {all_patches} of the evaluation")
    if any(count.scores for count in result.by_class) or patches != result.metrics.get("patches"):
        reported = result.metrics.get("patches")
        raise BadPayload(
            "FV1505", f"its counts by class are of {patches} patches without scores, it reports {reported}"
        )
    for count in result.by_class:
        if not count.images:
            raise BadPayload("FV1505", f"class {count.label} is counted without a patch")
        _check_wrong_answers(count, len(program.classes))


def _check_scores(count: ClassCount, samples: int) -> None:
    """Raises BadPayload unless the scores of a class are none, or those of all images."""
    if not count.scores:
        return
    bins = [place for place, _, _ in count.scores]
    if bins != sorted(set(bins)) or bins[-1] >= SCORE_BINS:
        raise BadPayload("FV1505", f"scores of a class must be in different bins below {SCORE_BINS}, in order")
    of_class, others = (sum(entry[side] for entry in count.scores) for side in (1, 2))
    if (of_class, others) != (count.images, samples - count.images):
        raise BadPayload(
            "FV1505",
            f"a class has scores of {of_class} and {others} images, and {count.images} of the {samples} are of it",
        )


def _check_wrong_answers(count: ClassCount, classes: int) -> None:
    """Raises BadPayload unless they are none, or all wrong answers of the class."""
    others = [other for other, _ in count.wrong]
    if others != sorted(set(others)) or any(other >= classes or other == count.label for other in others):
        raise BadPayload("FV1505", f"the wrong answers of a class must be different classes below {classes}, in order")
    given, wrong = sum(images for _, images in count.wrong), count.images - count.correct
    if others and given != wrong:
        raise BadPayload("FV1505", f"a class has {wrong} wrong answers, {given} are listed")


def check_free_space(upload: Manifest, free_bytes: int | None) -> None:
    """Refuse an upload that would fill the disk: one device must not stop the whole run. Raises BadPayload.

    On a disk that is already full no upload is refused: the run pauses when it fetches, and devices keep their results.
    """
    if free_bytes is not None and MIN_FREE_BYTES <= free_bytes < upload.size:
        free = format_bytes(free_bytes)
        raise BadPayload(
            "FV1506", f"an upload of {upload.size} bytes ({format_bytes(upload.size)}), the coordinator has {free} free"
        )


def largest_upload_bytes(program: Program, train_samples: int) -> int:
    """Largest size of a valid upload of this Program, in bytes."""
    expected = program.upload_form()
    # a sample is collected at most once per epoch
    most_rows = train_samples * max((phase.epochs for phase in program.train), default=0)
    size = _largest_header_bytes(program)
    for shape, dtype in expected.values():
        lengths = [most_rows if length is None else length for length in shape]
        size += math.prod(lengths) * np.dtype(dtype).itemsize
    return size


def _largest_header_bytes(program: Program) -> int:
    """Largest header (names and shapes) of a valid upload, in bytes."""
    return _OVERHEAD_BYTES * (1 + len(program.upload_form()) // 100)


def check_upload(upload: Path | bytes, program: Program, what: str) -> Tensors:
    """Check an upload: names, shapes and dtypes as in the Program, finite values, also after decoding, labels in range.

    Returns its encoded tensors. A file is mapped, since it may be larger than the memory. A header is only parsed if it
    is no longer than a valid one. Raises BadPayload whose message begins with `what`.
    """
    try:
        tensors = _opened(upload, _largest_header_bytes(program))
    except BadPayload as error:
        raise BadPayload(error.code, f"{what}: {error}") from error
    local = {name for group in program.with_role(Role.LOCAL) for name in program.names(group)}
    if leaked := sorted(name for name in tensors if name.partition("#")[0] in local):
        raise BadPayload("FV1505", f"{what}: it holds local tensor {leaked[0]!r}, which must not leave the device")
    check_tensors(tensors, program.upload_form(), what)
    _check_decodes(tensors, {name: spec.shape for name, spec in program.tensors.items()}, what)
    if LABELS in tensors:
        labels = tensors[LABELS]
        for phase in program.train:
            if phase.collect and len(tensors[phase.collect.output]) != len(labels):
                rows = len(tensors[phase.collect.output])
                raise BadPayload("FV1505", f"{what}: {rows} rows of {phase.collect.output!r} for {len(labels)} labels")
        if form := program.batch.labels:
            _check_other_labels(labels, form, what)
        elif len(labels) and not (labels.min() >= 0 and labels.max() < len(program.classes)):
            low, high = int(labels.min()), int(labels.max())
            raise BadPayload("FV1505", f"{what}: labels {low} to {high}, the run has {len(program.classes)} classes")
    release_pages(tensors.values())  # the server step reads them again
    return tensors


def _check_other_labels(labels: Array, form: LabelForm, what: str) -> None:
    """Raises BadPayload unless the labels of features are sets of classes, or numbers that devices scaled."""
    if form.task == "multi_label":
        if not np.isin(labels, (0.0, 1.0)).all():
            raise BadPayload("FV1505", f"{what}: labels other than 0 and 1 in sets of classes")
    elif (largest := float(np.abs(labels.astype(np.float64)).max(initial=0))) > LARGEST_OUTPUT:
        raise BadPayload("FV1505", f"{what}: a label is {largest:.3g} half ranges from the middle")


def _opened(upload: Path | bytes, largest_header_bytes: int) -> Tensors:
    """Open an upload; its announced header length is checked first, since a parsed header is many times larger."""
    if isinstance(upload, bytes):
        _check_header(upload[:8], len(upload), largest_header_bytes)
        return unpack(upload)
    try:
        with upload.open("rb") as opened:
            _check_header(opened.read(8), upload.stat().st_size, largest_header_bytes)
        return map_tensors(upload)
    except FileNotFoundError:
        raise BadPayload("FV1505", f"upload {upload.name} is missing") from None


def _check_header(first: bytes, size: int, largest_header_bytes: int) -> None:
    header_bytes = int.from_bytes(first, "little")
    if largest_header_bytes < header_bytes <= size:
        raise BadPayload(
            "FV1505", f"names and shapes of {header_bytes} bytes, this program's take at most {largest_header_bytes}"
        )


def _check_decodes(tensors: Tensors, shapes: dict[str, tuple[int, ...]], what: str) -> None:
    """Check the decoded values one tensor at a time, to save memory."""
    coded = {part.partition("#")[0] for part in tensors if "#" in part}
    for name in sorted(coded):
        try:
            value = decode_one(name, tensors, shapes.get(name))
        except BadPayload as error:
            raise BadPayload(error.code, f"{what}: {error}") from error
        check_finite({name: value}, what)


def check_labels(labels: Array, program: Program, hello: Hello, what: str) -> None:
    """Refuse classes that the device did not announce, and more of one class than the median sampler can choose.

    At least half of a device's C classes have as many images as their median or more, so that the median is at most
    its images / ceil(C / 2); of one class no more than `threshold` times the median is taken.
    Where a sample has other labels, all count as of one class. Raises BadPayload whose message begins with `what`.
    """
    if form := program.batch.labels:
        counts = np.array([len(labels)])
        held = np.flatnonzero(np.asarray(labels, np.float64).sum(axis=0)).tolist()  # sums of 0 and 1
        present = [program.classes[place] for place in held] if form.task == "multi_label" else list(program.classes)
    else:
        counts = np.bincount(labels.astype(np.int64), minlength=len(program.classes))
        present = [program.classes[label] for label in np.flatnonzero(counts)]
    if unannounced := sorted(set(present) - set(hello.classes)):
        raise BadPayload("FV1505", f"{what}: it holds class {unannounced[0]!r}, which the device did not announce")
    threshold = max((phase.collect.threshold for phase in program.train if phase.collect), default=1.0)
    classes = 1 if form else len(present)
    most = max(1, int(threshold * (hello.train_samples // max(1, -(-classes // 2)))))
    if len(labels) and counts.max() > most:
        name = program.classes[int(counts.argmax())]
        raise BadPayload(
            "FV1505",
            f"{what}: {counts.max()} values of class {name!r}; of {hello.train_samples} images in {len(present)} "
            f"classes at most {most} of one are chosen",
        )
