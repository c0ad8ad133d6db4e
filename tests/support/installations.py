"""Installations of the device's software as packages make them, and releases of other versions of this source.

A version holds the packages of the source, and finds its dependencies where these tests find theirs. With
FEDVIT_KILL_AT="any N" an update kills itself by SIGKILL before its N-th change of a folder, with "link N" before its
N-th rename or new link.
"""

import os
import random
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from coordinator.operations.releasing import publish
from fedvit.publisher import PublisherKey
from fedvit.releases import pack_folder
from tests.support.children import run_child
from tests.support.waiting import WAIT_S

SOURCE = Path(__file__).parents[2]
PACKAGES = ("fedvit", "edge_client", "export", "profiles")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
KILLER = """
import os, signal, sys
kind, _, at = os.environ.get("FEDVIT_KILL_AT", "none 0").partition(" ")
KINDS = {"any": ("os.rename", "os.symlink", "os.remove", "os.mkdir", "os.rmdir"), "link": ("os.rename", "os.symlink")}
count = 0
if "update" in sys.orig_argv and kind in KINDS:
    def count_changes(event, arguments):
        global count
        if event in KINDS[kind]:
            count += 1
            if count == int(at):
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count_changes)
"""


def make_packages(folder: Path, version: str, *, broken: str = "") -> Path:
    """Make the site-packages of a version in a new folder.

    `broken` is added to the end of edge_client/cli.py.
    """
    for name in PACKAGES:
        shutil.copytree(SOURCE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / f"fedvit-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.4\nName: fedvit\nVersion: {version}\n")
    (folder / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport count_changes\n")
    (folder / "count_changes.py").write_text(KILLER)
    if broken:
        cli = folder / "edge_client" / "cli.py"
        cli.write_text(cli.read_text().replace('if __name__ == "__main__":', f"{broken}\n\nif __name__ == '__main__':"))
    return folder


class Publisher:
    """Makes packages and publishes them in the folder of releases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.releases = folder / "releases"
        folder.mkdir()
        self.key = PublisherKey.create(folder / "release.key")

    def pack(self, version: str, *, broken: str = "") -> Path:
        """Make a package of this source with another version number, once."""
        package = self.folder / f"fedvit-edge-{version}-py{PYTHON.replace('.', '')}-{os.uname().machine}.zip"
        if not package.exists():
            pack_folder(make_packages(self.folder / version, version, broken=broken), package)
        return package

    def publish(self, version: str, *, channel: str = "stable", broken: str = "", **labels: str) -> None:
        publish(self.releases, channel, [self.pack(version, broken=broken)], labels, self.key)


class Device:
    """An installation with the state of a device."""

    def __init__(self, folder: Path, version: str = "0.1.0") -> None:
        self.root, self.state = folder / "fedvit", folder / "state"
        self.state.mkdir(parents=True)
        make_packages(self.root / "lib" / f"python{PYTHON}" / "site-packages", version)
        python = Path(sys.executable).resolve()
        (self.root / "bin").mkdir()
        (self.root / "bin" / "python").symlink_to(python)
        (self.root / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
        self.program = self.root / "bin" / "edge-client"
        shutil.copy(SOURCE / "deploy" / "debian" / "edge" / "program", self.program)
        self.program.chmod(0o755)
        self.environment = {**os.environ, "FEDVIT_TRIAL": str(self.state / "trial"), "FEDVIT_STATE": str(self.state)}

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run edge-client to its end."""
        return run_child([self.program, *arguments], env={**self.environment, **variables})

    def update(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("update", *arguments, **variables)

    def read_version(self) -> str:
        """Return the version that is started, which is whole: it imports what a task needs."""
        done = self.run("--version")
        assert done.returncode == 0, done.stderr
        folder = self.root / (os.readlink(self.root / "current") if (self.root / "current").is_symlink() else ".")
        command = [folder / "bin" / "python", "-P", "-c", "import edge_client.agent, edge_client.owner.tiny_step"]
        subprocess.run(command, check=True, timeout=WAIT_S)
        return done.stdout.split()[-1]


def draw_kills(count: int, seed: int) -> list[str]:
    """Draw values of FEDVIT_KILL_AT: every step at which names move, and others by the seed."""
    links = [f"link {number}" for number in range(8, 0, -1)][:count]
    drawn = random.Random(seed)
    return [*links, *(f"any {drawn.randint(1, 60)}" for _ in range(count - len(links)))]


def flip_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def describe(done: subprocess.CompletedProcess[str], code: str, *words: str) -> None:
    """Check that a program ended with one line for people: its code, and what it names."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("edge-client: ")
    assert lines[0].endswith(f"[{code}]"), lines[0]
    for word in words:
        assert word in lines[0], lines[0]
