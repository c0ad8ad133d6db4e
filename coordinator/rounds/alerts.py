"""Alerts of a run to a webhook: they never delay the run, and are lost rather than kept for ever."""

import json
import logging
import os
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from coordinator.config import AlertsConfig
from coordinator.config.alerts import check_webhook

log = logging.getLogger(__name__)

VARIABLE = "FEDVIT_ALERTS_WEBHOOK"
ATTEMPTS = 4
BACK_OFF_S = 1.0
"""Wait before the second attempt; it doubles with each further one."""
ANSWER_S = 5.0
"""Longest wait for the server."""
MOST_WAITING = 100
"""Alerts that wait; further ones are only counted."""
PATIENCE_S = 10.0
"""Seconds that the end of a run waits for its last alerts."""


class Alerts:
    """Sends the alerts of one run in a thread of its own; those that wait are sent together.

    The body of a request: {"run": ..., "text": a line for each alert, "alerts": [{"event", "device", "text", "at"}],
    "dropped": how many more there were}.
    """

    def __init__(self, run: str, config: AlertsConfig) -> None:
        self._run = run
        self._url = webhook_of(config)
        self._waiting: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def send(self, event: str, text: str, device: str | None = None) -> None:
        """Send an alert, if there is a webhook; returns at once."""
        if not self._url:
            return
        with self._changed:
            if self._closing:
                return
            if len(self._waiting) >= MOST_WAITING:
                self._dropped += 1
                return
            at = datetime.now(UTC).isoformat(timespec="seconds")
            self._waiting.append({"event": event, "device": device, "text": text, "at": at})
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"alerts-{self._run}", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Wait until the last alerts are sent, for at most PATIENCE_S."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread:
            self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                batch, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._dropped = 0
            text = "\n".join(f"{self._run}: {alert['text']}" for alert in batch)
            self._post(json.dumps({"run": self._run, "text": text, "alerts": batch, "dropped": dropped}).encode())

    def _post(self, body: bytes) -> None:
        request = Request(self._url or "", body, {"Content-Type": "application/json", "User-Agent": "fedvit"})
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(BACK_OFF_S * 2.0 ** (attempt - 1))
            try:
                with urlopen(request, timeout=ANSWER_S):
                    return
            except Exception as error:  # noqa: BLE001 - the thread must send later alerts, whatever happens to these
                reason = _describe(error)
        parts = urlsplit(self._url or "")
        server = f"{parts.scheme}://{parts.hostname}"  # the rest of the address may be secret
        log.warning("alerts not sent", extra={"server": server, "attempts": ATTEMPTS, "reason": reason})


def webhook_of(config: AlertsConfig) -> str | None:
    """Return the address of the configuration, else of the environment. Raises ConfigError if it is invalid."""
    if config.webhook is None and (address := os.environ.get(VARIABLE)):
        check_webhook(address, VARIABLE)
        return address
    return config.webhook


def _describe(error: Exception) -> str:
    """Describe a failed request without the texts of libraries, which quote the address."""
    if isinstance(error, HTTPError):
        return f"the server answered {error.code}"
    cause = error.reason if isinstance(error, URLError) else error
    return (cause.strerror if isinstance(cause, OSError) else None) or type(cause).__name__
