"""What is read in mosquitto's log; that real brokers write it so is shown by test_deployment.py."""

from pathlib import Path

import pytest

from coordinator.security.broker_log import MOST_ACCEPTED, MOST_CONNECTIONS, BrokerLog


class Log:
    """A log that grows line by line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.write_text("2026-01-01T00:00:00: New client connected from 1.1.1.1:1 as before (p2, c1, k60, u'pi').\n")
        self.read = BrokerLog(file, file.stat().st_size)
        self._ports = 1000

    def write(self, *lines: str) -> None:
        with self.file.open("a") as file:
            file.writelines(f"2026-01-01T00:00:00: {line}\n" for line in lines)
        self.read.look()

    def accept(self) -> str:
        self._ports += 1
        address = f"10.0.0.1:{self._ports}"
        self.write(f"New connection from {address} on port 8883.")
        return address

    def connect(self, client_id: str, user: str, address: str | None = None) -> None:
        address = address or self.accept()
        self.write(f"New client connected from {address} as {client_id} (p2, c1, k60, u'{user}').")

    def reload(self, *devices: str) -> None:
        self.read.expect_reload(devices)
        assert not self.read.has_reloaded
        self.write("Reloading config.")
        assert self.read.has_reloaded


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


def test_connections_of_a_device_are_to_end_once_the_lists_are_read(log: Log) -> None:
    log.connect("one", "pi")
    log.connect("two", "pi")
    log.connect("three", "pi-2")
    log.read.expect_reload(["pi"])
    assert log.read.to_end == set()
    log.write("Reloading config.")
    assert log.read.to_end == {"one", "two"}
    log.write("Client one disconnected.")
    log.connect("two", "fedvit.coordinator")  # it has taken its place
    assert log.read.to_end == set()


def test_lists_that_were_read_before_they_were_written_do_not_count(log: Log) -> None:
    """Somebody else asked the broker to read them; the line was there, and not looked at yet."""
    log.connect("one", "pi")
    with log.file.open("a") as file:
        file.write("2026-01-01T00:00:00: Reloading config.\n")
    log.read.expect_reload(["pi"])
    log.read.look()
    assert not log.read.has_reloaded
    assert log.read.to_end == set()
    log.write("Reloading config.")
    assert log.read.to_end == {"one"}


def test_connection_that_was_accepted_before_is_to_end_and_one_accepted_after_is_not(log: Log) -> None:
    before = log.accept()
    log.reload("pi")
    log.connect("after", "pi")
    assert log.read.to_end == set()
    log.connect("before", "pi", before)
    assert log.read.to_end == {"before"}
    log.connect("other", "pi-2", log.accept())
    assert log.read.to_end == {"before"}


def test_connection_of_which_is_forgotten_when_it_was_accepted_is_to_end(log: Log) -> None:
    log.reload("pi")
    fresh = log.accept()
    log.write(*(f"New connection from 10.9.9.9:{port} on port 8883." for port in range(MOST_ACCEPTED)))
    log.connect("late", "pi", fresh)
    assert log.read.to_end == {"late"}


@pytest.mark.parametrize(
    "end",
    [
        "Client {} disconnected.",
        "Client {} disconnected, not authorised.",
        "Client {} disconnected due to protocol error.",
        "Client {} disconnected: Connection reset by peer.",
        "Client {} closed its connection.",
        "Client {} has exceeded timeout, disconnecting.",
        "Bad socket read/write on client {}: A TLS error occurred.",
        "Client {} [10.0.0.1:1001] disconnected.",
    ],
)
def test_every_kind_of_connection_end_is_recognised(log: Log, end: str) -> None:
    log.connect("one", "pi")
    log.write(end.format("one"))
    log.reload("pi")
    assert log.read.to_end == set()


@pytest.mark.parametrize(
    "forged",
    [
        "one disconnected",
        "one disconnected: x",
        "one disconnected due to x",
        "one closed its connection.",
        "one has exceeded timeout, disconnecting.",
    ],
)
def test_no_client_id_makes_the_end_of_another_connection(log: Log, forged: str) -> None:
    """A second connection of the same id is told in a line that begins with the id."""
    log.connect("one", "pi")
    log.connect(forged, "pi-2")
    log.write(f"Client {forged} already connected, closing old connection.")
    log.connect(forged, "pi-2")
    log.write(f"Client {forged} closed its connection.")
    log.reload("pi")
    assert log.read.to_end == {"one"}


@pytest.mark.parametrize("line", ["xxxxxxxx", "one [1.1.1.1:1] (p2, c1, k60, u'pi')."])
def test_client_id_that_hides_something_is_noticed_until_the_broker_starts_again(log: Log, line: str) -> None:
    """The user, where the line was cut; or another client, at whose id newer versions put an address in some lines."""
    log.connect("one", "pi")
    assert not log.read.overlooked
    log.write(f"New client connected from 1.1.1.1:2 as {line}")
    assert log.read.overlooked
    log.write("mosquitto version 2.0.11 starting")
    assert not log.read.overlooked


def test_restarted_broker_has_read_its_lists_and_has_no_connections(log: Log) -> None:
    log.connect("one", "pi")
    log.read.expect_reload(["pi"])
    log.write("mosquitto version 2.0.11 starting")
    assert log.read.has_reloaded
    assert log.read.to_end == set()


def test_log_that_was_put_aside_may_have_had_more(log: Log) -> None:
    log.connect("one", "pi")
    log.read.expect_reload(["pi"])
    log.file.write_text("")
    log.write("Reloading config.")
    assert log.read.overlooked
    assert log.read.to_end == {"one"}


def test_missing_log_hides_connections(log: Log) -> None:
    log.connect("one", "pi")
    log.file.unlink()
    assert log.read.look() == []
    assert log.read.overlooked
    log.read.expect_reload(["pi"])
    log.write("mosquitto version 2.0.11 starting")
    assert log.read.has_reloaded
    assert not log.read.overlooked


def test_crowd_is_counted_by_connections_that_are_open(log: Log) -> None:
    for number in range(3 * MOST_CONNECTIONS):
        log.connect(f"{number}", "pi")
        log.write(f"Client {number} disconnected.")
    with log.file.open("a") as file:
        file.writelines(
            f"2026-01-01T00:00:00: New client connected from 1.1.1.1:{number} as {number} (p2, c1, k60, u'pi').\n"
            for number in range(MOST_CONNECTIONS + 1)
        )
    [misuse] = log.read.look()
    assert (misuse.device, misuse.shut_out) == ("pi", True)
