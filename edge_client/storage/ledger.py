"""The ledger of a device: a line for each thing that left it, and for each task that it refused or stopped.

`ledger.jsonl` is only appended to; when it is full it becomes `ledger.1.jsonl`, in place of the former one. A line is
on the disk before its result is sent. A result has one line, also after kill -9: its key names the result.
"""

import contextlib
import errno
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from fedvit.files import make_folder, name_failure, sync_folder
from fedvit.policy import find_needs
from fedvit.program import Program
from fedvit.quantities import format_bytes, format_count
from fedvit.wire.messages import Hello, Manifest, ModelReport, Result, SumId, Task, encode

LEDGER_FILE, OLD_FILE = "ledger.jsonl", "ledger.1.jsonl"
MAX_FILE_BYTES = 4_000_000
KEYS_KEPT = 1000
"""Newest results whose sending again is recognised."""
LINES_A_DAY = 1500
"""Lines of each kind in `COUNTED` in 24 hours: more would let a coordinator push out lines of results. A device that
answers pictures reports once a minute."""
MOST_A_DAY = 100_000
"""Results of 24 hours whose bytes are summed: one a second."""
MAX_TEXT = 500
NAMED = 4
"""Tensors of a result that its line names."""
DAY_S = 86400.0

Kind = Literal[
    "update",
    "features",
    "training counts",
    "evaluation counts",
    "hello counts",
    "model counts",
    "failure log",
    "refused",
]


COUNTED: tuple[Kind, ...] = ("model counts", "failure log", "refused")


class LedgerLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that left the device, or with a `reason` a refused task."""

    time_s: float  # since 1970, of the device's clock
    kind: Kind
    run: str = ""
    round: int = 0
    what: str = ""  # names and shapes, in short
    bytes: int = 0
    left_out: float | None = None  # of features: share of the patches that the device left out of them
    form: Literal["", "single", "sum"] = ""  # of an update
    reason: str = ""
    key: str = ""  # the result, so that it gets one line


class Ledger:
    """The ledger in a folder. Lines may be added from any thread, by one process. Raises StorageFailed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._keys: deque[str] = deque(maxlen=KEYS_KEPT)
        self._sent: deque[tuple[float, int]] = deque(maxlen=MOST_A_DAY)  # (time, bytes) of results, newest last
        self._times: dict[Kind, deque[float]] = {kind: deque(maxlen=LINES_A_DAY) for kind in COUNTED}
        self._newest: dict[Kind, str] = {}  # text of the newest line of each kind
        self._is_open = False
        self._lock = threading.RLock()

    def read(self, since_s: float = 0.0) -> Iterator[LedgerLine]:
        """Yield the lines since a time, the oldest first. Incomplete ones, after a power cut, are passed over."""
        for name in (OLD_FILE, LEDGER_FILE):
            file = self.folder / name
            with name_failure(f"cannot read {file}"), contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
                for raw in lines:
                    with contextlib.suppress(ValueError):  # of msgspec, or no UTF-8
                        line = msgspec.json.decode(raw, type=LedgerLine)
                        if line.time_s >= since_s:
                            yield line

    # --- writing --------------------------------------------------------------------------------------

    def has(self, result: Result) -> bool:
        """Return True if a result has its line."""
        with self._lock:
            self._open()
            return _key(result) in self._keys

    def note_result(self, result: Result, program: Program | None) -> Result:
        """Write the line of a result, unless it has one, and return the result. `program`: None if it is lost."""
        upload = result.upload
        with self._lock:
            if not self.has(result):
                what, left_out = _describe_upload(result, program)
                kind: Kind = "training counts" if result.kind == "train" else "evaluation counts"
                if upload:
                    kind = "update" if left_out is None else "features"
                self._add(
                    LedgerLine(
                        time_s=time.time(),
                        kind=kind,
                        run=result.run,
                        round=result.round,
                        what=what,
                        bytes=upload.size if upload else len(encode(result)),
                        left_out=left_out,
                        form="single" if upload and (program is None or find_needs(program).updates) else "",
                        key=_key(result),
                    )
                )
        return result

    def note_sum(self, sum_id: SumId, cohort: int, sent: Manifest) -> None:
        """Write the line of a result that leaves with masks, unless it has one. `cohort`: devices of the sum."""
        # with the digest: a round that comes back has other numbers, and counts its attempts anew
        key = f"{_name_sum(sum_id)}{sum_id.attempt}/{sent.digest}"
        with self._lock:
            self._open()
            if key not in self._keys:
                self._add(
                    LedgerLine(
                        time_s=time.time(),
                        kind="update" if sum_id.kind == "train" else "evaluation counts",
                        run=sum_id.run,
                        round=sum_id.round,
                        what=f"inside a sum of {cohort} devices",
                        bytes=sent.size,
                        form="sum",
                        key=key,
                    )
                )

    def list_other_attempts(self, sum_id: SumId) -> list[str]:
        """Return the digests of what left with masks in other attempts at a sum."""
        name = _name_sum(sum_id)
        with self._lock:
            self._open()
            sent = [key.removeprefix(name).split("/") for key in self._keys if key.startswith(name)]
        return [digest for attempt, digest in sent if attempt != str(sum_id.attempt)]

    def note_hello(self, hello: Hello) -> None:
        """Write the line of a hello whose numbers of images or classes differ from the newest one."""
        classes = f"{format_count(len(hello.classes), 'class')}: {', '.join(hello.classes)}"
        what = f"{hello.train_samples} + {hello.test_samples} images, {classes}"[:MAX_TEXT]
        with self._lock:
            self._open()
            if what != self._newest.get("hello counts"):
                line = LedgerLine(time_s=time.time(), kind="hello counts", what=what, bytes=len(encode(hello)))
                self._add(line, durable=False)

    def note_models(self, report: ModelReport) -> None:
        """Write the line of a report of the device's models whose numbers differ from the newest one."""
        what = f"{format_count(len(report.states), 'model')}, {format_count(report.answered, 'picture')} answered"
        what += ", drift" if report.has_drifted else ""
        line = LedgerLine(time_s=time.time(), kind="model counts", what=what, bytes=len(encode(report)))
        with self._lock:
            self._open()
            if what != self._newest.get(line.kind):
                self._add_counted(line, durable=False)

    def note_log(self, task: Task | Result, log: str) -> bool:
        """Write the line of a log that is sent with the failure of a task; False after very many in 24 hours."""
        what, size = format_count(len(log.splitlines()), "line"), len(log.encode())
        line = LedgerLine(time_s=time.time(), kind="failure log", run=task.run, round=task.round, what=what, bytes=size)
        with self._lock:
            self._open()
            return self._add_counted(line)

    def note_refusal(self, task: Task, reason: str) -> None:
        """Write the line of a task that was refused or stopped; of very many in 24 hours the first ones only."""
        reason = reason[:MAX_TEXT]
        line = LedgerLine(time_s=time.time(), kind="refused", run=task.run, round=task.round, reason=reason)
        with self._lock:
            self._open()
            self._add_counted(line)

    def wait_s(self, wanted: int, most: int) -> float:
        """Return after how many seconds `wanted` more bytes fit into the `most` of 24 hours; infinity: never."""
        if wanted > most:
            return math.inf
        with self._lock:
            self._open()
            now_s, wait_s = time.time(), 0.0
            recent = [(at_s, size) for at_s, size in self._sent if abs(at_s - now_s) < DAY_S]
        taken = sum(size for _, size in recent)
        for at_s, size in recent:
            if taken + wanted <= most:
                break
            taken -= size
            wait_s = at_s + DAY_S - now_s
        return wait_s

    def _open(self) -> None:
        """Take the lines of earlier processes into account, once."""
        if self._is_open:
            return
        self._keys.clear()  # of an attempt that failed
        self._sent.clear()
        for times in self._times.values():
            times.clear()
        for line in self.read():
            self._take(line)
        file = self.folder / LEDGER_FILE
        with name_failure(f"cannot write {file}"), contextlib.suppress(FileNotFoundError), file.open("r+b") as lines:
            if lines.seek(0, os.SEEK_END) and (lines.seek(-1, os.SEEK_END), lines.read())[1] != b"\n":
                lines.write(b"\n")  # the process ended while it wrote the last line
        self._is_open = True

    def _take(self, line: LedgerLine) -> None:
        if line.key:
            self._keys.append(line.key)
            self._sent.append((line.time_s, line.bytes))
        elif line.kind in self._times:
            self._times[line.kind].append(line.time_s)
        self._newest[line.kind] = line.what

    def _add_counted(self, line: LedgerLine, *, durable: bool = True) -> bool:
        """Write a line, unless there are very many of its kind."""
        times = self._times[line.kind]
        has_room = sum(abs(at_s - line.time_s) < DAY_S for at_s in times) < LINES_A_DAY
        if has_room:
            self._add(line, durable=durable)
        return has_room

    def _add(self, line: LedgerLine, *, durable: bool = True) -> None:
        raw = msgspec.json.encode(line) + b"\n"
        file = self.folder / LEDGER_FILE
        with name_failure(f"cannot write {file}"):
            make_folder(self.folder)
            if file.exists() and file.stat().st_size + len(raw) > MAX_FILE_BYTES:
                os.replace(file, self.folder / OLD_FILE)
            is_new = not file.exists()
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                before = os.fstat(handle).st_size
                if os.write(handle, raw) < len(raw):
                    os.ftruncate(handle, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if durable:
                    os.fsync(handle)
            finally:
                os.close(handle)
            if is_new:
                sync_folder(self.folder)
        self._take(line)


def _key(result: Result) -> str:
    return f"{result.run}/{result.round}/{result.kind}/{result.upload.digest if result.upload else result.task}"


def _name_sum(sum_id: SumId) -> str:
    """Return the beginning of the keys of all attempts at a sum."""
    return f"{sum_id.run}/{sum_id.round}/{sum_id.kind}/sum "


def _describe_upload(result: Result, program: Program | None) -> tuple[str, float | None]:
    """Return names and shapes of what a result sends, and of features the share of patches left out."""
    if result.kind != "train":
        by_class = f", by class: {len(result.by_class)}" if result.by_class else ""
        return f"{result.samples} images, {', '.join(result.metrics)}{by_class}"[:MAX_TEXT], None
    if program is None:
        return f"program {result.program}", None
    if result.upload is None:
        return f"{result.samples} images, {', '.join(result.metrics)}"[:MAX_TEXT], None
    form, needs = program.upload_form(), find_needs(program)
    shapes = [
        f"{name} {'x'.join('n' if size is None else str(size) for size in shape)}" for name, (shape, _) in form.items()
    ]
    more = f", and {len(shapes) - NAMED} more" if len(shapes) > NAMED else ""
    what = f"{format_count(len(shapes), 'tensor')}: {', '.join(shapes[:NAMED])}{more}"
    return what[:MAX_TEXT], needs.mask if needs.features else None


# --- in words -----------------------------------------------------------------------------------------


class Sent(Struct, frozen=True, kw_only=True):
    """The ledger's lines of a time, summed by kind."""

    counts: dict[str, int]
    bytes: dict[str, int]
    in_sums: int = 0  # of the updates


def sum_lines(lines: Iterable[LedgerLine]) -> Sent:
    """Sum up lines by kind."""
    counts, sizes, in_sums = Counter[str](), Counter[str](), 0
    for line in lines:
        in_sums += line.kind == "update" and line.form == "sum"
        counts[line.kind] += 1
        sizes[line.kind] += line.bytes
    return Sent(counts=dict(counts), bytes=dict(sizes), in_sums=in_sums)


def midnight_s() -> float:
    """Return the beginning of the day, by the device's clock."""
    return datetime.combine(datetime.now().date(), datetime.min.time()).timestamp()


def describe_sent(sent: Sent) -> str:
    """Describe what left the device today.

    >>> describe_sent(Sent(counts={"update": 2, "refused": 1}, bytes={"update": 172_000}))
    'sent 2 updates of 86 kB (single); no image, no feature; 1 task refused'
    """

    def count(kind: Kind, what: str) -> str:
        number = sent.counts.get(kind, 0)
        size = f" of {format_bytes(sent.bytes[kind] / number)}" if number and kind != "evaluation counts" else ""
        forms = {"single": number - sent.in_sums, "in sums of devices": sent.in_sums} if kind == "update" else {}
        used = [form if count == number else f"{count} {form}" for form, count in forms.items() if count]
        described = f" ({', '.join(used)})" if used else ""
        return f"{format_count(number, what)}{size}{described}" if number else ""

    parts = (
        count("update", "update"), count("features", "feature upload"), count("evaluation counts", "evaluation")
    )  # fmt: skip
    listed = " and ".join(filter(None, parts)) or "nothing"
    features = "" if sent.counts.get("features") else ", no feature"
    return f"sent {listed}; no image{features}; {format_count(sent.counts.get('refused', 0), 'task')} refused"
