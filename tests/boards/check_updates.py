"""Versions of the device's software on a board: updates from a server of releases under kills and power cuts, refused
releases, and Debian packages of both versions."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.operations.releasing import publish
from coordinator.security.broker.process import claim_port
from fedvit.publisher import PublisherKey
from tests.boards.board import HOST, Board
from tests.boards.conftest import BUILD
from tests.boards.scene import SEED, Scene
from tests.boards.site import RUN, Stopwatch
from tests.support.installations import flip_bit

pytestmark = pytest.mark.timeout(7200)

CUTS = int(os.environ.get("FEDVIT_BOARD_UPDATE_CUTS", "3"))
"""Updates that a kill or a power cut interrupts."""


def find_packages(kind: str, version: str) -> Path:
    """Return the package of a version; `kind` is its suffix."""
    [file] = (BUILD / "package" / version).glob(f"fedvit-edge[-_]*{kind}")
    return file


@pytest.fixture(scope="module")
def key(home: Path) -> PublisherKey:
    return PublisherKey.create(home / "release.key")


@pytest.fixture(scope="module")
def releases(home: Path, key: PublisherKey) -> Path:
    """Folders of releases: right ones, and such that devices refuse."""
    folder = home / "releases"
    newer, now = find_packages("zip", "newer"), find_packages("zip", "now")
    publish(folder / "right", "stable", [newer], {}, key)
    shutil.copytree(folder / "right", folder / "flipped")
    flip_bit(folder / "flipped" / newer.name, newer.stat().st_size // 2)
    publish(folder / "foreign", "stable", [newer], {}, PublisherKey.create(home / "foreign.key"))
    publish(folder / "older", "beta", [now], {}, key)
    shutil.copytree(folder / "right", folder / "unsigned")
    (folder / "unsigned" / "stable.json.minisig").unlink()
    for version in ("now", "newer"):
        shutil.copy(find_packages("deb", version), folder / f"{version}.deb")
    return folder


@pytest.fixture(scope="module")
def url(releases: Path) -> Iterator[str]:
    """The URL of the folders, as boards see it."""
    port = claim_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(releases)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"http://{HOST}:{port}"
    server.kill()
    server.wait()


def read_version(board: Board) -> str:
    """Return the version that the board starts; it must be whole."""
    board.run("/opt/fedvit/current/bin/python -P -c 'import edge_client.agent' || test ! -e /opt/fedvit/current")
    return board.run("edge-client --version").split()[-1]


def train(scene: Scene, run: str) -> None:
    """Let the board's service train one round."""
    scene.site.start_run(run, RUN)
    assert [entry["accepted"] for entry in scene.site.finish(run)["rounds"]] == [1]


def test_refused_releases(scene: Scene, url: str, key: PublisherKey) -> None:
    """A flipped byte, another key, no signature, an older version: each is refused with one line."""
    board = scene.board
    before = read_version(board)
    refused = {"flipped": "FV1465", "foreign": "FV1463", "unsigned": "FV1463"}
    for folder, code in refused.items():
        done = board.try_run(f"edge-client update {url}/{folder} --update-key {key.public}")
        print(done.stderr.strip())
        assert done.returncode != 0
        assert f"[{code}]" in done.stderr
        assert read_version(board) == before


def test_updates_under_kills_and_power_cuts(scene: Scene, url: str, key: PublisherKey) -> None:
    """From one version to the next and back: always one version works, and the board trains with it.

    The owner's timer installs the first one.
    """
    drawn = random.Random(SEED)
    board = scene.board
    now = read_version(board)
    board.run(f"edge-client update {url}/right --update-key {key.public} --check")
    board.run("systemctl enable --now fedvit-update.timer")
    assert "fedvit-update.service" in board.run("systemctl list-timers --no-pager")
    watch = Stopwatch()
    board.run("systemctl start fedvit-update.service", 3600)
    update_s, newer = watch.read_s(), read_version(board)
    assert newer != now
    train(scene, "newer")
    print(f"updated from {now} to {newer} in {update_s:.0f} s")
    assert "older" in board.try_run(f"edge-client update {url}/older --channel beta").stderr
    board.run("edge-client update --back", 3600)
    assert read_version(board) == now

    seen = []
    for number in range(CUTS):
        is_new = read_version(board) == newer
        action = "update --back" if is_new else f"update {url}/right --channel stable --retry"
        delay_s, by_power = drawn.uniform(0, 8 if is_new else update_s), bool(drawn.getrandbits(1))
        board.run(f"systemd-run --quiet --collect --unit change --setenv=HOME=/root edge-client {action}")
        time.sleep(delay_s)  # the moment is drawn, not waited for
        if by_power:
            board.cut(within_flush=bool(drawn.getrandbits(1)))
            board.switch_on()
        else:
            board.try_run("systemctl kill --signal=KILL change")
        seen.append(read_version(board))
        board.wait_for("systemctl is-active fedvit-edge", "its service does not run")
        if by_power:
            train(scene, f"update-{number}")
        how = "power cut" if by_power else "killed"
        print(f"{number + 1}: {action.split()[-1]} {how} after {delay_s:.1f} s: {seen[-1]}")
    print(f"seed {SEED}: {board.cuts}; versions {sorted(set(seen))}")
    assert set(seen) <= {now, newer}
    if seen[-1] == now:
        board.run(f"edge-client update {url}/right --channel stable --retry", 3600)
    assert read_version(board) == newer
    train(scene, "after-updates")
    board.run("edge-client update --back")
    assert read_version(board) == now
    train(scene, "after-the-way-back")


def test_debian_packages_of_both_versions(scene: Scene, url: str) -> None:
    """An upgrade and a downgrade by apt."""
    board, versions = scene.board, []
    for version in ("newer", "now"):
        there = f"/var/tmp/{version}.deb"
        fetch = f"import urllib.request as r; r.urlretrieve('{url}/{version}.deb', '{there}')"
        board.run(f'python3 -c "{fetch}" && apt-get install --yes --allow-downgrades {there} && rm {there}', 3600)
        versions.append(read_version(board))
        train(scene, f"package-{version}")
    print(f"by apt: {' -> '.join(versions)}")
    assert versions[0] != versions[1]
