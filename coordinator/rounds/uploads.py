"""Uploads of results: they are queued, fetched and checked."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import msgspec

from coordinator.rounds.acceptance import Acceptance
from coordinator.rounds.isolation import ends_run
from coordinator.rounds.state import RunState
from coordinator.rounds.task_ends import TaskEnds
from coordinator.rounds.tasks import DeviceTask, TaskState
from coordinator.rounds.validation import check_free_space, check_labels, check_upload
from fedvit.blobs import digest_of
from fedvit.errors import BadPayload
from fedvit.program import LABELS
from fedvit.transport.blob_receiver import LARGE_BYTES
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Manifest, Result
from fedvit.wire.transfer import WINDOW_CHUNKS
from profiles.probes.host import free_disk_bytes

CHUNKS_AT_ONCE = 4 * WINDOW_CHUNKS
"""Chunks of uploads that may be in flight at the same time, so that a cohort cannot overrun the broker's queues: four
large uploads with full windows, or more of small ones."""

MIRRORED_AT_ONCE = 8
"""Uploads that are put into the mirror of the run at the same time."""


class Uploads:
    """The uploads of one run. Valid ones go on to `acceptance`, others end their task."""

    def __init__(self, state: RunState, exchange: BlobExchange, acceptance: Acceptance, ends: TaskEnds) -> None:
        self._state = state
        self._exchange = exchange
        self._acceptance = acceptance
        self._ends = ends
        self._waiting: dict[str, DeviceTask] = {}  # uploads that are queued, in the order of arrival
        self._fetching: dict[str, DeviceTask] = {}  # uploads that are being fetched or checked
        self._checker = ThreadPoolExecutor(MIRRORED_AT_ONCE if state.mirror else 1, "upload-check")

    def waiting(self) -> Collection[str]:
        """Devices that this side keeps waiting with their uploads."""
        if not self._exchange.has_store:
            return self._waiting.keys()
        for_store = {
            device
            for device, task in self._fetching.items()
            if task.check is not None
            or (task.result and task.result.upload and self._exchange.is_awaited(task.result.upload.digest))
        }
        return for_store.union(self._waiting)

    def fetching(self) -> Collection[DeviceTask]:
        """Tasks whose uploads are being fetched, as a view."""
        return self._fetching.values()

    def add(self, task: DeviceTask, result: Result, upload: Manifest) -> None:
        """Queue an upload for fetching, if the disk has space for it."""
        try:
            check_free_space(upload, free_disk_bytes(self._state.blobs.folder))
        except BadPayload as error:
            self._ends.reject(task, result, str(error))
            return
        task.to(TaskState.UPLOADING)
        self._waiting[task.device] = task
        self.grant()

    def add_inline(self, task: DeviceTask, result: Result, upload: Manifest) -> None:
        """Check an upload that came inside the message."""
        content = result.inline
        task.result = result = msgspec.structs.replace(result, inline=b"")
        if digest_of(content) != upload.digest:
            reason = f"the upload of {len(content)} bytes has digest {digest_of(content)}"
            self._ends.reject(task, result, f"{reason}, expected {upload.digest}")
            return
        task.content = content
        if self._state.mirror:
            task.to(TaskState.UPLOADING)
            self._fetching[task.device] = task
            task.check = self._checker.submit(self._check_of(task))
        else:
            self._finish_check(task)

    def drop(self, task: DeviceTask) -> None:
        """Stop fetching or checking the task's upload."""
        fetched = self._fetching.pop(task.device, None)
        self._waiting.pop(task.device, None)
        task.result = task.content = task.check = None
        task.deadline.interrupted()
        if fetched:
            self._exchange.cancel(task.device)

    def take_checked(self) -> None:
        """Continue with uploads whose check in a thread has finished."""
        for device, task in list(self._fetching.items()):
            if task.check is not None and task.check.done():
                del self._fetching[device]
                self._finish_check(task, task.check.result)
                self.grant()

    def grant(self) -> None:
        """Start fetching queued uploads, as far as CHUNKS_AT_ONCE allows; one at a time at a broker with a limit on a
        connection's messages, since it counts those that it delivers, too."""
        one_at_a_time = self._state.limits.publishes_per_s > 0
        chunks = sum(map(_window_of, self._fetching.values()))
        while self._waiting:
            device, task = next(iter(self._waiting.items()))
            assert task.result is not None  # only those are queued
            assert task.result.upload is not None
            chunks += _window_of(task)
            if self._fetching and (one_at_a_time or chunks > CHUNKS_AT_ONCE):
                return
            self._fetching[device] = self._waiting.pop(device)
            task.deadline.kept_waiting(time.monotonic())
            upload = task.result.upload
            topic = self._state.topics.upload(device, upload.digest)
            self._exchange.fetch(upload, device, topic, self._continuation_of(task, task.result))

    def _continuation_of(self, task: DeviceTask, result: Result) -> Callable[[Manifest, Exception | None], None]:
        device, began = task.device, time.monotonic()

        def go_on(manifest: Manifest, error: Exception | None) -> None:
            if self._fetching.get(device) is not task or task.result is not result:
                return  # the device left, or the upload was cancelled
            if error is None:
                self._state.links.measured(device, manifest.size, time.monotonic() - began)
                # checked in a thread, and mirrored; messages and other uploads are handled meanwhile
                if self._state.mirror or manifest.size >= LARGE_BYTES:
                    task.check = self._checker.submit(self._check_of(task))
                    return
            del self._fetching[device]
            if error is None:
                self._finish_check(task)
            elif isinstance(error, BadPayload):
                self._ends.reject(task, result, str(error))
            else:
                raise error
            self.grant()

        return go_on

    def _check_of(self, task: DeviceTask) -> Callable[[], None]:
        """A function that checks the task's upload, and puts it into the run's mirror, in any thread; it raises
        BadPayload."""
        result, content, program = task.result, task.content, task.work.program
        assert result is not None  # only those get here
        assert result.upload is not None
        presence = self._state.presence
        hello = presence[task.device].hello if task.device in presence else None
        what = f"result of {task.device} for round {result.round}"
        blobs, digest, mirror = self._state.blobs, result.upload.digest, self._state.mirror
        upload = blobs.path(digest) if content is None else content

        def check() -> None:
            tensors = check_upload(upload, program, what)
            if LABELS in tensors and hello:
                check_labels(tensors[LABELS], program, hello, what)
            if mirror:
                if content is not None:
                    blobs.put(content)
                mirror([digest])

        return check

    def _finish_check(self, task: DeviceTask, check: Callable[[], None] | None = None) -> None:
        """The upload has arrived: check it, or take the outcome of `check` if it was checked in a thread."""
        result = task.result
        assert result is not None  # only those get here
        if why := self._state.why_too_late(result):
            self._ends.reject(task, result, why, TaskState.LATE)
            return
        try:
            (check or self._check_of(task))()
        except BadPayload as bad:
            self._ends.strike(task, result, str(bad))
        except Exception as error:
            if ends_run(error):
                raise
            self._ends.add_error(task.device, error)
        else:
            self._acceptance.add(task)


def _window_of(task: DeviceTask) -> int:
    """Most chunks of the task's upload that are in flight."""
    upload = task.result.upload if task.result else None
    return min(upload.chunks, WINDOW_CHUNKS) if upload else 0
