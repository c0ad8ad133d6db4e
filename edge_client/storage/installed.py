"""Versions of the device's software below an installation, and the marks of the one that is on trial.

An installation is a folder with an environment of its own, from a package or `install.sh`, and newer ones beside it:

    bin/edge-client      starts one of them (deploy/debian/edge/program)
    current, former      links to the newest version and to the one before it: `versions/VERSION`, or `.`
    versions/VERSION     an environment that was installed by an update

Each change is one rename. The starter uses `former` if the marks say that `current` has failed, so that the return
needs no rights: a service cannot write to its installation, only to the file of marks in its state.
"""

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedvit.files import sync_folder

FOLDER_VARIABLE, VERSION_VARIABLE, MARKS_VARIABLE = "FEDVIT_INSTALLED", "FEDVIT_VERSION", "FEDVIT_TRIAL"
"""Set by the starter: the installation, the started version's folder below it, the file of marks."""
OWN = "."
"""The environment that the installation began with."""
MAX_MARKS_CHARACTERS = 1 << 20
CURRENT, FORMER, VERSIONS = "current", "former", "versions"


@dataclass(frozen=True)
class Installation:
    """The installation that this program was started from."""

    root: Path
    started: str  # folder of this version below `root`
    marks: Path

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return the installation; None for a program that was started otherwise, such as from a wheel."""
        root, started, marks = map(environment.get, (FOLDER_VARIABLE, VERSION_VARIABLE, MARKS_VARIABLE))
        return cls(Path(root), started, Path(marks)) if root and started and marks else None

    def read_link(self, name: str) -> str:
        """Return the folder that a link names; the first environment without a link."""
        try:
            return os.readlink(self.root / name)
        except OSError:
            return OWN

    def set_link(self, name: str, folder: str) -> None:
        """Let a link name another folder, durably and at once. Raises OSError."""
        trial = self.root / f".{name}-{secrets.token_hex(4)}"
        os.symlink(folder, trial)
        try:
            trial.replace(self.root / name)
        except OSError:
            trial.unlink()
            raise
        sync_folder(self.root)

    def mark(self, mark: str) -> None:
        """Add "ready", "task", "done", "failed" or "end" to the marks, if they can be written."""
        with contextlib.suppress(OSError), self.marks.open("a") as file:
            file.write(f"{Path(self.started).name} {mark}\n")

    def is_on_trial(self) -> bool:
        """Tell whether this version has not done a task yet, in a service that counts its starts."""
        name, marks = Path(self.started).name, self._read_marks()
        return self.started != OWN and self.was_tried(self.started) and f"{name} done" not in marks

    def is_proven(self) -> bool:
        """Return True once this version has done a task, and where no service would say so."""
        marks = self._read_marks()
        return self.started == OWN or not marks or f"{Path(self.started).name} done" in marks

    def was_tried(self, folder: str) -> bool:
        """Return True if a service has started the version of a folder on trial."""
        return f"{Path(folder).name} start" in self._read_marks()

    def _read_marks(self) -> list[str]:
        try:
            with self.marks.open(errors="replace") as file:
                return file.read(MAX_MARKS_CHARACTERS).splitlines()
        except OSError:
            return []
