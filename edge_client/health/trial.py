"""The trial of a new version of the software: its first task decides whether it stays."""

import logging
import math
import time

from edge_client.health.history import History, LastTask
from edge_client.storage.installed import CURRENT, Installation
from fedvit.errors import DeviceTrouble, FedvitError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Interval between looks for a newer version."""


class Trial:
    """Marks what a version on trial does, and notices when another version is installed."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._is_open = installation.is_on_trial()
        self._current = installation.read_link(CURRENT)
        self._looked_at = -math.inf
        self._is_working = False
        self._last: LastTask | None = None

    def begin(self) -> None:
        """Mark that the program is ready."""
        if self._is_open:
            self._installation.mark("ready")

    def look(self, history: History, *, is_working: bool) -> None:
        """Mark the beginning and the end of the first task; call it often. Raises DeviceTrouble if it failed.

        A task counts as failed if the device is the reason: its engine or an unexpected error. A budget, a policy or a
        broken task says nothing about the version.
        """
        if not self._is_open:
            return
        error, is_new = history.failure, history.task is not self._last
        self._last = history.task
        if is_new and self._last and self._last.outcome == "done":
            self._is_open = False
            self._installation.mark("done")
            log.info("this version stays: it has done its first task")
        elif is_new and error and (isinstance(error, DeviceTrouble) or not isinstance(error, FedvitError)):
            self._is_open = False
            self._installation.mark("failed")
            raise DeviceTrouble(
                "FV1466",
                f"{self._installation.started} failed its first task, and the version before it is started again: "
                f"{error}",
            )
        elif is_working != self._is_working:
            self._is_working = is_working
            self._installation.mark("task" if is_working else "end")

    def close(self) -> None:
        """Mark the end of a task that is stopped because the program leaves."""
        if self._is_open and self._is_working:
            self._installation.mark("end")

    def is_over(self) -> bool:
        """Tell whether another version was installed since this program was started."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
        return self._installation.read_link(CURRENT) != self._current
