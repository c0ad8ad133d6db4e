"""Conditions of boards: a clock without battery, a memory limit, bad networks, full and broken disks, a second one."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.boards.board import Board, Machine
from tests.boards.scene import Scene, check_model
from tests.boards.site import RUN, Stopwatch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(7200)


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


HOG = """
def count(): return [line for line in open("/proc/vmstat") if line.startswith("oom_kill")]
before, taken = count(), []
while count() == before: taken.append(b"x" * (1 << 24))
"""
"""Takes memory until the kernel kills something."""


def test_board_without_memory(scene: Scene) -> None:
    """Another program takes all memory: the kernel kills the service first, and it resumes automatically."""
    site, board = scene.site, scene.board
    restarts = int(board.read_state("fedvit-edge")["NRestarts"])
    site.start_run("kernel", {**RUN, "rounds": 3})
    site.wait_for_rounds("kernel", 1)
    board.run(f"systemd-run --quiet --property=OOMScoreAdjust=-999 python3 -c '{HOG}'")
    said = "journalctl -k -b --no-pager -o cat -g 'oom-kill:constraint=CONSTRAINT_NONE'"
    board.wait_for(said, "the kernel has killed nothing", 1800)  # meanwhile the board may answer nobody for minutes
    first = board.run(said).splitlines()[0]
    print(first)
    assert "task_memcg=/system.slice/fedvit-edge.service" in first, "the service's processes go first"
    assert [entry["accepted"] for entry in site.finish("kernel")["rounds"]] == [1] * 3
    assert int(board.read_state("fedvit-edge")["NRestarts"]) > restarts


def test_service_that_is_killed_and_one_that_hangs(scene: Scene) -> None:
    """systemd starts it again, also when its watchdog hears nothing of it."""
    site, board = scene.site, scene.board
    board.run("mkdir -p /run/systemd/system/fedvit-edge.service.d")
    board.run("printf '[Service]\\nWatchdogSec=30\\n' > /run/systemd/system/fedvit-edge.service.d/soon.conf")
    board.run("systemctl daemon-reload; systemctl restart fedvit-edge")
    site.start_run("service", {**RUN, "rounds": 4})
    for rounds, signal in ((1, "KILL"), (2, "STOP")):
        site.wait_for_rounds("service", rounds)
        before = board.read_state("fedvit-edge")["NRestarts"]
        board.run(f"systemctl kill --signal={signal} fedvit-edge")
        wait_until(lambda: board.read_state("fedvit-edge")["NRestarts"] != before, signal, wait_s=600, pause_s=2)  # noqa: B023
    assert [entry["accepted"] for entry in site.finish("service")["rounds"]] == [1] * 4
    assert "watchdog" in board.run("journalctl -u fedvit-edge -b --no-pager -o cat -g watchdog || true").lower()
    board.run("rm -r /run/systemd/system/fedvit-edge.service.d; systemctl daemon-reload; systemctl restart fedvit-edge")


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
    try:
        watch = Stopwatch()
        site.start_run("network", {**RUN, "rounds": 2})
        shown = site.finish("network")
        print(f"two rounds in {watch.read_s():.0f} s")
    finally:
        board.run(f"tc qdisc del dev {link} root; tc qdisc del dev {link} ingress; ip link del ifb0")
    assert [entry["accepted"] for entry in shown["rounds"]] == [1, 1]


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


def test_root_that_is_read_only_from_the_start(scene: Scene) -> None:
    """An owner sets it so against worn cards. The journal says why the service cannot start; once the root can be
    written, the service trains by itself."""
    site, board = scene.site, scene.board
    board.run("cp /etc/fstab /etc/fstab.usual; sed -i '/^.dev.vda /s/noatime/ro,noatime/' /etc/fstab; sync")
    board.switch_off()
    board.switch_on()
    assert "Read-only" in board.try_run("touch /nothing").stderr
    said = "journalctl -b -u fedvit-edge -o cat --no-pager | grep -m 1 'Read-only file system'"
    board.wait_for(said, "the journal does not say why the service cannot start")
    print(board.run(said))
    board.run("mount -o remount,rw / && mv /etc/fstab.usual /etc/fstab")
    site.start_run("writable", RUN)
    assert [entry["accepted"] for entry in site.finish("writable")["rounds"]] == [1]


def test_second_board_without_network_and_time(
    scene: Scene, make_board: Callable[..., Board], package: Path, pictures: Path, tmp_path: Path, graph_cache: Path
) -> None:
    """It starts for the first time years ago, without a network: it joins when its cable is plugged in, and both train.

    For arm64 it has the processor of a Raspberry Pi 5.
    """
    site = scene.site
    is_arm = scene.board.image.architecture == "arm64"
    other = make_board("pi-2", Machine(processor="cortex-a76" if is_arm else ""))
    values = {**RUN, "devices": 2, "rounds": 2}
    site.enroll(other, package)
    site.start_run("two", values)
    other.give_power("-rtc", "base=2020-01-01T00:00:00")
    other.plug_cable(plugged=False)
    time.sleep(60)  # it starts, and finds no network
    other.plug_cable(plugged=True)
    watch = Stopwatch()
    shown = site.finish("two", 3600)
    print(f"from the cable of the second board to the end of two rounds: {watch.read_s():.0f} s")
    assert [entry["accepted"] for entry in shown["rounds"]] == [2, 2]
    check_model(scene, "two", values, pictures, tmp_path, graph_cache)
    other.close()


def test_used_token(scene: Scene) -> None:
    """A device that trains takes a new identity. A used token is refused in one line, until a new one replaces it."""
    site, board = scene.site, scene.board
    site.start_run("token", {**RUN, "rounds": 4})
    site.wait_for_rounds("token", 1)

    def give(token: str) -> None:
        board.run(f"install -m 0600 /dev/stdin /etc/fedvit/token <<< '{token}'")

    used = site.make_token("pi-1", "--replace")
    give(used)
    before = board.read_state("fedvit-edge")["InvocationID"]
    board.run("systemctl start fedvit-join; test ! -e /etc/fedvit/token")
    wait_until(lambda: board.read_state("fedvit-edge")["InvocationID"] != before, "it does not begin anew", wait_s=300)
    board.run("systemctl stop fedvit-edge; rm -r /var/lib/fedvit-edge/identity")
    give(used)
    since = board.run("date +%s").strip()
    assert board.try_run("systemctl start fedvit-join").returncode != 0
    said = board.run(f"journalctl -u fedvit-join --since @{since} --no-pager -o cat -g FV1308")
    print(said.splitlines()[0])
    give(site.make_token("pi-1", "--replace"))  # a join withdraws earlier tokens of its device
    board.wait_for("test ! -e /etc/fedvit/token", "the new token is not used")
    assert [entry["accepted"] for entry in site.finish("token")["rounds"]] == [1] * 4


def test_first_boot_with_a_full_card(scene: Scene) -> None:
    """`apt purge` leaves nothing but pictures. The package is installed as at the first boot, once there is room."""
    site, board = scene.site, scene.board
    board.run("apt-get purge --yes fedvit-edge; rm /var/lib/cloud/instance/fedvit-install_package")
    board.run("rm -f /etc/cloud/cloud-init.disabled")
    folders = "/opt/fedvit /etc/fedvit /var/lib/fedvit-edge /var/lib/private/fedvit-edge"
    assert board.run(f"ls -d {folders} 2> /dev/null || true") == ""
    assert board.run("ls /srv/fedvit/images").strip()
    (board.boot_folder / "fedvit" / "token").write_text(site.make_token("pi-1", "--replace"))
    site.start_run("card", RUN)
    # room for a start and its journal, but not for the package
    board.run("fallocate -l 40M /room; dd if=/dev/zero of=/filler bs=1M 2> /dev/null; rm /room; sync")
    board.switch_off()
    board.switch_on()
    said = "journalctl -b -u fedvit-first-boot --no-pager -o cat -g 'No space left|enough free space'"
    board.wait_for(said, "its first boot says nothing of a full card", 900)
    print(board.run(said).splitlines()[0])
    board.run("rm /filler")
    assert [entry["accepted"] for entry in site.finish("card")["rounds"]] == [1]
    board.run("touch /etc/cloud/cloud-init.disabled")
