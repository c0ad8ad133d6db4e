"""A device on virtual boards, from first boot to power cuts (`make boards`): by its name the suite does not collect it.

Boards are emulated as whole machines: kernel, systemd, disk, network. The coordinator runs on this machine. The checks
share a board, in the order of the file, as an owner has one board for years. FEDVIT_BOARD_CUTS is the number of power
cuts in training, FEDVIT_BOARD_JOINS of those while a board joins.
"""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.compute.planning.planner import make_plan
from coordinator.config import make_config
from export import verify
from fedvit.blobs import BlobStore
from fedvit.tensors import Tensors, unpack
from fleet.datasets.digits import read_digits
from fleet.partition import write_device_folders
from fleet.partitions import partition
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.boards.board import ROOT, Board, Image, Machine
from tests.boards.site import Site, Stopwatch
from tests.support.waiting import wait_until

BUILD = ROOT / "build" / "boards"
CUTS = int(os.environ.get("FEDVIT_BOARD_CUTS", "4"))
JOINS = int(os.environ.get("FEDVIT_BOARD_JOINS", "2"))
SEED = int(os.environ.get("FEDVIT_BOARD_SEED", str(time.time_ns() % 10**9)))
"""Each call draws other moments; the seed that failed repeats them as far as a machine does."""
NAMES = ("pi-1", "pi-2")
IMAGES = 60
CLASSES = tuple(map(str, range(10)))
RUN: dict[str, Any] = {
    "method": "fedper",
    "rounds": 1,
    "seed": 5,
    "devices": 1,
    "options": {"batch_size": 8, "epochs": 1, "lr": 0.05, "momentum": 0.9},
    "model_options": {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2},
    "deadline_s": 3600.0,
    "rejoin_grace_s": 1800.0,
}
"""A method with personal tensors, so that each round is written into the vault."""

pytestmark = pytest.mark.timeout(7200)


@dataclass
class Scene:
    """A site, the board that joined it at its first boot, and how long that took."""

    site: Site
    board: Board
    times: dict[str, float]
    commands: list[str]  # that a person typed


@pytest.fixture(scope="module")
def home() -> Path:
    """A folder on disk: the boards write gigabytes."""
    folder = BUILD / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def pictures(home: Path) -> Path:
    """Handwritten digits of each board."""
    digits = read_digits(size=32)
    shares = partition("iid", digits.labels[: IMAGES * len(NAMES)], len(NAMES), seed=3)
    write_device_folders(digits, shares, home / "pictures", test_share=0.2, seed=3)
    for number, name in enumerate(NAMES):
        (home / "pictures" / f"device-{number}").rename(home / "pictures" / name)
    return home / "pictures"


@pytest.fixture(scope="module")
def package() -> Path:
    [file] = (BUILD / "package").glob("fedvit-edge_*.deb")
    return file


@pytest.fixture(scope="module")
def make_board(home: Path, pictures: Path) -> Iterator[Callable[..., Board]]:
    """Make boards that have never been started."""
    boards: list[Board] = []

    def make(name: str, machine: Machine | None = None) -> Board:
        boards.append(Board(home / name, Image(BUILD / "image"), pictures / name, machine))
        return boards[-1]

    yield make
    for board in boards:
        board.close()


@pytest.fixture(scope="module")
def scene(home: Path, package: Path, make_board: Callable[..., Board], cache: Path) -> Iterator[Scene]:
    """An empty board is switched on for the first time, and trains one round."""
    site, board = Site(home / "site", cache), make_board("pi-1")
    try:
        whole = Stopwatch()
        site.init()
        site.enroll(board, package)
        site.start_run("first", RUN)
        times = {"power-on to ssh": board.switch_on()}
        board.wait_for("test -e /usr/bin/edge-client", "the package is not there", 3600)
        times["to the package unpacked"] = whole.read_s()
        board.wait_for("test ! -e /etc/fedvit/token", "it did not join", 3600)
        times["to the end of joining"] = whole.read_s()
        site.wait_for_rounds("first", 1, 3600)
        times["from the first command to the end of the first round"] = whole.read_s()
        yield Scene(site, board, times, list(site.typed))
    except BaseException:
        print(board.describe())
        raise
    finally:
        site.close()


