"""A virtual board: Debian with systemd on an emulated processor, whose power can be cut at any time.

It has the disk of `volatile_disk`, a boot partition and a stick with pictures, which the board only reads. It reaches
this machine's loopback as HOST, and of the board only ssh can be reached.
"""

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from coordinator.security.broker.process import claim_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
HOST = "10.0.2.2"
LAYER = "layer.img"
BOOT_S, OFF_S = 2400.0, 900.0
COMMAND_S = 600.0
"""Longest times of a start, of its end, and of a command in it, on a busy machine."""
ACCELERATED_S = 15.0
"""Time in which this machine's own processor boots a kernel up to the search for its disk: it takes one second."""


class Emulator(NamedTuple):
    """The program that emulates boards of an architecture."""

    program: str
    machine: str
    processor: str
    console: str


EMULATORS = {
    "arm64": Emulator("qemu-system-aarch64", "virt", "cortex-a72", "ttyAMA0"),  # of a Raspberry Pi 4
    "amd64": Emulator("qemu-system-x86_64", "q35", "max", "ttyS0"),
}


@dataclass(frozen=True)
class Image:
    """The files of image.sh, which several boards start from."""

    folder: Path
    architecture: str

    @property
    def emulator(self) -> Emulator:
        return EMULATORS[self.architecture]

    @cached_property
    def accelerator(self) -> str:
        """`kvm` where this machine's own processor boots the kernel, else `tcg`, which translates each instruction.

        That /dev/kvm opens says nothing: within some virtual machines it interprets a kernel, slower than `tcg` does.
        """
        emulator = self.emulator
        command = [emulator.program, "-M", emulator.machine, "-accel", "kvm", "-cpu", "host", "-m", "256"]
        command += ["-nodefaults", "-display", "none", "-no-reboot", "-append", "panic=-1"]
        command += ["-kernel", str(self.folder / "vmlinuz")]
        try:  # without a disk the kernel panics, and the emulator ends
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ACCELERATED_S, check=False
            )
        except subprocess.TimeoutExpired:
            return "tcg"
        return "tcg" if done.returncode else "kvm"

    @property
    def disk(self) -> Path:
        return self.folder / "root.img"

    @property
    def key(self) -> Path:
        return self.folder / "key"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that is emulated."""

    processor: str = ""  # by default the architecture's; cortex-a76 is that of a Raspberry Pi 5
    cores: int = 1  # more wait for each other where this machine is busy
    memory_mb: int = 1024


@dataclass
class Cuts:
    """Power cuts of a board: how many, and how many of its unflushed blocks they lost."""

    count: int = 0
    within_flush: int = 0
    lost_blocks: int = 0


class Board:
    """One board with its disk; `home` holds its files, and what its console said."""

    def __init__(self, home: Path, image: Image, pictures: Path, machine: Machine | None = None) -> None:
        home.mkdir(parents=True)
        self.home, self.image = home, image
        self.machine = machine or Machine()
        self.boot_folder = home / "boot"
        self.boot_folder.mkdir()
        self.cuts = Cuts()
        self._port = claim_port()
        self._emulator: subprocess.Popen[bytes] | None = None
        self._drawn = random.Random(str(home.name))
        self._pictures = home / "pictures.img"
        make_file_system(pictures, self._pictures, "pictures")
        self._socket = home / "disk"
        self._disk = self._start_disk()

    # --- power ----------------------------------------------------------------------------------------

    def switch_on(self, *more: str) -> float:
        """Start it, and wait until it answers; return the seconds. `more`: arguments for the emulator."""
        began = time.monotonic()
        self.give_power(*more)
        self.wait_for_answer()
        return time.monotonic() - began

    def give_power(self, *more: str) -> None:
        """Start it, and do not wait."""
        key = self.home / "key"
        key.write_bytes(self.image.key.read_bytes())
        key.chmod(0o600)
        with (self.home / "emulator.log").open("ab") as log:
            command = self._make_command(more)
            self._emulator = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_for_answer(self) -> None:
        wait_until(self._answers, f"{self.home.name} does not answer; see console.log", wait_s=BOOT_S, pause_s=0.5)

    def switch_off(self) -> None:
        """Shut it down as its owner should."""
        assert self._emulator
        self.try_run("systemctl poweroff")
        self._emulator.wait(OFF_S)

    def cut_power(self) -> None:
        """Cut its power now: what its disk has not flushed is lost, but for a random half."""
        emulator = self._emulator
        assert emulator
        said = self._count_cuts()
        emulator.kill()
        emulator.wait()
        wait_until(lambda: self._count_cuts() > said, "the disk did not see the power cut")
        self._note_cut()

    def cut_power_within_flush(self) -> None:
        """Cut its power while its disk flushes: a half of what a program syncs then is on the disk."""
        said = self._count_cuts()
        self._disk.send_signal(signal.SIGUSR1)
        wait_until(lambda: self._count_cuts() > said, "the board flushed nothing", wait_s=COMMAND_S)
        assert self._emulator
        self._emulator.kill()
        self._emulator.wait()
        self.cuts.within_flush += 1
        self._note_cut()

    def cut(self, *, within_flush: bool) -> None:
        """Cut its power, either way."""
        (self.cut_power_within_flush if within_flush else self.cut_power)()

    @contextmanager
    def hold_disk(self) -> Iterator[Path]:
        """Let its disk wait; yield the file with all that was flushed."""
        self._disk.send_signal(signal.SIGSTOP)
        try:
            yield self.home / LAYER
        finally:
            self._disk.send_signal(signal.SIGCONT)

    def plug_cable(self, *, plugged: bool) -> None:
        """Plug its network cable in, or out."""
        with socket.socket(socket.AF_UNIX) as monitor, monitor.makefile("r") as answers:
            wait_until(lambda: not monitor.connect_ex(str(self.home / "monitor")), "the emulator has no monitor")
            answers.readline()
            for command, values in (("qmp_capabilities", {}), ("set_link", {"name": "net", "up": plugged})):
                monitor.sendall(json.dumps({"execute": command, "arguments": values}).encode())
                assert "return" in json.loads(answers.readline())

    def close(self) -> None:
        """End its processes."""
        for process in (self._emulator, self._disk):
            if process and process.poll() is None:
                process.kill()
                process.wait()

    # --- commands -------------------------------------------------------------------------------------

    def run(self, command: str, timeout_s: float = COMMAND_S) -> str:
        """Run a command there as root; return its output. Fails if it fails."""
        done = self.try_run(command, timeout_s)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def try_run(self, command: str, timeout_s: float = COMMAND_S) -> "subprocess.CompletedProcess[str]":
        """Run a command there as root, whatever its exit code: 255 if it does not answer in time."""
        options = ["-i", str(self.home / "key"), "-p", str(self._port)]
        for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes", "LogLevel=ERROR"):
            options += ["-o", option]
        # a board without power does not end its connections
        options += ["-o", "ConnectTimeout=90", "-o", "ServerAliveInterval=30", "-o", "ServerAliveCountMax=10"]
        whole = ["ssh", *options, "root@127.0.0.1", command]
        try:
            return subprocess.run(
                whole, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(whole, 255, "", f"no answer within {timeout_s:.0f} s")

    def read_state(self, unit: str) -> dict[str, str]:
        """Return what systemd shows of a unit."""
        lines = self.run(f"systemctl show {unit}").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def wait_for(self, command: str, what: str, wait_s: float = COMMAND_S) -> None:
        """Wait until a command succeeds there."""
        wait_until(lambda: self.try_run(command).returncode == 0, f"{self.home.name}: {what}", wait_s=wait_s, pause_s=2)

    def describe(self) -> str:
        """Return the end of its console and of the services' journal, for a check that failed."""
        console = self.home / "console.log"
        said = console.read_text(errors="replace")[-2000:] if console.exists() else ""
        journal = self.try_run("journalctl -b --no-pager -n 60 -u 'fedvit*' -u 'cloud*'", 60) if self._runs() else None
        return f"{said}\n--- journal ---\n{journal.stdout if journal else 'it has no power'}"

    # --- parts ----------------------------------------------------------------------------------------

    def _start_disk(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.boards.volatile_disk", str(self.image.disk)]
        command += [str(self.home / LAYER), str(self._socket), "--seed", str(self._drawn.randrange(2**32))]
        with (self.home / "disk.log").open("wb") as log:
            disk = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._socket.exists, "the disk did not start")
        return disk

    def _make_command(self, more: tuple[str, ...]) -> list[str]:
        folder, machine, emulator = self.image.folder, self.machine, self.image.emulator
        accelerator = self.image.accelerator
        processor = "host" if accelerator == "kvm" else machine.processor or emulator.processor
        drives = {
            "root": f"file=nbd+unix:///?socket={self._socket},format=raw,cache=writeback",
            # a partition made of the folder's files, as the card's reader shows it
            "boot": f"driver=vvfat,dir={self.boot_folder},label=bootfs,read-only=on",
            "pictures": f"file={self._pictures},format=raw,read-only=on",
        }
        command = [emulator.program, "-M", emulator.machine, "-accel", accelerator, "-cpu", processor]
        command += ["-smp", str(machine.cores), "-m", str(machine.memory_mb), "-nodefaults", "-display", "none"]
        command += ["-qmp", f"unix:{self.home / 'monitor'},server=on,wait=off"]
        command += ["-serial", f"file:{self.home / 'console.log'}"]
        command += ["-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initrd.img")]
        settings = f"root=/dev/vda ro console={emulator.console} panic=5 quiet mitigations=off systemd.getty_auto=0"
        command += ["-append", settings]
        for name, drive in drives.items():
            command += ["-drive", f"if=none,id={name},{drive}", "-device", f"virtio-blk-pci,drive={name}"]
        command += ["-netdev", f"user,id=net,ipv6=off,hostfwd=tcp:127.0.0.1:{self._port}-:22"]
        command += ["-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci", *more]
        return command

    def _answers(self) -> bool:
        assert self._runs(), (self.home / "emulator.log").read_text()
        return self.try_run("true", 60).returncode == 0

    def _runs(self) -> bool:
        return self._emulator is not None and self._emulator.poll() is None

    def _count_cuts(self) -> int:
        return len(self._read_cuts())

    def _read_cuts(self) -> list[str]:
        return [line for line in (self.home / "disk.log").read_text().splitlines() if line.startswith("power cut")]

    def _note_cut(self) -> None:
        self.cuts.count += 1
        self.cuts.lost_blocks += int(self._read_cuts()[-1].split(": ")[1].split()[0])


def make_file_system(folder: Path, file: Path, label: str) -> None:
    """Make an ext4 file system of a folder's files."""
    command = ["mke2fs", "-q", "-t", "ext4", "-L", label, "-d", str(folder), str(file), "64M"]
    subprocess.run(command, check=True, capture_output=True)
