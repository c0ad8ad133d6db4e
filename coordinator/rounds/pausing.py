"""Pauses of a run: by the operator, or while the disk is full or no file can be opened."""

import logging
import time
from collections.abc import Callable

from coordinator.compute.integrity import DamagedBlob
from coordinator.rounds.parts import RunParts
from coordinator.rounds.state import Pause, PauseCause
from coordinator.rounds.validation import MIN_FREE_BYTES
from fedvit.descriptors import USED_UP
from fedvit.errors import DatabaseGone, NoRoom, StorageFailed, TooManyOpenFiles
from fedvit.files import atomic_write, storage_failed
from fedvit.hints import command

log = logging.getLogger(__name__)

FREE_SPACE_CHECK_S = 2.0
"""Interval in which a paused run tries to write a file of MIN_FREE_BYTES."""
PAUSE_CHECK_S = 1.0
"""Interval in which a run that the operator paused looks whether it may continue."""


def wait_while_paused(parts: RunParts, number: int) -> None:
    """Wait while the operator pauses the run. Devices stay connected, and late results are accepted."""
    state = parts.state
    run, store, look_at = state.run, state.store, time.monotonic() + PAUSE_CHECK_S
    if not store.runs.is_paused(run):
        return
    state.doing = f"paused by the operator before round {number}"
    unpause = command("coordinator", "unpause", run, runs=store.database.folder)
    parts.operator_log(f"{state.doing}; {unpause}")
    parts.alerts.send("run_paused", f"the run is {state.doing}")

    def is_over() -> bool:
        nonlocal look_at
        if time.monotonic() < look_at:
            return False
        look_at = time.monotonic() + PAUSE_CHECK_S
        return not store.runs.is_paused(run)

    state.pause = Pause("operator", state.doing)
    parts.inbox.pump(is_over)
    state.pause = None
    parts.operator_log("the operator ended the pause")


def name_cause(error: StorageFailed) -> PauseCause:
    """Return the resource that an error reports as used up, or gone."""
    return "record" if isinstance(error, DatabaseGone) else "files" if isinstance(error, TooManyOpenFiles) else "disk"


def repeat_with_resources(parts: RunParts, work: Callable[[], object]) -> None:
    """Do `work`, which can be repeated. If the disk is full or no file can be opened, pause until that has changed, and
    repeat it."""
    while True:
        try:
            work()
            return
        except NoRoom as error:
            _wait_for_resources(parts, error)
        except OSError as error:
            if error.errno not in USED_UP:
                raise
            _wait_for_resources(parts, storage_failed("cannot open a file or connection", error))
        except DamagedBlob as error:  # devices keep their tasks, as in a pause
            parts.recovery.begin(error)
            parts.collector.pause()


def _wait_for_resources(parts: RunParts, error: StorageFailed) -> None:
    """Pause the run. Nothing is lost: devices keep their results, and hellos are answered meanwhile."""
    parts.collector.pause()
    parts.recovery.restoring = True  # all blobs are verified again before the run continues
    parts.state.doing = f"paused: {error}"
    parts.state.pause = Pause(name_cause(error), str(error))
    parts.operator_log(f"paused: {error}; it resumes automatically when that is over")
    log.error("paused", extra={"reason": str(error)})
    parts.alerts.send("run_paused", f"the run is paused: {error}")
    probe = parts.folder / "room"
    while True:
        try:
            parts.inbox.pump(lambda: False, deadline=time.monotonic() + FREE_SPACE_CHECK_S)
            atomic_write(probe, bytes(MIN_FREE_BYTES))
            probe.unlink()
            parts.state.store.database.check_reachable()
            break
        except NoRoom:  # in writing the probe, or while handling a device's message
            continue
        except OSError as again:
            if again.errno not in USED_UP:
                raise
    parts.state.pause = None
    parts.operator_log("disk, open files and record are available again: run resumed")
    log.info("run resumed")