@pytest.fixture(autouse=True)
def show_board_of_failure(request: pytest.FixtureRequest, scene: Scene) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(scene.board.describe())


def check_model(
    scene: Scene, run: str, values: dict[str, Any], pictures: Path, folder: Path, graph_cache: Path
) -> None:
    """Compare the run's model with that of an undisturbed run of the same devices here: they differ by rounding."""
    devices = [pictures / name for name in NAMES[: values["devices"]]]
    simulate(RunRequest(devices, values, out=folder / "same", run=run, graph_cache=graph_cache))
    got = unpack((scene.site.runs / run / "model.safetensors").read_bytes())
    want = unpack((folder / "same" / run / "model.safetensors").read_bytes())
    plan = make_plan(make_config(values, "test").run, CLASSES, BlobStore(folder / "plan"), cache=graph_cache)
    moved, apart = _find_largest(want, plan.state.tensors), _find_largest(got, want)
    print(f"{run}: the model differs from an undisturbed one by {apart / moved:.1e} of its largest change")
    assert apart < verify.TOLERANCE * moved * values["rounds"]


def _find_largest(some: Tensors, others: Mapping[str, Any]) -> float:
    """Return the largest difference of the tensors of one name."""
    return max(float(np.abs(value - others[name]).max()) for name, value in some.items())


# --- first boot ---------------------------------------------------------------------------------------


def test_first_round_needs_three_commands(scene: Scene) -> None:
    for name, seconds in scene.times.items():
        print(f"{name}: {seconds:.0f} s")
    print("\n".join(scene.commands))
    assert len(scene.commands) == 3
    shown = scene.site.finish("first")
    assert [entry["accepted"] for entry in shown["rounds"]] == [1]
    assert scene.board.read_state("fedvit-edge")["ActiveState"] == "active"
    assert scene.board.try_run("systemctl --failed --quiet --no-legend | grep fedvit").stdout == ""


# --- power cuts ---------------------------------------------------------------------------------------


def test_power_cuts_in_training(scene: Scene, pictures: Path, tmp_path: Path, graph_cache: Path) -> None:
    """The board rejoins without a hand after each cut, and no result is lost or counts twice: the model is that of an
    undisturbed run."""
    drawn = random.Random(SEED)
    site, board = scene.site, scene.board
    values = {**RUN, "rounds": 2 + 3 * CUTS}
    site.start_run("cuts", values)
    site.wait_for_rounds("cuts", 1)
    watch = Stopwatch()
    site.wait_for_rounds("cuts", 2)
    round_s = watch.read_s()
    for number in range(CUTS):
        within_flush = bool(drawn.getrandbits(1))
        delay_s = drawn.uniform(0, round_s)
        time.sleep(delay_s)  # the moment is drawn, not waited for
        (board.cut_power_within_flush if within_flush else board.cut_power)()
        before = site.count_rounds("cuts")
        booted_s = board.switch_on()
        board.cuts.seconds.append(booted_s)
        site.wait_for_rounds("cuts", min(before + 1, values["rounds"]))
        print(f"cut {number + 1}, {delay_s:.1f} s, {'flush' if within_flush else 'moment'}: booted in {booted_s:.0f} s,"
              f" round {before + 1} closed")  # fmt: skip
    shown = site.finish("cuts")
    print(f"seed {SEED}: {board.cuts}, a round took {round_s:.0f} s")
    assert [entry["accepted"] for entry in shown["rounds"]] == [1] * values["rounds"]
    check_model(scene, "cuts", values, pictures, tmp_path, graph_cache)


