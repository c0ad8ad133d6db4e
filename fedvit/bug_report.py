"""An archive for the report of a fault: what somebody needs to find the cause, without secrets.

Secrets are removed by their form, and by their values where they are known. The archive is a ZIP of text files, so that
its owner can read all of it before it goes anywhere.
"""

import os
import platform
import re
import time
import zipfile
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from fedvit.files import atomic_write

PACKAGES = (
    "fedvit", "fedvit-kernels", "numpy", "onnxruntime", "onnxruntime-gpu", "msgspec", "paho-mqtt", "pillow",
    "cryptography", "torch", "torchvision", "timm", "onnx", "sqlalchemy", "alembic", "nicegui",
)  # fmt: skip
MAX_FILE_BYTES = 2_000_000
"""Size of a file in the archive; of longer ones the end is kept."""
SECRET_VARIABLE = re.compile(r"PASSWORD|SECRET|TOKEN|KEY|BROKER|RECORD|CREDENTIAL|WEBHOOK")
"""Environment variables whose values are removed wherever they occur."""
_NAMES = r"password|passwd|secret|token|api_?key|access_?key\w*|authorization"
FORMS = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        "[PRIVATE KEY]",
    ),
    (re.compile(r"fedvit1-[\w-]+"), "[TOKEN]"),
    # credentials, then path and query of an address: a webhook's address is a secret, too
    (re.compile(r"(?<=://)[^/\s@\"']+@"), "[USER]@"),
    (re.compile(r"(https?://[^/\s\"']+/)[^\s\"',)]+"), r"\1[PATH]"),
    # name = value, also in quotes, and in JSON inside of JSON
    (
        re.compile(rf"""((?:{_NAMES})[\\"']*\s*[=:]\s*)(?:\\?"[^"\\]*\\?"|'[^']*'|[^\s,;]+)""", re.IGNORECASE),
        r"\1[SECRET]",
    ),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), "[SECRET]"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+\b"), "[MAIL]"),
    (re.compile(r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)"), "[ADDRESS]"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE), "[MAC]"),
)
"""Secrets by their form, in the order in which they are replaced."""


class BugReport:
    """Files of an archive, each without secrets.

    `words` are replaced wherever they occur, such as names of an owner's folders and classes.
    """

    def __init__(self, words: Collection[str] = (), environment: Mapping[str, str] = os.environ) -> None:
        values = {value for name, value in environment.items() if SECRET_VARIABLE.search(name) and len(value) >= 4}
        found = {word for word in (*words, str(Path.home())) if len(word) > 2 and not word.isdigit()}
        self._values = _find_any(values)
        self._words = _find_any(found)
        self._files: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """Add a file; of a long text the end is kept."""
        self._files[name] = self.hide(text[-MAX_FILE_BYTES:])

    def add_object(self, name: str, value: Any) -> None:
        """Add a file with a value as JSON."""
        self.add(name, msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode())

    def add_file(self, name: str, path: Path) -> None:
        """Add the end of a text file; without the file a line that says so."""
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_FILE_BYTES))
                self.add(name, file.read().decode(errors="replace"))
        except OSError as error:
            self.add(name, f"cannot be read: {error.strerror}\n")

    def add_machine(self) -> None:
        """Add versions of the software and of the machine."""
        packages = {}
        for package in PACKAGES:
            try:
                packages[package] = version(package)
            except PackageNotFoundError:
                continue
        self.add_object(
            "versions.json",
            {
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "python": platform.python_version(),
                "system": platform.platform(),
                "machine": platform.machine(),
                "packages": packages,
            },
        )

    def add_folder(self, name: str, folder: Path, most: int = 5000) -> None:
        """Add a list of a folder's files: mode, bytes, name."""
        lines = []
        for path in sorted(folder.rglob("*"))[:most]:
            state = path.lstat()
            lines.append(f"{state.st_mode:06o} {state.st_size:12d} {path.relative_to(folder)}\n")
        self.add(name, "".join(lines) or "empty\n")

    def hide(self, text: str) -> str:
        """Return a text without secrets and without the words of this report."""
        if self._values:
            text = self._values.sub("[SECRET]", text)
        for form, replacement in FORMS:
            text = form.sub(replacement, text)
        return self._words.sub("[NAME]", text) if self._words else text

    def write(self, path: Path) -> list[str]:
        """Write the archive, readable by its owner alone; return the names of its files."""
        content = BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in self._files.items():
                archive.writestr(name, text.encode(errors="backslashreplace"))
        atomic_write(path, content.getvalue(), private=True)
        return list(self._files)


def _find_any(words: Collection[str]) -> re.Pattern[str] | None:
    """Make a pattern that finds each of the words where it stands alone, the longest first; None without words."""
    some = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{some})(?!\w)") if words else None
