"""The model that answers, and the change to another one between two pictures.

A thread looks at the device's list. It opens the promoted model beside the one that answers, then replaces it: a
request keeps the model that it began with. A new model is on probation. If three starts with it fail, or its confidence
is below the band of the model before it, the list is rolled back.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from edge_client.serving.drift import DriftWatch, Observation, try_reference
from edge_client.storage.models import DeviceModel, DeviceModels
from edge_client.storage.serving import ServedAnswers, ServingStatus, read_serving, write_serving
from export.bundle.read import Bundle, ClassProbability, read_reference
from export.bundle.reference import PictureReference
from fedvit.data.images import Floats, Pixels
from fedvit.engine import trim_memory
from fedvit.errors import BadPayload, ConfigError, FedvitError, StorageFailed, describe_fault
from fedvit.transport.backoff import Backoff

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Between two looks at the list."""
WRITE_EVERY_S = 2.0
SAVE_EVERY_S = 30.0
"""Between two writes of the statistics of drift."""
MOST_STARTS = 3
"""Starts with a new model that may fail."""
PROVEN_PICTURES = 20
"""Answers after which a start with a model has not failed."""
PROVEN_S = 60.0
"""Time of a start after which one answer is enough: a camera may see little between two power cuts."""
LONGEST_ANSWER_S = 30.0
"""Time of one answer after which the engine hangs: the service manager may then start the program again."""
PROBATION = 500
"""Answers of a new model whose confidence is compared with the model before it."""
BAND_PICTURES = 50
"""Answers of either model that a comparison of their confidences needs."""
BAND_DEVIATIONS = 4.0
LEAST_BAND = 0.1


class Classification(NamedTuple):
    """The answer to one picture."""

    model: str
    label: str
    confidence: float
    is_unsure: bool
    answers: list[ClassProbability]
    seconds: float


class OpenModel(NamedTuple):
    """A model that can answer."""

    entry: DeviceModel
    bundle: Bundle

    @property
    def name(self) -> str:
        return self.entry.name


class NoModel(FedvitError):
    """No model of this device is promoted yet."""

    general_code = "FV1492"


def observe(bundle: Bundle, pixels: Pixels) -> tuple[Observation, Floats]:
    """Return a model's answer to a picture, and its calibrated probabilities.

    Raises BadPayload, and any other exception for files that do not belong together.
    """
    run = bundle.run(pixels)
    probabilities = bundle.calibrate(run.logits[0])
    best = int(probabilities.argmax())
    confidence = float(probabilities[best])
    if not math.isfinite(confidence):
        raise BadPayload("FV2470", "its answer is not a number")
    is_unsure = bundle.is_unsure(confidence)
    return Observation(pixels, run.logits[0], run.features[0], best, confidence, is_unsure), probabilities


def try_out(bundle: Bundle, reference: PictureReference | None) -> None:
    """Answer a grey picture, the whole way. Raises as `observe` does."""
    seen, probabilities = observe(bundle, np.full((bundle.batch.image_size,) * 2 + (3,), 128, np.uint8))
    bundle.rank(probabilities, 1)
    if reference:
        try_reference(reference, seen)


def is_below_band(new: ServedAnswers, former: ServedAnswers) -> bool:
    """Return whether a new model is less confident than the one before it by more than chance and a tenth."""
    if min(new.pictures, former.pictures) < BAND_PICTURES or new.pictures > PROBATION:
        return False
    means = [each.confidence / each.pictures for each in (new, former)]
    spread = [max(each.squares / each.pictures - mean**2, 0.0) for each, mean in zip((new, former), means, strict=True)]
    error = math.sqrt(spread[0] / new.pictures + spread[1] / former.pictures)
    return means[0] < means[1] - max(LEAST_BAND, BAND_DEVIATIONS * error)


