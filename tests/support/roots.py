"""A machine of its own for commands of root, in a user namespace: the real dpkg changes a test's folders.

/usr is this machine's with a test's changes above it, dpkg's list of packages is empty, and systemctl is a script that
notes its calls.
"""

import subprocess
from pathlib import Path

from tests.support.children import run_child

_ENTER = """
for folder in opt etc boot srv run var/lib; do mount --bind "$1/$folder" "/$folder"; done
mount -t overlay overlay -o "lowerdir=/usr,upperdir=$1/usr,workdir=$1/work,userxattr" /usr
"""
_FOLDERS = ("opt", "etc", "boot", "srv", "usr", "work", "programs", "run/systemd/system")


class Root:
    """The machine's own folders, below `home`; scripts in `programs` come before its programs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        dpkg = home / "var/lib/dpkg"
        for folder in (*(home / name for name in _FOLDERS), dpkg / "updates", dpkg / "info"):
            folder.mkdir(parents=True)
        for name in ("status", "available"):
            (dpkg / name).touch()
        self.add_program("systemctl", f'echo "$*" >> {home}/systemctl.log')

    def add_program(self, name: str, script: str) -> None:
        """Put a script of sh before the machine's program of this name."""
        file = self.home / "programs" / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def run(self, script: str) -> "subprocess.CompletedProcess[str]":
        """Run a script of sh there as root."""
        command = ["unshare", "--map-root-user", "--mount", "sh", "-ec", _ENTER + script, "sh", self.home]
        path = f"{self.home}/programs:/usr/sbin:/usr/bin:/sbin:/bin"
        return run_child(command, env={"PATH": path, "LC_ALL": "C"}, stdin=subprocess.DEVNULL)

    def take_calls(self) -> list[str]:
        """Return the calls of systemctl since the last time."""
        log = self.home / "systemctl.log"
        calls = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return calls


def build_package(folder: Path, name: str, files: dict[str, bytes], **fields: str) -> Path:
    """Build a Debian package with these files."""
    tree = folder / f"{name}-tree"
    control = {"Package": name, "Version": "1.0", "Architecture": "all", "Maintainer": "Nobody <nobody@localhost>"}
    control |= {"Description": name, "Installed-Size": str(sum(map(len, files.values())) // 1024 + 1), **fields}
    contents = {"DEBIAN/control": "".join(f"{key}: {value}\n" for key, value in control.items()).encode(), **files}
    for path, content in contents.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    file = folder / f"{name}_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, file], check=True, capture_output=True)
    return file
