"""An archive for the report of a fault: what somebody needs to find the cause, without secrets.

Secrets are removed by their form, and by their values where they are known. The archive is a ZIP of text files, so that
its owner can read all of it before it goes anywhere.
"""

import json
import os
import platform
import re
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from ipaddress import AddressValueError, IPv6Address
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import click
import msgspec

from fedvit.files import atomic_write
from fedvit.quantities import format_bytes

PACKAGES = (
    "fedvit", "fedvit-kernels", "numpy", "onnxruntime", "onnxruntime-gpu", "msgspec", "paho-mqtt", "pillow",
    "cryptography", "torch", "torchvision", "timm", "onnx", "sqlalchemy", "alembic", "nicegui",
)  # fmt: skip
MAX_FILE_BYTES = 2_000_000
"""Size of a file in the archive; of longer ones the end is kept."""
MAX_REPORT_BYTES = 20_000_000
"""Size of all files together, before they are compressed."""
MOST_LISTED = 5000
"""Files of a folder that a report lists."""
SECRET_VARIABLE = re.compile(r"PASSWORD|PASSWD|SECRET|TOKEN|KEY|BROKER|RECORD|CREDENTIAL|WEBHOOK")
"""Environment variables whose values are removed wherever they occur."""
SHORTEST_SECRET = 4
"""Letters of a known secret; a shorter one is only removed by its form."""
_NAMES = (
    r"(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key\w*|account[_-]?key|private[_-]?key|webhook)"
)
FORMS = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        "[PRIVATE KEY]",
    ),
    # the end of a key whose beginning was cut off with the beginning of a long file
    (re.compile(r"\A[A-Za-z0-9+/=\\\s]*+-----END [A-Z ]*PRIVATE KEY-----"), "[PRIVATE KEY]"),
    (re.compile(r"fedvit1-[\w-]+|fvt_[\w-]+"), "[TOKEN]"),
    (re.compile(r"\b(?:eyJ[\w-]{8,}\.[\w.-]+|gh[pousr]_\w{16,}|hf_\w{16,}|xox[a-z]-[\w-]{8,})"), "[TOKEN]"),
    (re.compile(r"\$\d{1,2}\$[^\s:\"']+"), "[SECRET]"),  # passwords of mosquitto and of Unix
    # credentials, then path and query of an address: a webhook's address is a secret, too
    (re.compile(r"(?<=://)[^/\s\"']+@"), "[USER]@"),
    (re.compile(r"(https?://[^/?\s\"']+[/?])[^\s\"',)]+"), r"\1[PATH]"),
    (re.compile(r"""((?:authorization|cookie)["'\\]*\s*[=:]\s*["'\\]*)[^"'\\\n]+""", re.IGNORECASE), r"\1[SECRET]"),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}"), r"\1 [SECRET]"),
    # name = value, also in quotes, and in JSON inside of JSON; --name value
    (
        re.compile(rf"""({_NAMES}[\\"']*\s*[=:]\s*)(?:\\?"[^"\\]*\\?"|'[^']*'|[^\s,;]+)""", re.IGNORECASE),
        r"\1[SECRET]",
    ),
    (re.compile(rf"(--[\w-]{{0,40}}?{_NAMES}\s+)(?!-)[^\s\"']+", re.IGNORECASE), r"\1[SECRET]"),
    (re.compile(r"\bA[KS]IA[0-9A-Z]{16}\b"), "[SECRET]"),
    (re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]+\.[\w.]+\b"), "[MAIL]"),
    (re.compile(r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)"), "[ADDRESS]"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE), "[MAC]"),
    (re.compile(r"(/(?:home|Users)/)[^/\s\"']+"), r"\1[NAME]"),
)
"""Secrets by their form, in the order in which they are replaced."""
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])", re.IGNORECASE)
_IMAGE = re.compile(
    r"(?<![^\s/\\\"'=])[^\s/\\\"'=]{1,255}\.(?:jpe?g|png|webp|gif|bmp|tiff?|heic|heif|avif)\b", re.IGNORECASE
)
"""A picture's name without spaces, also of one that was removed since."""
_WORD = re.compile(r"\w+")
_CORE = re.compile(r"^\W+|\W+$")