def test_power_cuts_while_joining(scene: Scene) -> None:
    """A token that the board has not used up joins it after the cut; one that it has used is not needed again."""
    drawn = random.Random(SEED)
    site, board = scene.site, scene.board
    for number in range(JOINS):
        run = f"join-{number}"
        site.start_run(run, RUN)
        token = site.make_token("pi-1", "--replace")
        board.run(f"systemctl stop fedvit-edge; install -m 0600 /dev/stdin /etc/fedvit/token <<< '{token}'")
        board.run("sync; systemctl start --no-block fedvit-join")
        within_flush, delay_s = bool(drawn.getrandbits(1)), drawn.uniform(0, 25)
        time.sleep(delay_s)  # as above
        (board.cut_power_within_flush if within_flush else board.cut_power)()
        booted_s = board.switch_on()
        shown = site.finish(run)
        assert [entry["accepted"] for entry in shown["rounds"]] == [1]
        assert board.try_run("test -e /etc/fedvit/token").returncode == 1
        print(f"cut {delay_s:.1f} s after the start of joining, {'flush' if within_flush else 'moment'}: booted in "
              f"{booted_s:.0f} s, joined and trained")  # fmt: skip
    print(f"seed {SEED}")


# --- what boards do -----------------------------------------------------------------------------------


def test_clock_without_battery(scene: Scene) -> None:
    """The board wakes up in the past, without a time server: it trains, and `doctor` says what is wrong."""
    site, board = scene.site, scene.board
    board.run("systemctl stop systemd-timesyncd; rm -f /var/lib/systemd/timesync/clock")
    board.switch_off()
    site.start_run("clock", RUN)
    board.switch_on("-rtc", "base=2020-01-01T00:00:00")
    behind_days = (time.time() - float(board.run("date +%s"))) / 86400
    assert behind_days > 30, "the board's clock is right"
    assert [entry["accepted"] for entry in site.finish("clock")["rounds"]] == [1]
    doctor = board.try_run("edge-client doctor --data /srv/fedvit/images").stdout
    said = next(line for line in doctor.splitlines() if " clock " in line)
    print(f"{behind_days:.0f} days behind; doctor: {said}")
    assert said.startswith("warning")
    board.switch_off()
    board.switch_on()


def test_memory_limit_of_the_unit(scene: Scene) -> None:
    """The kernel kills the service, since its limit is too small; with the usual one it resumes automatically."""
    site, board = scene.site, scene.board
    values = {**RUN, "rounds": 3}
    site.start_run("memory", values)
    site.wait_for_rounds("memory", 1)
    board.run("systemctl set-property --runtime fedvit-edge.service MemoryMax=40M")

    def is_killed() -> bool:
        return "oom-kill" in board.run(
            "journalctl -u fedvit-edge -b --no-pager -o cat -g \"result 'oom-kill'\" || true"
        )

    wait_until(is_killed, "the kernel did not kill it", wait_s=900, pause_s=5)
    board.run("systemctl set-property --runtime fedvit-edge.service MemoryMax=640M")
    assert [entry["accepted"] for entry in site.finish("memory")["rounds"]] == [1] * 3
    restarts = int(board.read_state("fedvit-edge")["NRestarts"])
    print(f"killed by the limit; started again {restarts} times")
    assert restarts >= 1


def test_slow_and_lossy_network(scene: Scene) -> None:
    """1 Mbit/s, 200 ms and 5 % loss in both directions."""
    site, board = scene.site, scene.board
    link = board.run("ip -o route get 10.0.2.2 | sed 's/.*dev \\([^ ]*\\).*/\\1/'").strip()
    bad = "netem delay 200ms 50ms loss 5% rate 1mbit"
    board.run(
        f"tc qdisc add dev {link} root {bad} && modprobe ifb numifbs=1 && ip link set ifb0 up && "
        f"tc qdisc add dev {link} handle ffff: ingress && tc filter add dev {link} parent ffff: matchall "
        f"action mirred egress redirect dev ifb0 && tc qdisc add dev ifb0 root {bad}"
    )
    watch = Stopwatch()
    site.start_run("network", {**RUN, "rounds": 2})
    shown = site.finish("network")
    print(f"two rounds in {watch.read_s():.0f} s")
    assert [entry["accepted"] for entry in shown["rounds"]] == [1, 1]
    board.run(f"tc qdisc del dev {link} root; tc qdisc del dev {link} ingress; ip link del ifb0")


