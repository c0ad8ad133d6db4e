"""A receiver of OpenTelemetry spans over HTTP, which reads what the exporter really sends."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class ReceivedSpan(NamedTuple):
    """A span as it arrived; ids in hexadecimal digits."""

    service: str
    name: str
    trace: str
    span: str
    parent: str  # "": none
    attributes: dict[str, Any]
    began_ns: int
    ended_ns: int
    is_error: bool


class Receiver:
    """Keeps all spans that arrived at `endpoint`; while it `hangs` it accepts connections and answers nobody."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.hangs = False
        self.asked = 0
        self._free = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.asked += 1
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.hangs:
                    receiver._free.wait()
                    return
                assert self.path == "/v1/traces"
                receiver.spans += _read(content)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._free.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def receive_spans() -> Iterator[Receiver]:
    """Provide a receiver within the block."""
    with closing(Receiver()) as receiver:
        yield receiver


def _read(content: bytes) -> Iterator[ReceivedSpan]:
    request = ExportTraceServiceRequest.FromString(content)
    for of_resource in request.resource_spans:
        service = _attributes(of_resource.resource.attributes)["service.name"]
        for span in (span for scope in of_resource.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                service=service,
                name=span.name,
                trace=span.trace_id.hex(),
                span=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                attributes=_attributes(span.attributes),
                began_ns=span.start_time_unix_nano,
                ended_ns=span.end_time_unix_nano,
                is_error=span.status.code == 2,
            )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
