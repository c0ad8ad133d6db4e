"""A real Chromium without a window, by its DevTools protocol."""

import itertools
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.support.waiting import WAIT_S, wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ALIKE = "tbody tr:nth-child(n+12), .chart > :nth-child(n+37)"
"""Rows of tables, and bars with their texts, after the first dozen."""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def find_browser() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.fail("this test needs Chromium: make chromium, or sudo apt-get install chromium")


class Tab:
    """One page of the browser."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address, max_size=None, open_timeout=WAIT_S)
        self._ids = itertools.count(1)
        self.complaints: list[str] = []
        """What the browser wrote to its console as errors."""
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setScrollbarsHidden", hidden=True)  # as on a telephone; else they take of the width

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:1000])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"])[:1000])

    def evaluate(self, expression: str) -> Any:
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait for an expression to be true; it may fail while a page is replaced by another."""
        seen = f"(() => {{ try {{ return !!({expression}) }} catch {{ return false }} }})()"

        def look() -> Any:
            try:
                return self.evaluate(seen)
            except AssertionError as error:
                if "navigated or closed" in str(error):
                    return False
                raise

        wait_until(
            look,
            lambda: f"{expression} is not true of {self.evaluate('location.href + document.body.innerText')[:3000]}",
            pause_s=0.05,
        )

    def go(self, address: str, until: str = "document.querySelector('h1')") -> None:
        """Open a page, and wait for what it shows and for its connection.

        Before the handshake a page of NiceGUI keeps each event with a timer of its own, so that the server may get
        the press of a button before the text that was typed first.
        """
        self.send("Page.navigate", url=address)
        loaded = "document.readyState == 'complete' && location.href != 'about:blank'"
        self.until(f"{loaded} && (!window.socket || window.did_handshake) && !!({until})")

    def text(self, of: str = "main") -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(of)})?.innerText ?? ''")
        return found

    def rows(self, of: str) -> list[list[str]]:
        """The texts of a table's body."""
        cells = "[...row.cells].map(cell => cell.innerText.trim())"
        found: list[list[str]] = self.evaluate(f"[...document.querySelectorAll('{of} tbody tr')].map(row => {cells})")
        return found

    def resize(self, width: int, *, dark: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40}
        code = codes.get(key) or ord(key.upper())
        more = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **(more if kind == "keyDown" else {}),
            )  # fmt: skip

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of everything in the page, as a screen reader gets them."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [
            (node.get("role", {}).get("value", ""), node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored")
        ]

    def remove_alike(self) -> None:
        """Remove the later ones of many equal rows and bars: to look at each of hundreds takes so long that the page
        loses its connection, and is loaded anew."""
        self.evaluate(f"document.querySelectorAll({json.dumps(ALIKE)}).forEach(one => one.remove())")

    def violations(self) -> list[str]:
        """What axe-core finds in the page: rules of WCAG 2.1 to level AA, and its best practices.

        A page that loses its connection on a busy machine is loaded anew: axe-core looks at the whole page again then.
        """
        within = {"exclude": [[".nicegui-error-popup"]]}
        rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
        self.evaluate("window.isLookedAt = true")
        self.until("document.querySelector('h1')")
        try:
            self.remove_alike()
            self.evaluate(files("axe_core_python").joinpath("axe.min.js").read_text())
            found = self.evaluate(
                f"axe.run({json.dumps(within)}, {json.dumps(rules)}).then(found => found.violations.flatMap("
                "rule => rule.nodes.map(node => `${rule.id}: ${node.html.slice(0, 150)}`)))"
            )
        except AssertionError:  # of a page that was left in between
            if self.evaluate("window.isLookedAt"):
                raise
            found = []
        return list(found) if self.evaluate("window.isLookedAt") else self.violations()

    def close(self) -> None:
        self._socket.close()


class Browser:
    def __init__(self, port: int) -> None:
        self._port = port

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        asked = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            made = json.load(answer)
        tab = Tab(made["webSocketDebuggerUrl"])
        try:
            yield tab
        finally:
            tab.close()
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}/json/close/{made['id']}", timeout=WAIT_S).close()


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    folder.mkdir(parents=True)
    command = [find_browser(), *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        file = folder / "DevToolsActivePort"
        wait_until(lambda: file.is_file() and file.read_text().count("\n"), lambda: (folder / "log").read_text())
        yield Browser(int(file.read_text().split()[0]))
    finally:
        process.terminate()
        process.wait(WAIT_S)
