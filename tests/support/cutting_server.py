"""A web server that cuts its connections: it sends only so many bytes of a file, whatever it has announced."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class CuttingServer(ThreadingHTTPServer):
    """Serves the files of a folder; files of more than `whole` bytes are cut after `most` bytes of each answer."""

    daemon_threads = True

    def __init__(self, folder: Path, most: int, *, whole: int = 0, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.most, self.whole, self.ranges = folder, most, whole, ranges
        self.asked: list[tuple[str, int]] = []  # files, with the first byte

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def starts(self, name: str) -> list[int]:
        """Return the first bytes that were asked for of a file."""
        return [start for file, start in self.asked if file == name]


class _Handler(BaseHTTPRequestHandler):
    server: CuttingServer

    def do_GET(self) -> None:
        file = self.server.folder / unquote(self.path).lstrip("/")
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        self.server.asked.append((file.name, start))
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        if not self.server.ranges:
            start = 0
        if start >= len(content) and start:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        most = len(content) if len(content) <= self.server.whole else self.server.most
        self.wfile.write(content[start : start + most])
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Stay silent."""


@contextmanager
def cutting(folder: Path, most: int, **settings: Any) -> Iterator[CuttingServer]:
    """Serve a folder within the block."""
    with CuttingServer(folder, most, **settings) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
