"""Brokers of ours: they come up, keep strangers out, come back, and never outlive the coordinator."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from coordinator.security.broker import FLEET_USER, Broker, process, start_broker
from coordinator.security.broker.mosquitto import configuration, find_mosquitto, run_mosquitto
from coordinator.security.broker.process import MOST_LOG_BYTES, BrokerProgram, claim_port
from fedvit.errors import ConfigError, StorageFailed
from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Disconnected
from fedvit.transport.mqtt import MqttTransport
from tests.support.codes import has_code
from tests.support.mqtt_client import Client
from tests.support.waiting import WAIT_S, wait_until

BOTH = pytest.mark.parametrize("kind", ["mosquitto", "embedded"])

Start = Callable[..., Broker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts brokers that end with the test."""
    brokers: list[Broker] = []

    def start(kind: str, **options: Any) -> Broker:
        brokers.append(start_broker(kind, tmp_path / "broker", **{"port": 0, **options}))
        return brokers[-1]

    yield start
    for broker in brokers:
        broker.stop()


def first_event(address: Address) -> object:
    """What a client hears first."""
    inbox: SimpleQueue[object] = SimpleQueue()
    transport = MqttTransport(inbox, address, "client")
    transport.open()
    try:
        return inbox.get(timeout=WAIT_S)
    finally:
        transport.close()


def is_listening(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("choice", "kind"), [("mosquitto", "mosquitto "), ("embedded", "embedded amqtt"), ("auto", "mosquitto ")]
)
def test_broker_listens_at_its_address(start: Start, choice: str, kind: str) -> None:
    broker = start(choice)
    assert broker.kind.startswith(kind)
    assert broker.alive()
    assert broker.address.host == "127.0.0.1"
    assert first_event(broker.address) == Connected()
    broker.stop()
    assert not broker.alive()
    assert not is_listening(broker.address)


