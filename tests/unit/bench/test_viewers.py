"""What watches a run in a bench: a real dashboard, a real browser, and scrapes of a page."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from bench.viewers import viewers
from tests.support.records import RUN, begun_run
from tests.support.waiting import wait_until


class Page(BaseHTTPRequestHandler):
    """Counts who reads it."""

    read = 0

    def do_GET(self) -> None:
        Page.read += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    server.shutdown()
    serving.join()
    server.server_close()


def test_viewers_stand_still_until_they_watch_again(tmp_path: Path, metrics: str) -> None:
    begun_run(tmp_path / "runs").close()
    with viewers(tmp_path, RUN, metrics, "a password") as watching:
        dashboard = psutil.Process(watching.dashboard.pid)
        wait_until(lambda: Page.read > 0, "waited for a scrape")
        watching.watch(False)
        wait_until(lambda: dashboard.status() == psutil.STATUS_STOPPED, "waited for the dashboard to stand still")
        watching.watch(True)
        wait_until(lambda: dashboard.status() != psutil.STATUS_STOPPED, "waited for the dashboard")
        before = Page.read
        wait_until(lambda: Page.read > before, "waited for another scrape")
    assert not dashboard.is_running()
