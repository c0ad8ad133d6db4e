"""A network of its own for some processes, with nothing but a loopback: multicast stays in it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_UP = """
import fcntl, socket, struct
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
name = struct.pack("16sh14x", b"lo", 0)
flags = struct.unpack("16sh14x", fcntl.ioctl(link, 0x8913, name))[1]
fcntl.ioctl(link, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))
"""
"""Sets IFF_UP, which needs no other program."""


@contextmanager
def loopback_network() -> Iterator[list[str]]:
    """Make a network for the block; yield the beginning of command lines of processes in it."""
    holder = subprocess.Popen(
        ["unshare", "--map-root-user", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        enter = ["nsenter", f"--target={holder.pid}", "--user", "--preserve-credentials", "--net"]
        subprocess.run([*enter, sys.executable, "-c", _UP], check=True)
        yield enter
    finally:
        holder.kill()
        holder.wait()
