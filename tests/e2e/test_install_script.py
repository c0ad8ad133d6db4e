"""deploy/install.sh on this machine, below a folder of its own: installs, upgrades, stays whole, removes.

The wheel's dependencies are those of these tests: nothing is fetched.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "install.sh"


@pytest.fixture
def wheel(own_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the wheel of this source, in a folder for others."""
    return Path(shutil.copy(own_wheel, tmp_path_factory.mktemp("wheel")))


def make_version(wheel: Path, version: str) -> Path:
    """Make the same wheel with another version."""
    old = wheel.name.split("-")[1]
    new = wheel.parent / wheel.name.replace(old, version, 1)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(new, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(".dist-info/METADATA"):
                content = content.replace(f"Version: {old}\n".encode(), f"Version: {version}\n".encode(), 1)
            elif name.endswith(".dist-info/RECORD"):
                content = content.replace(f"fedvit-{old}.dist-info".encode(), f"fedvit-{version}.dist-info".encode())
            target.writestr(name.replace(f"fedvit-{old}.dist-info", f"fedvit-{version}.dist-info"), content)
    return new


class Machine:
    """A folder that is the root of a machine, or the home of a user."""

    def __init__(self, folder: Path, *, is_root: bool) -> None:
        self.folder = folder
        programs = folder / "programs"
        programs.mkdir(parents=True)
        (programs / "id").write_text(f"#!/bin/sh\necho {0 if is_root else 1000}\n")
        (programs / "id").chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "FEDVIT_ROOT": str(folder / "root") if is_root else "",
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_COMPILE": "1",
        }
        self.to = folder / "root" / "opt" / "fedvit" if is_root else folder / "home" / ".local" / "share" / "fedvit"

    def install(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["sh", SCRIPT, *arguments], env=self.environment, capture_output=True, text=True, check=False
        )

    def read_version(self) -> str:
        """Run the installed program; return its version."""
        paths = f"{next(self.to.glob('lib/*/site-packages'))}:{sysconfig.get_path('purelib')}"
        command = [self.to / "bin" / "python", "-P", "-m", "edge_client.cli", "--version"]
        environment = {**self.environment, "PYTHONPATH": paths}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()[-1]

    def list_files(self) -> set[str]:
        """List everything below the root folder, or of the user's programs."""
        own = (
            path.relative_to(self.folder) for path in self.folder.rglob("*") if not path.is_dir() or path.is_symlink()
        )
        return {str(path) for path in own if path.parts[0] == "root" or path.parts[:2] == ("home", ".local")}


def check_installed(machine: Machine, wheel: Path, version: str) -> str:
    done = machine.install("edge", wheel)
    assert done.returncode == 0, done.stderr
    assert machine.read_version() == version
    for leftover in ("new", "old", "log"):
        assert not machine.to.with_name(f"{machine.to.name}.{leftover}").exists()
    return done.stdout


def test_root_installs_upgrades_and_removes(tmp_path: Path, wheel: Path) -> None:
    machine = Machine(tmp_path, is_root=True)
    own = wheel.name.split("-")[1]
    root = tmp_path / "root"
    assert "edge-client join TOKEN" in check_installed(machine, wheel, own)
    assert os.readlink(root / "usr/local/bin/edge-client") == "/opt/fedvit/bin/edge-client"
    assert (root / "opt/fedvit/bin/edge-client").read_text() == (ROOT / "deploy/debian/edge/program").read_text()
    for script in (root / "opt/fedvit/bin").iterdir():
        if not script.is_symlink():
            assert str(tmp_path) not in script.read_text(), f"{script} names the folder of the image"
    assert "/opt/fedvit/bin/edge-client" in (root / "etc/systemd/system/fedvit-edge.service").read_text()
    settings = root / "etc/fedvit/edge.env"
    assert settings.stat().st_mode & 0o077 == 0

    settings.write_text("FEDVIT_DATA=/srv/mine\n")
    (machine.to / "update.json").write_text("{}")
    check_installed(machine, make_version(wheel, "9.8.7"), "9.8.7")
    assert settings.read_text() == "FEDVIT_DATA=/srv/mine\n", "an upgrade keeps the owner's settings"
    assert (machine.to / "update.json").read_text() == "{}"

    damaged = wheel.parent / "fedvit-9.9.9-py3-none-any.whl"
    damaged.write_bytes(wheel.read_bytes()[:1000])
    assert machine.install("edge", damaged).returncode != 0
    assert machine.read_version() == "9.8.7", "a failed upgrade leaves the version before"

    assert machine.install("edge", "--remove").returncode == 0
    assert machine.list_files() == {"root/etc/fedvit/edge.env"}
    assert machine.install("edge", "--purge").returncode == 0
    assert machine.list_files() == set()


def test_services_can_read_what_a_careful_root_installs(tmp_path: Path, wheel: Path) -> None:
    """Their users are others, also where root's own files are for root alone."""
    machine = Machine(tmp_path, is_root=True)
    before = os.umask(0o077)
    try:
        done = machine.install("edge", wheel)
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    unit = tmp_path / "root/etc/systemd/system/fedvit-edge.service"
    for path in (machine.to, *machine.to.rglob("*"), unit):
        needed = 0o5 if path.is_dir() else 0o4
        assert path.stat().st_mode & needed == needed, path
    assert (tmp_path / "root/etc/fedvit/edge.env").stat().st_mode & 0o077 == 0


