"""Schedules that repeat, links with shaped traffic and faults, wrong clocks."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.chaos.network import Link, Links, Network, _Direction
from bench.chaos.outcome import count_duplicates
from bench.chaos.schedule import KINDS, YEAR_S, draw_schedule
from fedvit.errors import ConfigError

DEVICES = ("device-0", "device-1")
WAIT_S = 20.0
PAIRS = sum(len(kind.targets) for kind in KINDS.values())

# --- schedules ----------------------------------------------------------------------------------------


def test_a_seed_gives_one_schedule() -> None:
    first, again, other = (draw_schedule(seed, DEVICES, duration_s=600, every_s=10) for seed in (3, 3, 4))
    assert first == again != other
    assert [fault.number for fault in first] == list(range(1, len(first) + 1))
    assert [fault.at_s for fault in first] == sorted(fault.at_s for fault in first)
    assert 40 <= len(first) <= 120  # 600 / 10, between half and one and a half times as far apart
    assert first[-1].at_s < 600


def test_every_kind_meets_every_sort_of_target_before_any_does_again() -> None:
    faults = draw_schedule(1, DEVICES, duration_s=10_000, every_s=10)[:PAIRS]
    sorts = [(fault.kind, "device" if fault.target in DEVICES else fault.target) for fault in faults]
    assert sorted(sorts) == sorted((name, target) for name, kind in KINDS.items() for target in kind.targets)


def test_faults_last_as_long_as_they_may() -> None:
    for fault in draw_schedule(1, DEVICES, duration_s=3000, every_s=10, longest_s=5.0):
        kind = KINDS[fault.kind]
        assert kind.least_s <= fault.lasts_s <= (min(5.0, kind.most_s) if kind.most_s else 0)
        assert (abs(fault.clock_s) == YEAR_S) == (fault.kind == "clock")


def test_only_the_kinds_that_were_asked_for() -> None:
    faults = draw_schedule(1, DEVICES, duration_s=300, every_s=10, kinds=["drop", "twin"])
    assert {fault.kind for fault in faults} == {"drop", "twin"}
    with pytest.raises(ConfigError, match="'flood' is unknown; known are kill, hang"):
        draw_schedule(1, DEVICES, duration_s=300, every_s=10, kinds=["flood"])


# --- networks -----------------------------------------------------------------------------------------


def test_networks_are_read() -> None:
    assert Network.parse("50ms, 2mbit,5%") == Network(2e6, 0.05, 0.05)
    assert Network.parse("64kbit") == Network(bits_per_s=64e3)
    for wrong in ("", "fast", "2mbit,3mbit", "100%", "0mbit", "2..3mbit", "-1ms"):
        with pytest.raises(ConfigError, match="expected the like of 2mbit,50ms,5%"):
            Network.parse(wrong)


def test_loss_slows_a_connection_down() -> None:
    """Mathis: 1448 B / 0.1 s * sqrt(1.5 / 0.05) = 79.3 kB/s, of 250 kB/s that the line has; without loss all of it."""
    assert Network.parse("2mbit,50ms,5%").bytes_per_s() == pytest.approx(79_310, rel=1e-3)
    assert Network.parse("2mbit,50ms").bytes_per_s() == 250_000
    assert Network.parse("512kbit,50ms,5%").bytes_per_s() == 64_000  # the line is slower than TCP


def test_a_segment_arrives_after_its_time_on_the_line_and_in_order() -> None:
    """8 kbit/s are 1000 B/s: 500 B take 0.5 s and 0.1 s of latency, the next 500 B come half a second later."""
    direction = _Direction(Network.parse("8kbit,100ms"), "seed")
    now = time.monotonic()
    first, second = direction.due(500), direction.due(500)
    assert 0.6 <= first - now < 0.6 + WAIT_S
    assert second - first == pytest.approx(0.5)
    lossy = _Direction(Network.parse("8mbit,100ms,50%"), "seed")
    due = [lossy.due(10) for _ in range(200)]
    assert due == sorted(due)
    assert due[-1] - time.monotonic() > 0.29  # at least one segment was lost, and arrived a round trip of 0.2 s later


@pytest.fixture
def echo() -> Iterator[int]:
    """An echo server; its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(client: socket.socket) -> None:
        with client:
            try:
                while received := client.recv(65536):
                    client.sendall(received)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def read(client: socket.socket, size: int) -> bytes:
    heard = b""
    while len(heard) < size:
        piece = client.recv(size - len(heard))
        assert piece, f"closed after {len(heard)} of {size} bytes"
        heard += piece
    return heard


