"""The server's clock, compared with a date that the deployment knows to be right.

The clock decides when certificates end and when they are renewed. So a clock that has jumped must not issue any. The
registry holds a reference date. It follows the clock while the clock is plausible, and the monotonic clock otherwise,
so that a wrong clock never moves it.
"""

import shlex
import time
from datetime import UTC, datetime

from coordinator.security.authority import DAY_S
from coordinator.security.folder import Deployment
from coordinator.security.registry import now
from fedvit.errors import ConfigError

TOLERANCE_S = DAY_S
"""Largest plausible difference between the clock and the reference date."""
NOTE_EVERY_S = 600.0
LAST_S = 253_402_300_799.0
"""The last second that a date can have, at the end of the year 9999."""


class ServerClock:
    """The clock of the process that serves a deployment, its only one. All methods are called by one thread."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._stored_s: float | None = None
        self._reference_s = 0.0
        self._referred_at = 0.0  # time.monotonic()

    def check(self) -> str | None:
        """Reason to doubt the clock, and what to do; None if it is plausible. The reference date advances."""
        with self._deployment.registry.read() as rows:
            stored_s = rows.clock_s()
        passed_s = time.monotonic() - self._referred_at
        expected_s = self._reference_s + passed_s
        if stored_s != self._stored_s:  # the first check, or an operator has confirmed the clock
            expected_s = self._stored_s = stored_s
        doubt = find_doubt(self._deployment, expected_s)
        self._reference_s, self._referred_at = expected_s if doubt else now(), time.monotonic()
        if abs(self._reference_s - stored_s) >= NOTE_EVERY_S:
            with self._deployment.registry.change() as rows:
                if rows.clock_s() == stored_s:
                    rows.set_clock(self._reference_s)
                    self._stored_s = self._reference_s
        return doubt


def find_doubt(deployment: Deployment, reference_s: float) -> str | None:
    """Reason to doubt this machine's clock, and what to do; None if it is plausible."""
    now_s = now()
    if abs(now_s - reference_s) <= TOLERANCE_S:
        return None
    days, side = abs(now_s - reference_s) / DAY_S, "ahead of" if now_s > reference_s else "behind"
    difference = (
        f"this machine's clock says {format_date(now_s)}, {days:.0f} days {side} the newest date of this deployment "
        f"({format_date(reference_s)}): no certificate is issued"
    )
    if now_s < deployment.authority.begin_s:
        return f"{difference}; set the clock"
    command = f"coordinator devices --deployment {shlex.quote(str(deployment.folder))} --confirm-clock"
    return f"{difference}; set the clock, or, if it is right, confirm it: {command}"


def confirm_clock(deployment: Deployment) -> None:
    """Make the clock's date the reference. Raises ConfigError if the clock is before the deployment."""
    now_s, begin_s = now(), deployment.authority.begin_s
    if now_s < begin_s:
        raise ConfigError(
            "FV1303",
            f"this machine's clock says {format_date(now_s)}, but this deployment began on {format_date(begin_s)}: "
            "set the clock",
        )
    with deployment.registry.change() as rows:
        rows.set_clock(now_s)
        rows.add_audit("confirm clock", format_date(now_s))


def format_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def format_iso(seconds: float | None) -> str | None:
    """Return a time in ISO 8601, UTC; one beyond the calendar as its last second.

    >>> format_iso(4e12)
    '9999-12-31T23:59:59+00:00'
    """
    if seconds is None:
        return None
    return datetime.fromtimestamp(min(seconds, LAST_S), UTC).isoformat(timespec="seconds")