def test_purge_leaves_the_settings_of_the_other_program(tmp_path: Path) -> None:
    machine = Machine(tmp_path, is_root=True)
    own = {
        "edge": {"root/etc/fedvit/edge.env", "root/etc/fedvit/token"},
        "server": {"root/etc/fedvit/service.toml", "root/etc/fedvit/coordinator.env"},
    }
    (tmp_path / "root/etc/fedvit").mkdir(parents=True)
    for file in own["edge"] | own["server"]:
        (tmp_path / file).write_text("mine\n")
    assert machine.install("edge", "--purge").returncode == 0
    assert machine.list_files() == own["server"]
    assert machine.install("server", "--purge").returncode == 0
    assert not (tmp_path / "root/etc/fedvit").exists()


def test_engine_for_a_gpu_replaces_the_other(tmp_path: Path, wheel: Path) -> None:
    machine = Machine(tmp_path, is_root=False)
    for name in ("onnxruntime", "onnxruntime-gpu"):
        file = tmp_path / "wheels" / f"{name.replace('-', '_')}-1.31.1-py3-none-any.whl"
        file.parent.mkdir(exist_ok=True)
        info = f"{name.replace('-', '_')}-1.31.1.dist-info"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("onnxruntime/built_for.txt", name)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
    machine.environment["PIP_FIND_LINKS"] = str(tmp_path / "wheels")
    del machine.environment["PIP_NO_DEPS"]
    machine.environment["PIP_CONSTRAINT"] = ""
    own = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(own, "w") as target:
        for name in source.namelist():
            lines = source.read(name).splitlines(keepends=True)
            kept = [line for line in lines if not line.startswith(b"Requires-Dist") or b"onnxruntime" in line]
            target.writestr(name, b"".join(kept) if name.endswith("METADATA") else source.read(name))
    for options, engine in (((), "onnxruntime"), (("--gpu",), "onnxruntime-gpu"), ((), "onnxruntime")):
        done = machine.install("edge", own, *options)
        assert done.returncode == 0, done.stderr
        [packages] = machine.to.glob("lib/*/site-packages")
        assert (packages / "onnxruntime" / "built_for.txt").read_text() == engine
        installed = {file.name.split("-")[0] for file in packages.glob("onnxruntime*.dist-info")}
        assert installed == {engine.replace("-", "_")}
    refused = machine.install("edge", own, "--cuda")
    assert (refused.returncode, "'--cuda'" in refused.stderr) == (2, True)


def test_user_installs_below_home(tmp_path: Path, wheel: Path) -> None:
    machine = Machine(tmp_path, is_root=False)
    check_installed(machine, wheel, wheel.name.split("-")[1])
    program = tmp_path / "home/.local/bin/edge-client"
    environment = {**machine.environment, "PYTHONPATH": sysconfig.get_path("purelib")}
    shown = subprocess.run([program, "--help"], env=environment, capture_output=True, text=True, check=True)
    assert "doctor" in shown.stdout
    assert machine.install("edge", "--remove").returncode == 0
    assert machine.list_files() == set()


@pytest.mark.parametrize(("kind", "own"), [("edge", ".local/state"), ("server", ".cache")])
def test_purge_of_a_user(tmp_path: Path, kind: str, own: str) -> None:
    """It removes the program's own files below home, and not those of the other program."""
    machine = Machine(tmp_path, is_root=False)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        machine.environment.pop(name, None)
    files = {folder: tmp_path / "home" / folder / "fedvit" / "identity" for folder in (".local/state", ".cache")}
    for file in files.values():
        file.mkdir(parents=True)
    assert machine.install(kind, "--remove").returncode == 0
    assert all(file.exists() for file in files.values())
    assert machine.install(kind, "--purge").returncode == 0
    assert [folder for folder, file in files.items() if not file.parent.exists()] == [own]


def test_python_that_is_too_old_and_no_network(tmp_path: Path, wheel: Path) -> None:
    """It says which Python is there, and one line what to do."""
    machine = Machine(tmp_path, is_root=False)
    # a python3 of 3.10, and no other before it on the PATH
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        program = tmp_path / "programs" / name
        program.write_text('#!/bin/sh\ncase "$*" in *platform*) echo 3.10.12 ;; *) exit 1 ;; esac\n')
        program.chmod(0o755)
    done = machine.install("edge", wheel)
    assert done.returncode == 1
    assert "python3: 3.10.12" in done.stdout
    [line] = done.stderr.splitlines()
    assert "install Python 3.11 to 3.13" in line
    assert not (tmp_path / "home/.local/bin/edge-client").exists()
    assert machine.install("edge", "--remove").returncode == 0
    assert machine.list_files() == set()


@pytest.mark.parametrize("words", [[], ["desk"], ["edge"], ["edge", "no.whl"]])
def test_mistakes_are_one_line(tmp_path: Path, words: list[str]) -> None:
    done = Machine(tmp_path, is_root=False).install(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
