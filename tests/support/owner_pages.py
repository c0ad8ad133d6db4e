"""The owner's page of a device: with images that a test makes, in this process or in one of its own."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import msgspec
from PIL import Image

from edge_client.health.status import ClassImages, Doing, Status
from edge_client.owner.page.access import PageAccess
from edge_client.owner.page.routes import OwnerPage
from edge_client.owner.page.server import PageServer
from edge_client.settings import DeviceSettings
from edge_client.storage.state import device_id, status_file
from fedvit.policy import Policy
from fedvit.small_server import ListenAddress
from tests.support.dashboards import environment
from tests.support.waiting import WAIT_S

COMMAND = [str(Path(sys.executable).with_name("edge-client")), "page"]
PASSWORD = "eight letters"
RIGHT = {"secret": PASSWORD}


class Home(NamedTuple):
    """The folders of a device."""

    images: Path
    state: Path

    def files(self) -> list[str]:
        """The images by their path in the folder."""
        found = (path for path in self.images.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.images)) for path in found)


def make_home(folder: Path, waiting: int = 3) -> Home:
    """Make classes cat and dog of one image each, and images without a label, from black to white."""
    home = Home(folder / "images", folder / "state")
    for name in ("cat", "dog"):
        add_image(home.images / name / "known.png", 200)
    (home.images / "unlabelled").mkdir()
    for number in range(waiting):
        add_image(home.images / "unlabelled" / f"{number:04}.png", 255 * number // max(waiting - 1, 1))
    return home


def add_image(file: Path, value: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (value,) * 3).save(file)


def make_settings(home: Home, policy: Policy | None = None) -> DeviceSettings:
    """The settings of a device that has no flags but its folders."""
    return DeviceSettings(
        broker=None, data=home.images, device=None, state=home.state, threads=1, provider="CPUExecutionProvider",
        federation=None, ca_file=None, test_share=0.2, labels={}, vault_key=None, measures_speed=False, once=False,
        quiet=False, metrics_address=None, home=None, policy=policy or Policy(),
    )  # fmt: skip


def write_status(home: Home, state: str = "waiting for a task", **doing: object) -> Status:
    """Write what a device of this name would: its newest status."""
    device_id(home.state, "pi", home.images)
    images = {"cat": ClassImages(3, 1), "dog": ClassImages(2, 0)}
    status = Status(
        device="pi", federation="home", broker="server:1883", software="1.2", process=1, started_s=1e9, written_s=1e9,
        doing=Doing(state=state, classes=images, unusable={}, **doing),  # type: ignore[arg-type]
        rss_bytes=200_000_000, peak_rss_bytes=None, memory_budget_bytes=400_000_000,
    )  # fmt: skip
    status_file(home.state).write_bytes(msgspec.json.encode(status))
    return status


@contextmanager
def serving(home: Home, access: PageAccess, policy: Policy | None = None) -> Iterator["Visitor"]:
    """A visitor of a page in this process, at a port of this machine."""
    home.state.mkdir(exist_ok=True)
    page = OwnerPage(make_settings(home, policy), home.state, access)
    server = PageServer(ListenAddress("127.0.0.1", 0), page)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield Visitor(server.port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(WAIT_S)


class Reply(NamedTuple):
    status: int
    text: str
    headers: dict[str, str]


class Visitor:
    """A client that keeps its cookie as a browser does."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.host = f"127.0.0.1:{port}"
        self.cookie = ""

    def ask(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> Reply:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        sent = {"Host": self.host, **({"Cookie": self.cookie} if self.cookie else {}), **(headers or {})}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        connection.close()
        if cookie := answer.headers.get("Set-Cookie"):
            self.cookie = cookie.partition(";")[0]
        return Reply(answer.status, text, dict(answer.headers))

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, form: dict[str, str], **headers: str) -> Reply:
        """Send a form as a browser does."""
        usual = {"Content-Type": "application/x-www-form-urlencoded", "Origin": f"http://{self.host}"}
        return self.ask("POST", path, urlencode(form), {**usual, **headers})


@contextmanager
def page_process(home: Home, *flags: str, password: str | None = PASSWORD) -> Iterator[str]:
    """The address of a real `edge-client page`, without the last slash. It ends by SIGTERM and reports no error."""
    command = [*COMMAND, "--data", str(home.images), "--state", str(home.state), "--listen", "0", *flags]
    variables = environment() | ({"FEDVIT_PAGE_PASSWORD": password} if password else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.match(r"page: (http://\S+)/ ", line)
        assert found, line + process.stderr.read()
        yield found[1]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, "")
