"""Spans of OpenTelemetry, sent over HTTP: only where the standard variables of the environment name a collector.

Without one nothing is imported. Spans are sent by a thread of the SDK, which drops them while the collector is away.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
ANSWER_S = 5
"""Longest wait for the collector's answer to a batch, if OTEL_EXPORTER_OTLP_TIMEOUT is not set."""
CLOSE_S = 2.0
"""Longest time in which the last spans are sent when a program ends."""
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
        return Tracing(service)
    except ImportError as error:
        log.warning("no spans are sent: pip install 'fedvit[tracing]'", extra={"missing": error.name})
        return None


class Tracing:
    """Sends the spans of one program until it is closed."""

    def __init__(self, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        timeout_s = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else ANSWER_S
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # of a collector that is away, one line a batch
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout_s)))
        self._tracer = self._provider.get_tracer("fedvit")
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, name: str, attributes: Attributes, *, parent: "Span | str | None" = None, at_ns: int | None = None
    ) -> "Span":
        """Begin a span, now or at a Unix time. `parent`: a span, or the W3C traceparent of another program's."""
        return self._tracer.start_span(name, self._context_of(parent), attributes=dict(attributes), start_time=at_ns)

    def _context_of(self, parent: "Span | str | None") -> "Context":
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        if isinstance(parent, str):
            return self._propagator.extract({"traceparent": parent}, Context())
        return set_span_in_context(parent, Context()) if parent else Context()

    def describe(self, span: "Span") -> str:
        """Return the W3C traceparent of a span, with which another program begins a child."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return carrier["traceparent"]

    def close(self) -> None:
        """Send the last spans, for CLOSE_S at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def end_span(span: "Span", *, error: str = "", at_ns: int | None = None) -> None:
    """End a span, with an error if there was one."""
    if error:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error))
    span.end(at_ns)


def unix_ns(monotonic_s: float) -> int:
    """Return the Unix time of a time on this process's monotonic clock."""
    return time.time_ns() - int(1e9 * (time.monotonic() - monotonic_s))