class BugReport:
    """Files of an archive, each without secrets.

    `words` are replaced wherever they stand alone, such as names of an owner's files and classes, and paths at which
    others begin; `folders` with all that follows them in a path; `secrets` even inside of other words, and the password
    of an address among them, too.
    """

    def __init__(
        self,
        words: Collection[str] = (),
        environment: Mapping[str, str] = os.environ,
        *,
        folders: Collection[Path] = (),
        secrets: Collection[str] = (),
    ) -> None:
        known = {*secrets, *(value for name, value in environment.items() if SECRET_VARIABLE.search(name))}
        self._secrets = _find_any({form for value in known for form in _list_secret_forms(value)})
        paths = _find_any({str(form) for folder in folders for form in (folder, folder.absolute(), folder.resolve())})
        self._paths = re.compile(rf"""{paths}(?:\\.|[^"\n])*?(?=  | \w+=|["\n]|\Z)""") if paths else None
        self._roots = _find_any({str(Path.home()), *(word for word in words if "/" in word)})
        self._names = _Names(word for word in words if "/" not in word)
        self._files: dict[str, bytes] = {}

    def add(self, name: str, text: str) -> None:
        """Add a file; of a long text the end is kept."""
        most = min(MAX_FILE_BYTES, MAX_REPORT_BYTES - sum(map(len, self._files.values())))
        if len(text) > most:
            # a whole line first: the rest of a cut line could be the rest of a secret without its name
            text = text[len(text) - most :].partition("\n")[2]
        content = self.hide(text).encode(errors="backslashreplace")
        self._files[name] = content if len(content) <= most else content[len(content) - most :]

    def add_object(self, name: str, value: Any) -> None:
        """Add a file with a value as JSON."""
        self.add(name, json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=2))

    def add_file(self, name: str, path: Path) -> None:
        """Add the end of a text file; without the file a line that says so."""
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_FILE_BYTES - 1))
                self.add(name, file.read(MAX_FILE_BYTES + 1).decode(errors="replace"))
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

    def add_folder(self, name: str, folder: Path) -> None:
        """Add a list of a folder's files: mode, bytes, name."""
        lines = []
        for path in sorted(islice(folder.rglob("*"), MOST_LISTED)):
            try:
                state = path.lstat()
            except FileNotFoundError:  # removed meanwhile
                continue
            lines.append(f"{state.st_mode:06o} {state.st_size:12d} {path.relative_to(folder)}\n")
        self.add(name, "".join(lines) or "empty\n")

    def hide(self, text: str) -> str:
        """Return a text without secrets and without the words of this report."""
        if self._secrets:
            text = re.sub(self._secrets, "[SECRET]", text)
        for form, replacement in FORMS:
            text = form.sub(replacement, text)
        text = _IPV6.sub(_hide_address, text)
        if self._paths:
            text = self._paths.sub("[PATH]", text)
        if self._roots:
            text = re.sub(rf"{self._roots}(?!\w)", "[NAME]", text)
        return _IMAGE.sub("[IMAGE]", self._names.hide(text))

    def describe(self) -> Iterator[str]:
        """Return a line for each file: its name and size."""
        width = max(map(len, self._files), default=0)
        return (f"  {name:<{width}}  {format_bytes(len(content))}" for name, content in self._files.items())

    def write(self, path: Path) -> int:
        """Write the archive, readable by its owner alone; return its bytes. Raises StorageFailed."""
        content = BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in self._files.items():
                archive.writestr(name, text)
        packed = content.getvalue()
        atomic_write(path, packed, private=True)
        return len(packed)


def print_and_write(report: BugReport, path: Path) -> None:
    """Show which files the report has, then write it. Raises StorageFailed."""
    click.echo("this report has, without secrets and names:")
    for line in report.describe():
        click.echo(line)
    size = report.write(path)
    click.echo(f"written: {path} ({format_bytes(size)}); look into it before you send it")


class _Names:
    """Names of an owner's files and classes, thousands if need be, each to be replaced where it stands alone.

    A name of one letter, or of digits alone, stays: it says nothing.
    """

    def __init__(self, names: Iterable[str]) -> None:
        cores = {_CORE.sub("", form) for name in names for form in _list_text_forms(name)}
        self._cores = frozenset(core for core in cores if len(core) > 1 and not core.isdigit())
        words = [_WORD.findall(core) for core in self._cores]
        self._firsts = frozenset(parts[0] for parts in words)
        self._most_words = max(map(len, words), default=0)

    def hide(self, text: str) -> str:
        words = [match.span() for match in _WORD.finditer(text)] if self._cores else []
        pieces, done, number = [], 0, 0
        while number < len(words):
            start, stop = words[number]
            number += 1
            if text[start:stop] not in self._firsts:
                continue
            for last in range(min(number - 1 + self._most_words, len(words)) - 1, number - 2, -1):  # the longest first
                if text[start : words[last][1]] in self._cores:
                    pieces += [text[done:start], "[NAME]"]
                    done, number = words[last][1], last + 1
                    break
        return "".join([*pieces, text[done:]])


def _list_text_forms(name: str) -> set[str]:
    """Return a name as logs, JSON and Python's messages write it."""
    readable = os.fsencode(name).decode(errors="replace")
    quoted = {json.dumps(form, ensure_ascii=ascii)[1:-1] for form in (name, readable) for ascii in (True, False)}
    return {name, readable, repr(name)[1:-1], quote(os.fsencode(name)), *quoted}


def _list_secret_forms(value: str) -> set[str]:
    """Return a secret in all forms that a text may have; of an address with a password that one, too."""
    password = re.match(r"\w[\w+.-]*://[^/\s:@]*:([^/\s]*)@", value)
    values = {value, *({password[1], unquote(password[1])} if password else ())}
    return {form for each in values for form in _list_text_forms(each) if len(form) >= SHORTEST_SECRET}


def _find_any(words: Collection[str]) -> str | None:
    """Make a pattern that finds each of the words, the longest first; None without words."""
    some = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word not in ("/", "."))
    return f"(?:{some})" if some else None


def _hide_address(match: re.Match[str]) -> str:
    """Replace what is an IPv6 address, and not a time or a name of this machine."""
    try:
        return match[0] if IPv6Address(match[0]) in (IPv6Address("::1"), IPv6Address("::")) else "[ADDRESS]"
    except AddressValueError:
        return match[0]
