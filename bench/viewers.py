"""What watches a run: a dashboard with a page in a browser, and scrapes of the coordinator's metrics.

They can be stopped and continued, so that rounds with and without them alternate within one run.
"""

import base64
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import psutil

from fedvit.errors import FedvitError
from fleet.processes import Fleet, last_line, log_text, program

SCRAPE_S = 1.0
"""Fifteen times as often as Prometheus does by default."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")
POLL_S = 0.1
START_S = 300.0
LOWEST_PRIORITY = 19


class Viewers:
    """A dashboard, a browser that shows a run's page, and a thread that reads the metrics. They watch at first."""

    def __init__(self, dashboard: "Popen[bytes]", browser: "Popen[bytes]", metrics: Request) -> None:
        self.dashboard = dashboard
        self._browser = browser
        self._metrics = metrics
        self._ended, self._active = threading.Event(), threading.Event()
        self._active.set()
        self._scraper = threading.Thread(target=self._scrape, name="scrapes")
        self._scraper.start()

    def watch(self, on: bool) -> None:
        """Let them watch from now on, or stop them where they are."""
        for process in (self.dashboard, self._browser):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT if on else signal.SIGSTOP)
        if on:
            self._active.set()
        else:
            self._active.clear()

    def close(self) -> None:
        self.watch(True)  # a stopped process would not end
        self._ended.set()
        self._scraper.join()

    def _scrape(self) -> None:
        while not self._ended.wait(SCRAPE_S):
            if self._active.is_set():
                with suppress(OSError), urlopen(self._metrics, timeout=START_S) as answer:
                    answer.read()


@contextmanager
def viewers(home: Path, run: str, metrics: str, password: str) -> Iterator[Viewers]:
    """Start them for a run of `home / "runs"`, and wait for the page. `metrics`: the address of its coordinator's,
    with their password.

    From then on the browser gets what others leave of the processor, since an operator's browser runs on another
    machine. Raises FedvitError if one of them does not start.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise FedvitError("a watched run needs Chromium, in which a page of the dashboard is open")
    log = home / "dashboard.log"
    with Fleet(ends_with_parent=signal.SIGKILL) as fleet:  # which ends stopped processes, too
        command = [*program("coordinator.cli"), "dashboard", "--runs", str(home / "runs"), "--port", "0"]
        dashboard = fleet.start("dashboard", command, log=log)
        _wait(lambda: "dashboard: http" in log_text(log), dashboard, log)
        address = log_text(log).partition("dashboard: ")[2].split()[0]
        opens = home / "runs" / f"dashboard-{urlsplit(address).port}.url"  # with the token
        page = f"{opens.read_text().strip().replace('?', 'run?', 1)}&run={run}"
        command = [browser, *BROWSER_FLAGS, f"--user-data-dir={home / 'browser'}", page]
        showing = fleet.start("browser", command, log=home / "browser.log")
        _wait(lambda: _is_visited(dashboard.pid), showing, home / "browser.log")
        _give_way(showing.pid)
        key = base64.b64encode(f"bench:{password}".encode()).decode()
        made = Viewers(dashboard, showing, Request(metrics, headers={"Authorization": f"Basic {key}"}))
        try:
            yield made
        finally:
            made.close()


def _give_way(pid: int) -> None:
    """Give a process and its session the lowest priority."""
    leader = psutil.Process(pid)
    for process in (leader, *leader.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.nice(LOWEST_PRIORITY)
    with suppress(OSError):  # where the kernel shares time among sessions first
        Path(f"/proc/{pid}/autogroup").write_text(str(LOWEST_PRIORITY))


def _is_visited(pid: int) -> bool:
    """Whether a browser is connected to a process."""
    return any(link.status == psutil.CONN_ESTABLISHED for link in psutil.Process(pid).net_connections("tcp"))


def _wait(holds: Callable[[], bool], process: "Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_S
    while not holds():
        if process.poll() is not None or time.monotonic() > until:
            raise FedvitError(f"what was to watch the run did not start: {last_line(log)}")
        time.sleep(POLL_S)
