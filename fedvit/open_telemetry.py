"""Sends spans with the SDK of OpenTelemetry: by a thread of the SDK, which drops them while the collector is away."""

import logging
import os
import threading

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fedvit.tracing import Attributes, Tracing

ANSWER_S = 5
"""Longest wait for the collector's answer to a batch, if OTEL_EXPORTER_OTLP_TIMEOUT is not set."""
CLOSE_S = 2.0
"""Longest time in which the last spans are sent when a program ends."""


class OpenTelemetry(Tracing):
    """The spans of one program, sent to the collector that its environment names."""

    def __init__(self, service: str) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        timeout_s = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else ANSWER_S
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # of a collector that is away, one line a batch
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout_s)))
        self._tracer = self._provider.get_tracer("fedvit")
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, name: str, attributes: Attributes, *, parent: Span | str | None = None, at_ns: int | None = None
    ) -> Span:
        return self._tracer.start_span(name, self._context_of(parent), attributes=dict(attributes), start_time=at_ns)

    def _context_of(self, parent: Span | str | None) -> Context:
        if isinstance(parent, str):
            return self._propagator.extract({"traceparent": parent}, Context())
        return set_span_in_context(parent, Context()) if parent else Context()

    def describe(self, span: Span) -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return carrier["traceparent"]

    def end(self, span: Span, *, error: str = "", at_ns: int | None = None) -> None:
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(at_ns)

    def close(self) -> None:
        thread = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        thread.start()
        thread.join(CLOSE_S)
