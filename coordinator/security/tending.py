"""Work that a deployment needs from time to time while it is served: own certificates, and the end of a rotation."""

import logging
import time
from collections.abc import Callable

from coordinator.record.audit import Actor, acting_as
from coordinator.security.clock import find_doubt
from coordinator.security.folder import Deployment
from coordinator.security.registry import now
from coordinator.security.rotating import describe_left, finish_rotation, read_rotation
from fedvit.errors import FedvitError
from fedvit.hints import command
from fedvit.quantities import format_count

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
SETTLE_EVERY_S = 60.0


class Tending:
    """Renews the certificates of broker and coordinator when they are due, and ends a rotation that is complete.

    With `restarts`, this process restarts the broker; otherwise the operator is told to end the rotation, since an
    external broker has to be restarted by hand.
    """

    def __init__(self, deployment: Deployment, operator_log: Callable[[str], None], *, restarts: bool) -> None:
        self._deployment = deployment
        self._operator_log = operator_log
        self._restarts = restarts
        self._look_at = self._settle_at = 0.0  # time.monotonic()
        self._is_reported = False

    def tend(self) -> None:
        """Do what is due. To be called often."""
        at = time.monotonic()
        if at < self._look_at:
            return
        self._look_at = at + LOOK_EVERY_S
        try:
            if at >= self._settle_at:
                self._settle_at = at + SETTLE_EVERY_S
                self.settle()
            self._look_after_rotation()
        except (FedvitError, OSError) as error:
            log.error("deployment cannot be tended", extra={"reason": str(error)})

    def settle(self) -> None:
        """Complete files that another process has left, and renew certificates that are due."""
        if changed := self._deployment.settle():
            self._operator_log(f"new certificates: {', '.join(changed)}")

    def _look_after_rotation(self) -> None:
        view = read_rotation(self._deployment)
        if view.next is None or view.until is None:
            self._is_reported = False
            return
        if (view.awaited or view.tokens) and now() < view.until:
            return
        with self._deployment.registry.read() as rows:
            if find_doubt(self._deployment, rows.clock_s()):
                return  # the operator is told by the enrolment
        if self._restarts:
            with acting_as(Actor("fedvit", "rule")):
                left = finish_rotation(self._deployment)
            count = format_count(len(view.updated), "device")
            self._operator_log(f"the authority was rotated: {count} moved; the former one is not trusted any more")
            for line in describe_left(self._deployment, left):
                self._operator_log(line)
        elif not self._is_reported:
            self._is_reported = True
            finish = command("coordinator", "rotate-authority", "--finish", deployment=self._deployment.folder)
            self._operator_log(f"the rotation of the authority can end: {finish}; then restart mosquitto")