def test_auto_takes_the_embedded_broker_where_there_is_no_mosquitto(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.security.broker.find_mosquitto", lambda: None)
    assert start("auto").kind == "embedded amqtt"
    with pytest.raises(ConfigError, check=has_code("FV1202")):
        start("mosquitto")


def test_mosquitto_is_found_although_users_do_not_search_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mosquitto() is not None
    first = tmp_path / "mosquitto"
    first.write_text("#!/bin/sh\n")
    first.chmod(0o755)
    assert find_mosquitto() == first


@BOTH
def test_a_port_in_use_is_named(start: Start, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use.*--broker.port"):
            start(kind, port=port)


def test_an_address_of_another_machine_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1201")):
        start("auto", listen="192.0.2.1", password="secret")


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "192.168.1.7", "coordinator.local"])
def test_beyond_this_machine_a_password_is_needed(start: Start, listen: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1205")):
        start("auto", listen=listen)


@pytest.mark.parametrize(("choice", "password", "words"), [("other", None, "unknown"), ("auto", "", "is empty")])
def test_wrong_settings_are_named(start: Start, choice: str, password: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        start(choice, password=password)


@BOTH
@pytest.mark.parametrize("listen", ["127.0.0.1", "localhost"])
def test_only_clients_with_the_password_are_admitted(start: Start, kind: str, listen: str) -> None:
    secret = "pass:word $7$ #1 é"
    broker = start(kind, listen=listen, password=secret)
    address = broker.address
    assert (address.user, address.password) == (FLEET_USER, secret)
    assert first_event(address) == Connected()
    refused = Disconnected("broker refused: not authorised", refused=True)
    assert first_event(replace(address, password="guess")) == refused
    assert first_event(replace(address, password=None)) == refused
    assert first_event(replace(address, user="root")) == refused
    assert first_event(replace(address, user=None, password=None)) == refused
    assert first_event(address) == Connected()


@BOTH
def test_the_password_is_in_no_file_and_no_command_line(start: Start, kind: str, tmp_path: Path) -> None:
    broker = start(kind, password="s3cret-w0rd")
    first_event(broker.address)
    assert b"s3cret-w0rd" not in Path(f"/proc/{broker.pid}/cmdline").read_bytes()
    for file in (tmp_path / "broker").iterdir():
        assert "s3cret-w0rd" not in file.read_text()
        assert file.suffix == ".log" or file.stat().st_mode & 0o077 == 0


@BOTH
def test_a_broker_that_died_comes_back_on_its_port(start: Start, kind: str) -> None:
    broker = start(kind, password="secret")
    pid = broker.pid
    assert broker.tend() is None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not broker.alive())
    assert broker.tend() == "it had died and was started again"
    assert broker.pid != pid
    assert first_event(broker.address) == Connected()
    assert broker.tend() is None


@BOTH
def test_a_broker_whose_port_was_taken_meanwhile_comes_back_when_it_is_free(
    start: Start, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again, in growing intervals, and nothing is raised."""
    monkeypatch.setattr(process, "FIRST_RETRY_S", 0.01)
    broker = start(kind)
    broker.stop()
    said: list[str] = []
    with socket.create_server(("127.0.0.1", broker.address.port)):
        wait_until(lambda: said.append(broker.tend() or "") or len(list(filter(None, said))) == 3)  # type: ignore[func-returns-value]
    first, second, third = filter(None, said)
    port = f"port {broker.address.port} on 127.0.0.1 is in use"
    assert first.startswith(f"it had died and could not be started again (next attempt in 10 ms): {port}")
    assert second.startswith(f"it could not be started again (next attempt in 20 ms): {port}")
    assert third.startswith(f"it could not be started again (next attempt in 40 ms): {port}")
    wait_until(lambda: bool(broker.tend()) or broker.up)
    assert first_event(broker.address) == Connected()


def test_a_slow_broker_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At its first start, where its slowness is said; and when it is started again, while other things go on."""
    monkeypatch.setattr(process, "SLOW_S", 0.1)
    slow, gate = tmp_path / "mosquitto", tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.02; done"
    slow.write_text(f'#!/bin/sh\n[ "$1" = -h ] || {{ {wait}; }}\nexec {find_mosquitto()} "$@"\n')
    slow.chmod(0o755)
    address = Address("127.0.0.1", claim_port())
    config = tmp_path / "mosquitto.conf"
    config.write_text(configuration("127.0.0.1", address, tmp_path / "none"))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        gate.touch()

    broker = run_mosquitto(slow, config, address, tmp_path / "log", say)
    try:
        assert len(said) == 1
        assert " is slow to start; waiting up to 300 s for it" in said[0]
        assert first_event(address) == Connected()
        gate.unlink()
        os.kill(broker.pid, signal.SIGKILL)
        wait_until(lambda: not broker.alive())
        assert str(broker.tend()).startswith("it had died and was started again, but is slow")
        assert broker.tend() is None  # it does not wait here
        assert not broker.up
        pid = broker.pid
        gate.touch()
        wait_until(lambda: str(broker.tend()).startswith("it accepts connections again"))
        assert broker.pid == pid
        assert first_event(address) == Connected()
    finally:
        broker.stop()


def test_another_program_that_took_the_port_since_is_not_mistaken_for_the_broker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "SLOW_S", 0.1)
    address, gate, others = Address("127.0.0.1", claim_port()), tmp_path / "gate", list[socket.socket]()
    config = tmp_path / "mosquitto.conf"
    config.write_text(configuration("127.0.0.1", address, tmp_path / "none"))

    def take_port(_slow: str) -> None:
        others.append(socket.create_server((address.host, address.port)))
        gate.touch()

    waiting = f"while [ ! -e {gate} ]; do sleep 0.02; done; sleep 0.2; exec {find_mosquitto()} -c {config}"
    with pytest.raises(ConfigError, check=has_code("FV1203")):
        Broker(
            "mosquitto",
            address,
            BrokerProgram(["/bin/sh", "-c", waiting], {}, tmp_path / "log"),
            operator_log=take_port,
        )
    others[0].close()


def test_ports_that_are_picked_are_below_those_of_outgoing_connections() -> None:
    assert {claim_port() in range(20_000, 32_000) for _ in range(100)} == {True}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo cannot read the disk >&2; exit 1", "cannot read the disk"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "signal 9"),
    ],
)
def test_a_broker_that_ends_at_once_when_it_is_started_again_is_tried_anew(
    start: Start, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    """The reason is never a line of the process before it."""
    monkeypatch.setattr(process, "FIRST_RETRY_S", 0.01)
    broker = start("mosquitto")
    broker._command = ["/bin/sh", "-c", script]
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: not broker.alive())
    assert f"ended at once: {why} " in str(broker.tend())
    wait_until(lambda: f"ended at once: {why} " in str(broker.tend()))


