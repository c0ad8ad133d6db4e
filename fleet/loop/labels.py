"""An owner who gives labels with `edge-client label`, in a terminal of its own."""

import os
import pty
import re
import select
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from edge_client.owner.labelling import KEYS, QUIT
from fedvit.errors import FedvitError

_SCREEN = re.compile(r"(\d+) of (\d+): (\S+);")
PATIENCE_S = 120.0
"""Longest wait for the program to show the next picture."""
SCREEN_CHARACTERS = 1 << 16


def give_labels(
    command: Sequence[str],
    environment: Mapping[str, str],
    classes: Sequence[str],
    find_class: Callable[[str], str],
    most: int,
) -> Counter[str]:
    """Answer the program until `most` pictures have labels; return their number by class.

    `classes` are those of the device's folder, and `find_class` finds the true one of a picture. Raises FedvitError if
    the program ends or shows nothing.
    """
    keys = dict(zip(sorted(classes), KEYS, strict=False))
    given: Counter[str] = Counter()
    end, other = pty.openpty()
    process = subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env={**os.environ, "TERM": "xterm", **environment}
    )
    os.close(other)
    try:
        for number in range(1, most + 1):
            name = _wait_for_picture(end, number)
            if name is None:
                break
            label = find_class(name)
            os.write(end, keys[label].encode())
            given[label] += 1
        with suppress(OSError):  # it has ended: no picture waits
            _wait_for_picture(end, most + 1)
            os.write(end, QUIT.encode())
        process.wait(PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(end)
    return given


def _wait_for_picture(end: int, number: int) -> str | None:
    """Return the name of the picture that the program shows as this number; None if it has ended."""
    shown, until = "", time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if not select.select([end], [], [], 1.0)[0]:
            continue
        try:
            read = os.read(end, 1 << 16)
        except OSError:  # the program has closed its side
            return None
        if not read:
            return None
        shown = (shown + read.decode(errors="replace"))[-SCREEN_CHARACTERS:]
        for match in _SCREEN.finditer(shown):
            if int(match[1]) == number:
                return match[3]
    raise FedvitError("FV2128", f"edge-client label shows no picture: {shown[-200:]!r}")
