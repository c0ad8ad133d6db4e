"""Takes rights from the process that runs graphs: files by Landlock, system calls by seccomp, memory by a limit.

The kernel's interfaces are called by number: no library for them is packaged for the boards. Sources: the kernel's
pages "Landlock: unprivileged access control" and "Seccomp BPF".
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import stat
import struct
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_SECCOMP_MODE_FILTER = 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls of Landlock, with the same numbers on all processors."""
_READ_FILE, _READ_DIR, _WRITE_FILE, _IOCTL_DEVICE = 1 << 2, 1 << 3, 1 << 1, 1 << 15
_FILE_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}

_DENIED = (
    "socket", "connect", "bind", "listen", "accept", "accept4", "sendto", "execve", "execveat", "ptrace",
    "process_vm_readv", "process_vm_writev", "io_uring_setup", "open_by_handle_at", "pidfd_open", "pidfd_getfd",
    "mount", "unshare", "setns", "keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "kill",
)  # fmt: skip
"""Calls that open connections, start programs, or reach into other processes."""
_CONNECTIONS = ("socket", "connect", "bind", "listen", "accept", "accept4", "sendto")
_PROCESSORS = {
    "x86_64": (0xC000003E, (41, 42, 49, 50, 43, 288, 44, 59, 322, 101, 310, 311, 425, 304, 434, 438, 165, 272, 308,
                            250, 248, 249, 321, 298, 323, 62)),
    "aarch64": (0xC00000B7, (198, 203, 200, 201, 202, 242, 206, 221, 281, 117, 270, 271, 425, 265, 434, 438, 40, 97,
                             268, 219, 217, 218, 280, 241, 282, 129)),
}  # fmt: skip
"""Name for the kernel's audit, and the numbers of `_DENIED` in their order."""
_X32_CALLS = 0x40000000
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; other systems than Linux do not offer it."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def confine(readable: Iterable[Path], devices: Sequence[Path], growth_bytes: int | None) -> tuple[str, ...]:
    """Take all rights from this process but to compute and to read files below `readable`, for good.

    `devices` are files of the system that an accelerator needs; `growth_bytes` is the memory that it may still
    allocate, None: any. Returns the names of the protections that this system does not offer.
    """
    missing = []
    if growth_bytes is not None:
        limit_memory(growth_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    if not hasattr(_libc, "prctl") or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return "Landlock", "seccomp"
    if not _restrict_files(readable, devices):
        missing.append("Landlock")
    if not _filter_calls():
        missing.append("seccomp")
    return tuple(missing)


def confine_server() -> bool:
    """Take from this process the rights to start programs and to reach into others, for good; False if it cannot be.

    It may still connect, and read and write files. To be called before threads start: those keep their rights.
    """
    _limit(resource.RLIMIT_CORE, 0)
    if not hasattr(_libc, "prctl") or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return _filter_calls(_CONNECTIONS)


def limit_memory(growth_bytes: int) -> None:
    """Let an allocation fail that would make this process's own memory larger by more than `growth_bytes`."""
    data_bytes = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                data_bytes = int(line.split()[1]) * 1024
    _limit(resource.RLIMIT_DATA, data_bytes + growth_bytes)


def _limit(kind: int, value: int) -> None:
    hardest = resource.getrlimit(kind)[1]
    value = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))


def _restrict_files(readable: Iterable[Path], devices: Sequence[Path]) -> bool:
    abi = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False
    rights = next(value for least, value in sorted(_FILE_RIGHTS_BY_ABI.items(), reverse=True) if abi >= least)
    connections = 0b11 if abi >= 4 else 0
    scopes = 0b11 if abi >= 6 else 0
    ruleset = struct.pack("QQQ", rights, connections, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _libc.syscall(_CREATE_RULESET, ruleset, len(ruleset), 0)
    if rules < 0:
        return False
    try:
        for path in readable:
            _allow(rules, path, _READ_FILE | _READ_DIR)
        for path in devices:
            _allow(rules, path, (_READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL_DEVICE) & rights)
        return bool(_libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: Path, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # what is not here cannot be read either
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= ~_READ_DIR
        _libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


def _filter_calls(allowed: Collection[str] = ()) -> bool:
    if (processor := _PROCESSORS.get(platform.machine())) is None:
        return False
    audit, all_numbers = processor
    numbers = [number for name, number in zip(_DENIED, all_numbers, strict=True) if name not in allowed]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    ways = [(load, 0, 0, 4), (equal, 1, 0, audit), (end, 0, 0, _KILL), (load, 0, 0, 0)]
    ways.append((at_least, len(numbers) + 1, 0, _X32_CALLS))
    ways += [(equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    ways += [(end, 0, 0, _ALLOW), (end, 0, 0, _REFUSE)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *way) for way in ways))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(ways), ctypes.addressof(program)))
    return bool(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0)
