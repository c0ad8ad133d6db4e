"""`edge-client update` with real processes: from one version to the next and back, under kill -9 at every step; what is
not signed, changed or older is refused with one line."""

import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from coordinator.operations.releasing import publish
from edge_client.owner.release_source import TRIES
from edge_client.storage.installed import VERSIONS
from fedvit.minisign import format_minisign_key
from fedvit.publisher import PublisherKey
from fedvit.releases import Package, decode_list, encode_list, hash_file
from tests.support.brokers import make_certificate
from tests.support.children import run_child
from tests.support.cutting_server import cutting
from tests.support.draws import choose_count
from tests.support.installations import PYTHON, Device, Publisher, describe, draw_kills, flip_bit
from tests.support.programs import Stage, wait_for
from tests.support.shifted_clock import ShiftedClock
from tests.support.waiting import WAIT_S

KILLS = choose_count(6, 20)


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    publisher = Publisher(tmp_path_factory.mktemp("publisher") / "files")
    publisher.publish("0.2.0")
    return publisher


@pytest.fixture
def releases(publisher: Publisher, tmp_path: Path) -> Path:
    """A folder with version 0.2.0 that a test may change."""
    return shutil.copytree(publisher.releases, tmp_path / "releases")


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "device")


def first_update(device: Device, publisher: Publisher, releases: Path) -> "subprocess.CompletedProcess[str]":
    return device.update(str(releases), "--update-key", publisher.key.public)