@pytest.mark.parametrize("network", [None, Network.parse("100mbit,1ms,1%")])
def test_a_link_carries_everything_in_order(echo: int, network: Network | None) -> None:
    content = bytes(range(256)) * 400
    with Links(echo, network) as links, socket.create_connection(("127.0.0.1", links.port("a")), WAIT_S) as client:
        threading.Thread(target=client.sendall, args=(content,), daemon=True).start()
        assert read(client, len(content)) == content
        assert links.carried_bytes() == (len(content), len(content))


def test_a_link_that_is_cut_resets_and_refuses_until_it_is_mended(echo: int) -> None:
    with Links(echo) as links:
        links.port("other")
        client = socket.create_connection(("127.0.0.1", links.port("a")), WAIT_S)
        client.sendall(b"hello")
        assert read(client, 5) == b"hello"
        links.cut("a")
        assert gone(client)
        again = socket.create_connection(("127.0.0.1", links.port("a")), WAIT_S)
        assert gone(again)
        with socket.create_connection(("127.0.0.1", links.port("other")), WAIT_S) as untouched:
            untouched.sendall(b"still")
            assert read(untouched, 5) == b"still"
        links.mend("a")
        with socket.create_connection(("127.0.0.1", links.port("a")), WAIT_S) as back:
            back.sendall(b"back")
            assert read(back, 4) == b"back"


def gone(client: socket.socket) -> bool:
    with client:
        try:
            client.settimeout(WAIT_S)
            return client.recv(1) == b""
        except ConnectionResetError:
            return True


def test_a_silent_link_loses_nothing(echo: int) -> None:
    """Connections stay open, and bytes that were sent meanwhile arrive afterwards."""
    with Links(echo) as links, socket.create_connection(("127.0.0.1", links.port("a")), WAIT_S) as client:
        client.sendall(b"before")
        assert read(client, 6) == b"before"
        links.silence("a")
        client.sendall(b"meanwhile")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        links.mend("a")
        client.settimeout(WAIT_S)
        assert read(client, 9) == b"meanwhile"


def test_without_a_broker_a_link_closes() -> None:
    probe = socket.create_server(("127.0.0.1", 0))
    port = probe.getsockname()[1]
    probe.close()
    with Links(port) as links:
        assert gone(socket.create_connection(("127.0.0.1", links.port("a")), WAIT_S))


def test_a_link_is_made_once() -> None:
    with Links(1) as links:
        assert links.port("a") == links.port("a") != links.port("b")
    assert isinstance(Link(1, Network(), "seed"), Link)


# --- clocks -------------------------------------------------------------------------------------------

TELLS_THE_TIME = """
import datetime, time
def main():
    import sys
    from datetime import UTC
    far = [time.time() - float(sys.argv[1]), datetime.datetime.now(UTC).timestamp() - float(sys.argv[1])]
    far += [time.time_ns() / 1e9 - float(sys.argv[1])]
    began = time.monotonic()
    while time.time() - float(sys.argv[1]) < -1000 and time.monotonic() - began < 30: time.sleep(0.05)
    print(*(round(one / 86400) for one in [*far, time.time() - float(sys.argv[1])]))
"""


def test_a_clock_is_wrong_until_it_is_put_right(tmp_path: Path) -> None:
    (tmp_path / "teller.py").write_text(TELLS_THE_TIME)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from bench.chaos.clock import main; main()"
    command = [sys.executable, "-c", code, str(-YEAR_S), "2", "teller", str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["-365", "-365", "-365", "0"], done.stderr


# --- what came of it ----------------------------------------------------------------------------------


def test_results_that_were_taken_twice_are_found(tmp_path: Path) -> None:
    """device-0 in round 1 twice; evaluation is another thing, and so is another round."""
    line = "12:00:01 I result accepted  device={} round={} kind={} samples=5\n"
    taken = [("device-0", 1, "train"), ("device-0", 1, "evaluate"), ("device-0", 2, "train"), ("device-1", 1, "train")]
    log = tmp_path / "coordinator.log"
    log.write_text("".join(line.format(*entry) for entry in taken))
    assert count_duplicates(log) == 0
    log.write_text("".join(line.format(*entry) for entry in [*taken, taken[0]]))
    assert count_duplicates(log) == 1
    (tmp_path / "coordinator.log.1").write_text(line.format("device-1", 1, "train"))
    assert count_duplicates(log) == 2, "it was laid aside when it had grown"
    assert count_duplicates(tmp_path / "none") == 0
