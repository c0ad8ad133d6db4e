"""Spans of OpenTelemetry, sent over HTTP: only where the standard variables of the environment name a collector.

Without one nothing of OpenTelemetry is imported.
"""

import logging
import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
Attributes = Mapping[str, str | int | float | bool]


def is_traced() -> bool:
    """Return whether the environment names a collector."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not off and any(os.environ.get(name) for name in ENDPOINTS)


def open_tracing(service: str) -> "Tracing | None":
    """Return the spans of a program, under this name unless OTEL_SERVICE_NAME gives another; None if it sends none."""
    if not is_traced():
        return None
    try:
        tracing: Tracing = import_module("fedvit.open_telemetry").OpenTelemetry(service)
    except ImportError as error:
        log.warning("no spans are sent: pip install 'fedvit[tracing]'", extra={"missing": error.name})
        return None
    return tracing


class Tracing(Protocol):
    """Sends the spans of one program until it is closed."""

    def begin(
        self, name: str, attributes: Attributes, *, parent: "Span | str | None" = None, at_ns: int | None = None
    ) -> "Span":
        """Begin a span, now or at a Unix time. `parent`: a span, or the W3C traceparent of another program's."""
        ...

    def describe(self, span: "Span") -> str:
        """Return the W3C traceparent of a span, with which another program begins a child."""
        ...

    def end(self, span: "Span", *, error: str = "", at_ns: int | None = None) -> None:
        """End a span, with an error if there was one."""
        ...

    def close(self) -> None:
        """Send the last spans; take no longer than a few seconds."""
        ...


def unix_ns(monotonic_s: float) -> int:
    """Return the Unix time of a time on this process's monotonic clock."""
    return time.time_ns() - int(1e9 * (time.monotonic() - monotonic_s))
