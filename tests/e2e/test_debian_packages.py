"""Packages for Debian: built twice alike, whole, and their program joins and trains from below /opt."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coordinator.operations.releasing import publish
from fedvit.publisher import PublisherKey
from fedvit.releases import pack_folder
from tests.support.programs import Stage
from tests.support.roots import Root
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
ENTER = """
mount -t tmpfs tmpfs /opt && mkdir /opt/fedvit && mount --bind "$1" /opt/fedvit && shift && exec "$@"
"""
"""Makes a folder /opt/fedvit for one process and its children, in a namespace of their own."""


@pytest.fixture(scope="module")
def built(own_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the packages for this machine twice; return both folders."""
    home = tmp_path_factory.mktemp("debian")
    folders = home / "one", home / "two"
    for folder in folders:
        command = [ROOT / "deploy/debian/build.sh", own_wheel, folder, sys.executable, f"amd64:{VERSION}"]
        subprocess.run(command, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    return folders


def find_package(folder: Path, name: str) -> Path:
    [package] = folder.glob(f"{name}_*.deb")
    return package


def test_two_builds_are_equal(built: tuple[Path, Path]) -> None:
    one, two = built
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert len(names) == 3
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize("name", ["fedvit-edge", "fedvit-server"])
def test_package_is_whole(built: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """It names no folder of the machine that built it."""
    package = find_package(built[0], name)
    subprocess.run(["dpkg-deb", "--raw-extract", package, tmp_path], check=True)
    for script in ("postinst", "prerm", "postrm"):
        subprocess.run(["sh", "-n", tmp_path / "DEBIAN" / script], check=True)
    for listed in (tmp_path / "DEBIAN" / "conffiles").read_text().split():
        assert (tmp_path / listed[1:]).stat().st_mode & 0o777 == 0o600, "settings may hold a password"
    units = sorted((tmp_path / "usr/lib/systemd/system").glob("*.service"))
    assert units
    for unit in units:
        [program] = re.findall(r"^ExecStart=(\S+)", unit.read_text(), re.MULTILINE)
        assert program.startswith("/opt/fedvit-server/bin/" if name == "fedvit-server" else "/opt/fedvit/bin/")
        assert name == "fedvit-server" or (tmp_path / program[1:]).is_file()
    assert list((tmp_path / "usr/share/man/man1").glob("*.1.gz"))
    assert list((tmp_path / "usr/share/bash-completion/completions").iterdir())
    builder = str(Path.home()), str(ROOT)
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.suffix in {".py", "", ".txt", ".json", ".cfg", ".toml"}:
            text = path.read_bytes()
            assert not [folder for folder in builder if folder.encode() + b"/" in text], path


def install(built: tuple[Path, Path], installed: Path) -> list[str]:
    """Unpack the device's package; return the beginning of a command line in which it is below /opt."""
    subprocess.run(["dpkg-deb", "--extract", find_package(built[0], "fedvit-edge"), installed], check=True)
    python = installed / "opt/fedvit/bin/python"
    assert os.readlink(python) == "/usr/bin/python3"
    # this machine's Python of the same version, wherever it is
    python.unlink()
    python.symlink_to(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
    settings = installed / "opt/fedvit/pyvenv.cfg"
    settings.write_text(settings.read_text().replace("/usr/bin", str(Path(sys.base_prefix) / "bin")))

    enter = ["unshare", "--map-root-user", "--mount", "sh", "-ec", ENTER, "sh", str(installed / "opt/fedvit")]
    state = installed.parent / "state"
    clean = ["env", "-i", f"FEDVIT_STATE={state}", f"FEDVIT_TRIAL={state / 'trial'}", "PATH=/usr/bin:/bin"]
    return [*enter, *clean, "sh", str(installed / "usr/bin/edge-client")]


def test_installed_device_trains(built: tuple[Path, Path], stage: Stage) -> None:
    """The environment below /opt/fedvit is enough, with processes for graphs; nothing comes from this test's own."""
    program = install(built, stage.folder / "installed")
    coordinator = stage.coordinator("--devices", "1", "--rounds", "1")
    where = [
        "--broker",
        f"127.0.0.1:{stage.port}",
        "--data",
        str(stage.parts / "device-0"),
        "--id",
        "packaged",
        "--once",
    ]
    device = stage.start("device", [*program, *where])
    assert stage.finish(device, "device") == 0, stage.log("device")
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.query("select device, kind from results order by kind") == [
        ("packaged", "evaluate"),
        ("packaged", "train"),
    ]
    assert (stage.folder / "state").is_dir()


INSTALLED = """
Package: python3
Status: install ok installed
Maintainer: Nobody <nobody@localhost>
Architecture: amd64
Version: {}-1
Description: none

Package: libstdc++6
Status: install ok installed
Maintainer: Nobody <nobody@localhost>
Architecture: amd64
Version: 12
Description: none
"""


def test_purge_leaves_only_pictures(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Also no token that was never used. The package's scripts run: they start, restart and stop its units."""
    root = Root(tmp_path / "root")
    (root.home / "var/lib/dpkg/status").write_text(INSTALLED.format(VERSION))

    def run(script: str) -> str:
        done = root.run(script)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    package = find_package(built[0], "fedvit-edge")
    assert "next: sudo edge-client join TOKEN" in run(f"dpkg --install {package}")
    assert root.take_calls() == ["daemon-reload", "enable --quiet fedvit-join.service"]
    picture = root.home / "srv/fedvit/images/cat/1.png"
    left = [root.home / name for name in ("etc/fedvit/token", "var/lib/private/fedvit-edge/identity/key.pem")]
    left.append(root.home / "opt/fedvit/versions/9.9/bin/python")
    for file in (picture, *left):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    settings = root.home / "etc/fedvit/edge.env"
    settings.write_text("FEDVIT_DATA=/srv/mine\n")

    assert "next:" not in run(f"dpkg --install {package}")
    assert "try-restart fedvit-edge.service fedvit-serve.service" in root.take_calls()
    assert settings.read_text() == "FEDVIT_DATA=/srv/mine\n", "an upgrade keeps the owner's settings"
    assert not left[-1].exists(), "an upgrade replaces what edge-client update has installed"

    run("dpkg --remove fedvit-edge")
    [stopped] = [call for call in root.take_calls() if call.startswith("disable")]
    assert set(stopped.split()[2:]) == {
        f"fedvit-{name}" for name in ("update.timer", "join.service", "serve.service", "edge.service")
    }
    assert settings.exists()
    run("dpkg --purge fedvit-edge")
    own = (path for folder in ("opt", "etc", "srv", "usr", "var/lib") for path in (root.home / folder).rglob("*"))
    files = {str(path.relative_to(root.home)) for path in own if path.is_file() and "dpkg" not in path.parts}
    assert files == {"srv/fedvit/images/cat/1.png"}
    assert [path.name for path in (root.home / "opt").iterdir()] == []


def test_installed_device_updates_itself(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The package that is built beside it goes beside it, under another version, and is left again."""
    program = install(built, tmp_path / "installed")
    [package] = built[0].glob("fedvit-edge-*.zip")
    python, machine = package.stem.split("-")[-2:]
    with zipfile.ZipFile(package) as archive:
        archive.extractall(tmp_path / "newer")
    [file] = (tmp_path / "newer").glob("fedvit-*.dist-info/METADATA")
    version = file.parent.name.removesuffix(".dist-info").removeprefix("fedvit-")
    file.write_text(file.read_text().replace(f"Version: {version}", "Version: 99.0.0", 1))
    file.parent.rename(file.parent.with_name("fedvit-99.0.0.dist-info"))
    newer = tmp_path / f"fedvit-edge-99.0.0-{python}-{machine}.zip"
    pack_folder(tmp_path / "newer", newer)
    key = PublisherKey.create(tmp_path / "release.key")
    releases = publish(tmp_path / "releases", "stable", [newer], {}, key)

    def run(*arguments: str) -> str:
        done = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version").split()[-1] == version
    output = run("update", str(tmp_path / "releases"), "--update-key", key.public)
    assert "99.0.0 is installed" in output
    assert run("--version").split()[-1] == "99.0.0"
    run("update", "--back")
    assert run("--version").split()[-1] == version
    [offer] = releases.offers
    print(output, f"packed {offer.packages[0].size}, unpacked {offer.packages[0].unpacked} bytes")