class ModelServer:
    """Answers pictures with the promoted model. Threads may share it; one picture is answered at a time."""

    def __init__(self, state: Path, threads: int) -> None:
        self.models = DeviceModels(state)
        self._state = state
        self._threads = threads
        self._open: OpenModel | None = None
        self._lock = threading.Lock()  # of the answers and their sums
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="models", daemon=True)
        self._stamp: tuple[int, int] | None = None
        self.status = replace(read_serving(state) or ServingStatus(), process=os.getpid(), trouble="")
        self.drift = DriftWatch(self.models.folder)
        self._decoding = threading.Lock()  # a small file may be a large picture: one at a time takes memory
        self._written: ServingStatus | None = None
        self._saved_at = self._written_at = time.monotonic()
        self._reported = set[str]()  # kinds of faults that have not ended
        self._opened_at = self._answer_began_at = math.inf
        self._retry = Backoff()  # of a model that cannot be opened
        self._failed_stamp: tuple[int, int] | None = None  # of the list when that was
        self._retry_at = 0.0
        self._broken: tuple[str, str] | None = None  # a model that cannot answer, and the reason

    def start(self) -> None:
        """Open the promoted model, if there is one, and follow the list from now on."""
        self._look()
        self._thread.start()

    def close(self) -> None:
        """Note the end: it is no failed start."""
        self._stop.set()
        self._changed.set()
        self._thread.join(LOOK_EVERY_S)
        with self._lock:
            self.status = replace(self.status, starting="", starts=0, process=0)
        self._note(durable=True)
        self._save_drift()

    @property
    def current(self) -> OpenModel | None:
        """The model that answers."""
        return self._open

    def is_alive(self) -> bool:
        """Return whether no answer takes longer than LONGEST_ANSWER_S."""
        return time.monotonic() - self._answer_began_at < LONGEST_ANSWER_S

    def answer(self, read: Callable[[int], Pixels], top: int = 1, source: str = "") -> Classification:
        """Answer a picture that `read` decodes at the model's size. Raises NoModel, DataError, BadPayload.

        `source` names its camera or folder: pictures of one source in a row may show one scene.
        """
        if self.models.stamp() != self._stamp:
            self._changed.set()
        if (model := self._open) is None:
            raise NoModel("FV1492", "no model of this device is promoted yet: edge-client models promote NAME")
        with self._decoding:
            pixels = read(model.bundle.batch.image_size)
        with self._lock:
            self._answer_began_at = time.monotonic()
            began = time.perf_counter()
            try:
                seen, probabilities = observe(model.bundle, pixels)
                seconds = time.perf_counter() - began
                answers = model.bundle.rank(probabilities, top)
                if model is self._open:  # else it was replaced while the picture was decoded
                    self._count(model, seen._replace(source=source))
            except MemoryError:
                raise
            except Exception as error:  # pictures have one form: the next one would fail, too
                self._broken = model.name, f"it cannot answer: {describe_fault(error)}"
                self._changed.set()
                raise BadPayload("FV2470", f"model {model.name} cannot answer: {describe_fault(error)}") from error
            finally:
                self._answer_began_at = math.inf
        return Classification(model.name, answers[0].label, seen.confidence, seen.is_unsure, answers, seconds)

    def note_trouble(self, what: str, reason: str) -> None:
        """Log a fault, once until it ends, and show it in the status."""
        if what not in self._reported:
            self._reported.add(what)
            log.warning(what, extra={"reason": reason})
        with self._lock:
            self.status = replace(self.status, trouble=f"{what}: {reason}"[:300])

    @contextlib.contextmanager
    def report_storage(self, what: str) -> Iterator[None]:
        """Note a StorageFailed of the block as this trouble, without raising it; a block that succeeds ends it."""
        try:
            yield
        except StorageFailed as error:
            self.note_trouble(what, str(error))
        else:
            self._reported.discard(what)

    def _count(self, model: OpenModel, seen: Observation) -> None:
        status = self.status
        answered = status.answered.add(seen.confidence, is_unsure=seen.is_unsure)
        is_old = time.monotonic() - self._opened_at >= PROVEN_S
        is_proven = status.is_proven or is_old or answered.pictures >= PROVEN_PICTURES
        has_started = is_proven and status.starting == model.name
        self.drift.add(seen)
        self.status = replace(
            status,
            answered=answered,
            is_proven=is_proven,
            starting="" if has_started else status.starting,
            starts=0 if has_started else status.starts,
            label=model.bundle.labels[seen.best],
            confidence=round(seen.confidence, 4),
            drift=dict(self.drift.alerts),
        )
        if is_proven > status.is_proven or is_below_band(answered, status.former):
            self._changed.set()

    # --- the thread of the list -----------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._changed.wait(LOOK_EVERY_S)
            self._changed.clear()
            try:
                self._look()
                self._write()
            except Exception:
                log.exception("the list of models cannot be followed")

    def _look(self) -> None:
        """Open the model that the list names, if it is another one, or go back to the former one."""
        if self._open is not None and is_below_band(self.status.answered, self.status.former):
            new, former = self.status.answered.mean_confidence, self.status.former.mean_confidence
            self._roll_back(self._open.name, f"mean confidence {new:.2f}, before it {former:.2f}")
        broken, self._broken = self._broken, None
        if self._open is not None and broken and broken[0] == self._open.name:
            self._roll_back(*broken)
        stamp = self.models.stamp()
        if stamp == self._stamp and self._open is not None:
            return
        with self.report_storage("the list of models cannot be read, the model that answers goes on"):
            self._follow_list(self.models.read().serving(), stamp)

    def _follow_list(self, wanted: DeviceModel | None, stamp: tuple[int, int]) -> None:
        if wanted is None:
            self._open, self._stamp = None, stamp
        elif self._open is None or wanted.name != self._open.name:
            if stamp != self._failed_stamp or time.monotonic() >= self._retry_at:
                self._exchange(wanted, stamp)
        else:
            self._open, self._stamp = self._open._replace(entry=wanted), stamp

    def _exchange(self, wanted: DeviceModel, stamp: tuple[int, int]) -> None:
        """Open a model beside the one that answers, and replace that one."""
        self._begin(wanted.name)
        if self.status.starts > MOST_STARTS and self._roll_back(wanted.name, f"{MOST_STARTS} starts with it failed"):
            return
        try:
            bundle = Bundle.open(self.models.path(wanted.name), None, self._threads)
            bundle.check_classifies()
            reference = read_reference(self.models.path(wanted.name))
            try_out(bundle, reference)
        except Exception as error:  # noqa: BLE001 - its files may have come from elsewhere
            what = f"model {wanted.name} cannot be opened, the one that answers goes on"
            self.note_trouble(what, describe_fault(error))
            self._failed_stamp, self._retry_at = stamp, time.monotonic() + self._retry.wait_s(None)
            with self._lock:
                if wanted.name == self.status.name:  # it could be opened before: its starts count from now on
                    self.status = replace(self.status, is_proven=False)
            return
        trim_memory()  # the file's bytes are not needed any more: 16 MB of a ViT-Tiny
        calibration = bundle.card.calibration
        with self._lock:
            self._open, self._stamp, self._opened_at = OpenModel(wanted, bundle), stamp, time.monotonic()
            self.drift.use(wanted.name, reference, calibration.temperature if calibration else 1.0)
            status = replace(self.status, trouble="", drift=dict(self.drift.alerts))
            if wanted.name != status.name:
                former = status.answered if status.answered.pictures >= BAND_PICTURES else status.former
                status = replace(status, name=wanted.name, answered=ServedAnswers(), former=former, is_proven=False)
            self.status = status
        self._reported, self._retry = set(), Backoff()
        log.info("model answers", extra={"model": wanted.name, "state": wanted.state})

    def _begin(self, name: str) -> None:
        """Count a start with a model that has not proven itself, durably, before it is opened."""
        with self._lock:
            status = self.status
            starts = status.starts + 1 if name == status.starting else 1
            if (name == status.name and status.is_proven) or starts > MOST_STARTS + 1:
                return
            self.status = replace(status, starting=name, starts=starts)
        self._note(durable=True)

    def _roll_back(self, name: str, reason: str) -> bool:
        """Let the former model answer again, and log that; False if there is none."""
        try:
            now = self.models.roll_back(reason, only=name)
        except (ConfigError, StorageFailed) as error:
            self.note_trouble(f"model {name} is not rolled back", str(error))
            with self._lock:  # it goes on, and is not compared again
                self.status = replace(self.status, former=ServedAnswers())
            return False
        log.warning("model rolled back", extra={"model": name, "now": now.name, "reason": reason})
        with self._lock:
            self.status = replace(self.status, starting="", starts=0)
        self._stamp = None
        self._changed.set()
        return True

    def _write(self) -> None:
        now = time.monotonic()
        if now >= self._written_at + WRITE_EVERY_S or self.status.is_proven > self._is_written_as_proven:
            self._written_at = now
            self._note()
        if now >= self._saved_at + SAVE_EVERY_S:
            self._saved_at = now
            self._save_drift()

    @property
    def _is_written_as_proven(self) -> bool:
        return self._written is not None and self._written.is_proven

    def _save_drift(self) -> None:
        with self._lock:
            content = self.drift.encode()
        with self.report_storage("statistics of drift are not written"):
            self.drift.write(content)

    def _note(self, *, durable: bool = False) -> None:
        """Write the status if it has changed; without room on the disk the answers go on."""
        status = replace(self.status, written_s=time.time())
        if self._written is not None and replace(self._written, written_s=status.written_s) == status:
            return
        with self.report_storage("the status of serving is not written"):
            write_serving(self._state, status, durable=durable)
            self._written = status