def check_done(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_killed_update_leaves_one_working_version(device: Device, publisher: Publisher, releases: Path) -> None:
    """Also a killed way back. Afterwards both go through, as if nothing had happened."""
    check_done(first_update(device, publisher, releases))
    kills, versions = 0, set()
    for moment in itertools.cycle(draw_kills(KILLS, seed=2)):
        is_new = device.read_version() == "0.2.0"
        done = device.update("--back" if is_new else "--retry", FEDVIT_KILL_AT=moment)
        assert done.returncode in (0, -9), (moment, done.stderr)
        kills += done.returncode == -9
        versions.add(device.read_version())
        if kills == KILLS:
            break
    assert versions == {"0.1.0", "0.2.0"}
    if device.read_version() == "0.1.0":
        check_done(device.update("--retry"))
    assert device.read_version() == "0.2.0"
    check_done(device.update("--back"))
    assert device.read_version() == "0.1.0"
    check_done(device.update("--retry"))
    assert {path.name for path in (device.root / "versions").iterdir()} == {"0.2.0"}


def test_changed_byte_is_refused(device: Device, publisher: Publisher, releases: Path) -> None:
    """In the package, in the list, in the signature."""
    [package] = releases.glob("*.zip")
    for file in (package, releases / "stable.json", releases / "stable.json.minisig"):
        whole = file.read_bytes()
        flip_bit(file, len(whole) // 2)
        code = "FV1465" if file == package else "FV1463"
        describe(first_update(device, publisher, releases), code, "stable.json" if file != package else package.name)
        assert device.read_version() == "0.1.0"
        file.write_bytes(whole)
    assert not list((device.root / "versions").iterdir())


def test_other_key_is_refused(device: Device, publisher: Publisher, releases: Path, tmp_path: Path) -> None:
    """And a stored key that somebody wants to replace in passing."""
    other = PublisherKey.create(tmp_path / "other.key")
    describe(device.update(str(releases), "--update-key", other.public), "FV1463", other.public, "Ask")
    describe(first_update(device, publisher, releases), "FV1467", "--replace-key", publisher.key.public)
    assert device.read_version() == "0.1.0"


def test_older_version_is_refused(device: Device, publisher: Publisher, releases: Path) -> None:
    """And a list from before one that the device has seen, which might offer a version with a known fault."""
    former = {path: path.read_bytes() for path in releases.glob("stable.json*")}
    publish(releases, "beta", [publisher.pack("0.0.9")], {}, publisher.key)
    describe(
        device.update(str(releases), "--update-key", publisher.key.public, "--channel", "beta"),
        "FV1464",
        "0.0.9",
        "0.1.0",
    )
    publish(releases, "stable", [publisher.pack("0.2.0")], {}, publisher.key)
    assert "would be installed" in device.update("--channel", "stable", "--check").stdout
    for path, content in former.items():
        path.write_bytes(content)
    describe(device.update(), "FV1464", "serial")
    for suffix in ("", ".minisig"):  # nor the list of another channel
        shutil.copy(releases / f"beta.json{suffix}", releases / f"stable.json{suffix}")
    describe(device.update(), "FV1465", "channel beta")
    assert device.read_version() == "0.1.0"


def test_signed_package_cannot_leave_its_folder(device: Device, publisher: Publisher, releases: Path) -> None:
    """A publisher's mistake, too, is found before a file is unpacked."""
    [file] = releases.glob("*.zip")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("../../bin/edge-client", "#!/bin/sh")
    listed = decode_list((releases / "stable.json").read_bytes(), "")
    [offer] = listed.offers
    [package] = offer.packages
    changed = msgspec.structs.replace(package, sha256=hash_file(file), size=file.stat().st_size)
    content = encode_list(
        msgspec.structs.replace(listed, offers=(msgspec.structs.replace(offer, packages=(changed,)),))
    )
    (releases / "stable.json").write_bytes(content)
    (releases / "stable.json.minisig").write_text(publisher.key.sign_file(content, ""))
    describe(first_update(device, publisher, releases), "FV1465", "leads out of its folder")
    assert device.read_version() == "0.1.0"


def test_staged_roll_out_by_label(device: Device, publisher: Publisher, releases: Path) -> None:
    publish(releases, "stable", [publisher.pack("0.3.0")], {"room": "kitchen"}, publisher.key)
    key = ["--update-key", publisher.key.public]
    assert "0.2.0 would be" in device.update(str(releases), *key, "--check").stdout
    assert "0.3.0 would be" in device.update("--check", "--label", "room=kitchen").stdout
    assert "0.3.0 would be" in device.update("--check", FEDVIT_LABELS="room=kitchen site=berlin").stdout


@pytest.mark.slow
def test_version_that_fails_its_checks_is_not_switched_to(device: Device, publisher: Publisher, releases: Path) -> None:
    """The device fetches it again only if the owner says so, or if a newer one comes."""
    broken = "raise SystemExit('this build is broken')"
    publish(releases, "stable", [publisher.pack("0.3.1", broken=broken)], {}, publisher.key)
    describe(first_update(device, publisher, releases), "FV1466", "0.3.1", "broken")
    assert device.read_version() == "0.1.0"
    done = device.update()
    assert done.returncode == 0
    assert "0.3.1 is offered, and was refused" in done.stdout
    describe(device.update("--retry"), "FV1466", "0.3.1")


# --- bad surroundings ---------------------------------------------------------------------------------


def test_no_network(device: Device, publisher: Publisher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url = f"http://127.0.0.1:{port}/releases"
    describe(device.update(url, "--update-key", publisher.key.public), "FV1462", url, "try again")
    assert device.read_version() == "0.1.0"


@pytest.fixture
def web_server(releases: Path) -> Iterator[str]:
    """A web server for the folder of releases; its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(releases)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_unsigned_list_is_refused(device: Device, publisher: Publisher, releases: Path, web_server: str) -> None:
    """In a folder and at a web server; one without a list is no folder of releases."""
    (releases / "stable.json.minisig").unlink()
    said = ("FV1463", "is not signed", "stable.json.minisig is missing")
    describe(first_update(device, publisher, releases), *said)
    describe(device.update("--update-key", format_minisign_key(publisher.key.public), "--replace-key"), *said)
    describe(device.update(web_server), *said)
    (releases / "stable.json").unlink()
    describe(device.update(web_server), "FV1462", "is this the folder of releases")
    assert device.read_version() == "0.1.0"


@pytest.mark.slow
def test_cut_download_goes_on_at_the_next_update(device: Device, publisher: Publisher, releases: Path) -> None:
    [package] = [file for file in releases.iterdir() if file.suffix == ".zip"]
    most = package.stat().st_size // (TRIES + 1)  # the first update gets all but the last part
    with cutting(releases, most, whole=most) as server:
        done = device.update(server.url, "--update-key", publisher.key.public)
        describe(done, "FV1462", "ended early")
        assert device.read_version() == "0.1.0"
        [partial] = (device.root / VERSIONS).iterdir()
        assert partial.stat().st_size == TRIES * most
        check_done(device.update())
        assert server.starts(package.name) == [most * number for number in range(TRIES + 1)] + (
            [(TRIES + 1) * most] if package.stat().st_size % (TRIES + 1) else []
        )
    assert device.read_version() == "0.2.0"
    assert not [path for path in (device.root / VERSIONS).iterdir() if path.is_file()], "the package is removed"


@pytest.mark.slow
@pytest.mark.parametrize("years", [-8, 8])
def test_wrong_clock(device: Device, publisher: Publisher, releases: Path, tmp_path: Path, years: int) -> None:
    """A board without a battery starts in the past; no signature depends on it."""
    clock = ShiftedClock(tmp_path).environment(years * 365 * 86_400)
    done = device.update(str(releases), "--update-key", publisher.key.public, **clock)
    assert done.returncode == 0, done.stderr
    assert device.read_version() == "0.2.0"


def test_web_server_with_a_foreign_certificate(device: Device, publisher: Publisher, tmp_path: Path) -> None:
    """With a wrong clock every certificate is: the line says what this device's clock says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"https://localhost:{server.server_port}"
        describe(device.update(url, "--update-key", publisher.key.public), "FV1462", url, "clock says 20")
        server.shutdown()
        thread.join()


def test_full_disk(device: Device, publisher: Publisher, releases: Path, tmp_path: Path) -> None:
    """A disk of which an update would leave nothing, and one that ends while a package is fetched."""
    small = tmp_path / "small"
    small.mkdir()
    update = f"bin/edge-client update {releases} --update-key {publisher.key.public}"
    script = (
        f"mount -t tmpfs -o size=40m tmpfs {small}; cp -a {device.root} {small}/fedvit; exec {small}/fedvit/{update}"
    )
    enter = ["unshare", "--map-root-user", "--mount", "sh", "-ec", script]
    done = subprocess.run(enter, env=device.environment, capture_output=True, text=True, timeout=WAIT_S)
    describe(done, "FV1469", "0.2.0", "make room")
    ends = ["sh", "-c", f"ulimit -f 500; exec {device.root}/{update}"]
    done = subprocess.run(ends, env=device.environment, capture_output=True, text=True, timeout=WAIT_S)
    describe(done, "FV1469", "0.2.0", "the present version goes on")
    assert device.read_version() == "0.1.0"
    assert not list((device.root / "versions").iterdir())


def test_installation_that_is_not_ones_own(device: Device) -> None:
    done = device.run("update", FEDVIT_INSTALLED="")
    assert done.returncode == 2  # no folder of releases is known
    describe(done, "FV1467", "--update-key")
    done = run_child(
        [device.root / "bin" / "python", "-P", "-m", "edge_client.cli", "update"],
        env={name: value for name, value in device.environment.items() if not name.startswith("FEDVIT_")},
    )
    describe(done, "FV1461", "install.sh")


# --- the trial ----------------------------------------------------------------------------------------


class Service:
    """Starts the device again whenever it ends, as systemd does with its unit."""

    def __init__(self, stage: Stage, device: Device) -> None:
        self.stage, self.device, self.starts = stage, device, 0
        self.notified = stage.folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.notified))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.starts += 1
        command = [str(self.device.program), "--data", str(self.stage.parts / "device-0"), "--id", "updated"]
        command += ["--state", str(self.device.state), "--broker", f"127.0.0.1:{self.stage.port}", "--threads", "1"]
        variables = {**self.device.environment, "NOTIFY_SOCKET": str(self.notified)}
        self._process = self.stage.start("device", command, variables)

    def keep(self) -> bool:
        """Start the device if it does not run; True if it was started."""
        if self._process and self._process.poll() is None:
            return False
        self.start()
        return True

    def read_running(self) -> str | None:
        """Return the version that takes part, by its status."""
        self.keep()
        file = self.device.state / "status.json"
        return json.loads(file.read_text())["software"] if file.exists() else None


@pytest.mark.slow
def test_service_switches_between_tasks_and_stays_after_its_first_one(
    stage: Stage, device: Device, publisher: Publisher, releases: Path
) -> None:
    service = Service(stage, device)
    service.start()
    wait_for(lambda: service.read_running() == "0.1.0", "the first version")
    assert first_update(device, publisher, releases).returncode == 0
    wait_for(lambda: service.read_running() == "0.2.0", "the second version")
    coordinator = stage.coordinator("--devices", "1", "--rounds", "1")
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    wait_for(lambda: "0.2.0 done" in device_marks(device), "the end of the trial")
    assert device.update("--back").returncode == 0
    wait_for(lambda: service.read_running() == "0.1.0", "the first version again")
    assert "another version is installed" in stage.log("device")


def device_marks(device: Device) -> list[str]:
    return (device.state / "trial").read_text().splitlines()


@pytest.mark.slow
def test_service_returns_after_three_failed_starts(
    stage: Stage, device: Device, publisher: Publisher, releases: Path
) -> None:
    """The next update makes the return permanent, and a newer version gets its own trial."""
    broken = "if 'NOTIFY_SOCKET' in __import__('os').environ: raise SystemExit('it starts by hand only')"
    publish(releases, "stable", [publisher.pack("0.3.2", broken=broken)], {}, publisher.key)
    assert first_update(device, publisher, releases).returncode == 0
    service = Service(stage, device)
    wait_for(lambda: service.read_running() == "0.1.0", "the version before")
    assert device_marks(device) == ["0.3.2 start"] * 3
    assert device.read_version() == "0.1.0"
    done = device.update()
    assert "0.3.2 failed its trial; 0.1.0 stays" in done.stdout, done.stderr
    assert "0.3.2 is offered, and was refused" in done.stdout
    publish(releases, "stable", [publisher.pack("0.3.3")], {}, publisher.key)
    assert device.update().returncode == 0
    wait_for(lambda: service.read_running() == "0.3.3", "the repaired version")


@pytest.mark.slow
def test_service_returns_after_a_failed_first_task(
    stage: Stage, device: Device, publisher: Publisher, releases: Path
) -> None:
    """The version before does the task that the new one failed."""
    broken = """
import edge_client.work.task_executor as work
def fail(*_): raise RuntimeError("this version cannot train")
work.TaskExecutor.run = fail
"""
    publish(releases, "stable", [publisher.pack("0.3.4", broken=broken)], {}, publisher.key)
    assert first_update(device, publisher, releases).returncode == 0
    service = Service(stage, device)
    wait_for(lambda: service.read_running() == "0.3.4", "the new version")
    coordinator = stage.coordinator("--devices", "1", "--rounds", "1")

    def is_done() -> bool:
        service.keep()
        return coordinator.poll() is not None

    wait_for(is_done, "the run")
    assert coordinator.wait() == 0, stage.log("coordinator")
    assert "failed its first task" in stage.log("device")
    assert device_marks(device)[-1] == "0.3.4 failed"
    assert service.read_running() == "0.1.0"
    assert device.read_version() == "0.1.0"


def test_python_is_that_of_the_package(publisher: Publisher, releases: Path) -> None:
    """Names of packages and the environments that come from them agree."""
    [offer] = decode_list((releases / "stable.json").read_bytes(), "").offers
    assert isinstance(offer.packages[0], Package)
    assert (offer.packages[0].python, offer.packages[0].machine) == (PYTHON, os.uname().machine)
