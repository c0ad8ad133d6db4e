import os
import socket
from pathlib import Path

import pytest

from fedvit.systemd import Notifier


@pytest.fixture
def listening(tmp_path: Path) -> socket.socket:
    """The socket that systemd would read."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.bind(str(tmp_path / "notify"))
    link.setblocking(False)
    return link


def receive_lines(link: socket.socket) -> list[bytes]:
    messages = []
    while True:
        try:
            messages.append(link.recv(1000))
        except BlockingIOError:
            return messages


def test_notifier_sends_what_systemd_waits_for(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are taken away: a child process must not report in the name of the program."""
    monkeypatch.setenv("NOTIFY_SOCKET", listening.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", str(3_600_000_000))
    notifier = Notifier.from_environment()
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys()
    notifier.ready()
    for _ in range(100):
        notifier.alive()
    notifier.stopping()
    assert receive_lines(listening) == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]


@pytest.mark.parametrize(("usec", "pid"), [("", ""), ("soon", ""), ("1000000", "1")])
def test_notifier_without_a_watchdog_of_its_own_does_not_report_life(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, usec: str, pid: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", listening.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    Notifier.from_environment().alive()
    assert receive_lines(listening) == []


def test_notifier_in_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        name = f"fedvit-test-{os.getpid()}"
        link.bind(f"\0{name}")
        Notifier(f"@{name}").ready()
        assert link.recv(1000) == b"READY=1"


def test_notifier_without_systemd_does_nothing(tmp_path: Path) -> None:
    Notifier().ready()
    Notifier(str(tmp_path / "gone"), 1.0).alive()