def test_full_disk(scene: Scene) -> None:
    """A task fails with its reason, and the run after three; with room again, the board resumes automatically."""
    site, board = scene.site, scene.board
    site.start_run("full", {**RUN, "rounds": 4})
    site.wait_for_rounds("full", 1)
    board.run("dd if=/dev/zero of=/filler bs=1M 2> /dev/null; sync; df --output=avail / | tail -1")
    since = board.run("date +%s").strip()

    def has_said() -> str:
        return board.run(f"journalctl -u fedvit-edge --since @{since} --no-pager -o cat | grep -i 'space' || true")

    said = wait_until(has_said, "the service does not say that the disk is full", wait_s=900, pause_s=5)
    print(said.splitlines()[0])
    board.run("rm /filler; sync")
    print(f"the run ended with code {site.wait_for_end('full')}")
    site.start_run("room", RUN)
    assert [entry["accepted"] for entry in site.finish("room")["rounds"]] == [1]


def test_disk_that_became_read_only(scene: Scene) -> None:
    """The file system goes read-only in a run, as on a worn card. It goes on after a restart."""
    site, board = scene.site, scene.board
    site.start_run("read-only", {**RUN, "rounds": 3})
    site.wait_for_rounds("read-only", 1)
    board.run("echo 1 > /sys/fs/ext4/vda/trigger_fs_error")
    assert board.try_run("touch /nothing").returncode != 0
    board.cut_power()
    board.switch_on()
    assert [entry["accepted"] for entry in site.finish("read-only")["rounds"]] == [1] * 3


def test_two_boards(
    scene: Scene, make_board: Callable[..., Board], package: Path, pictures: Path, tmp_path: Path, graph_cache: Path
) -> None:
    """A second board, with the processor of a Raspberry Pi 5, joins at its first boot while the first one waits."""
    site, other = scene.site, make_board("pi-2", Machine(processor="cortex-a76"))
    values = {**RUN, "devices": 2, "rounds": 2}
    site.enroll(other, package)
    watch = Stopwatch()
    site.start_run("two", values)
    other.switch_on()
    shown = site.finish("two", 3600)
    print(f"from power-on of the second board to the end of two rounds: {watch.read_s():.0f} s")
    assert [entry["accepted"] for entry in shown["rounds"]] == [2, 2]
    check_model(scene, "two", values, pictures, tmp_path, graph_cache)


def test_commands_of_the_readme(scene: Scene) -> None:
    """The device's lines of README's "On real devices", as they stand there, by a user with pictures at home."""
    lines = (ROOT / "README.md").read_text().split("On real devices:")[1].split("```")[1].splitlines()
    join, doctor, train = [line.split("#")[0].strip() for line in lines if line.startswith("edge-client")]
    site, board = scene.site, scene.board
    board.run("systemctl stop fedvit-edge; useradd -m owner; ln -s /srv/fedvit/images /home/owner/images")
    site.start_run("readme", RUN)
    token = site.make_token("pi-3")
    as_owner = "runuser -l owner -c"
    board.run(f"{as_owner} '{join.replace('TOKEN', token)}'")
    said = board.try_run(f"{as_owner} '{doctor}'")
    print(said.stdout)
    assert said.returncode < 2, said.stdout
    board.run(f"systemd-run --unit readme {as_owner} '{train}'")
    assert [entry["accepted"] for entry in site.finish("readme")["rounds"]] == [1]
    board.run("systemctl stop readme; systemctl start fedvit-edge")