@BOTH
def test_ctrl_c_in_the_terminal_does_not_reach_the_broker(start: Start, kind: str) -> None:
    assert os.getsid(start(kind).pid) != os.getsid(0)


@BOTH
def test_a_broker_outlives_the_thread_that_started_it(start: Start, kind: str) -> None:
    """Linux sends the death signal of a parent when the thread that forked ends."""
    started: list[Broker] = []
    thread = threading.Thread(target=lambda: started.append(start(kind)))
    thread.start()
    thread.join()
    for _ in range(5):
        assert first_event(started[0].address) == Connected()


COORDINATOR = """
import sys, time
from pathlib import Path
from coordinator.security.broker import start_broker
broker = start_broker(sys.argv[1], Path(sys.argv[2]), port=0)
print(broker.pid, broker.address.port, flush=True)
time.sleep(600)
"""


@BOTH
def test_a_broker_ends_when_the_coordinator_is_killed(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COORDINATOR, kind, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        _, port = map(int, coordinator.stdout.readline().split())
        address = Address("127.0.0.1", port)
        assert is_listening(address)
        coordinator.kill()
        coordinator.wait(WAIT_S)
        wait_until(lambda: not is_listening(address))


def test_broker_that_ends_at_once_reports_why(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "mosquitto"
    broken.write_text("#!/bin/sh\necho Error: no such thing >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, check=has_code("FV1203")):
        start("mosquitto")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, check=has_code("FV1701")):
        start_broker("auto", tmp_path / "file" / "broker", port=0)


def test_broker_that_has_grown_is_restarted(start: Start) -> None:
    """mosquitto keeps names that clients subscribe to, as many and as long as they like."""
    broker = start("mosquitto")
    assert broker.tend() is None
    pid, calm = broker.pid, broker.rss_bytes()
    broker._most_bytes = calm + 8_000_000
    with Client(broker.address, "collector") as collector:
        for number in range(50):
            collector.subscribe([f"{number}-{piece}-" + "x" * 50_000 for piece in range(4)])
        assert str(broker.tend()).endswith("more than a fleet needs, and was started again")
        wait_until(lambda: not collector.connected)
    assert broker.pid != pid
    assert broker.rss_bytes() < broker._most_bytes
    assert first_event(broker.address) == Connected()


def test_a_broker_s_long_log_is_put_aside(start: Start) -> None:
    broker = start("mosquitto")
    with broker.log_file.open("ab") as log:
        log.truncate(MOST_LOG_BYTES + 1)
    assert broker.tend() is None
    assert broker.log_file.with_suffix(".old").stat().st_size > MOST_LOG_BYTES
    assert first_event(broker.address) == Connected()
    wait_until(lambda: 0 < broker.log_file.stat().st_size < 10_000)  # it goes on from the beginning


def test_a_retained_message_is_not_kept_by_any_broker_of_ours(start: Start) -> None:
    for kind in ("mosquitto", "embedded"):
        broker = start(kind)
        hoarder = Client(broker.address, "hoarder")
        hoarder.publish("topic", b"kept", retain=True)
        hoarder.close()
        with Client(broker.address, "later", ["topic"]) as later:
            later.publish("topic", b"last")
            wait_until(lambda: later.seen, "the last message")
        assert later.seen == [("topic", b"last")]
        broker.stop()
