"""A real HTTP server on loopback that takes alerts."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Hook(HTTPServer):
    """Keeps what it receives; the first `fails` requests are answered with an error."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fails = fails
        self.requests = 0
        self.bodies: list[dict[str, Any]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/hook"

    def events(self) -> list[tuple[str, str | None]]:
        return [(alert["event"], alert["device"]) for body in self.bodies for alert in body["alerts"]]


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests += 1
        self.server.may_answer.wait()
        works = self.server.requests > self.server.fails
        if works:
            self.server.bodies.append(json.loads(body))
        self.send_response(200 if works else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
