"""Alerts to a real HTTP server on loopback."""

import socket
import threading
from collections.abc import Iterator

import pytest

from coordinator.config import AlertsConfig
from coordinator.rounds import alerts as alerts_module
from coordinator.rounds.alerts import Alerts
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.hooks import Hook
from tests.support.runs import Stage, silent
from tests.support.waiting import WAIT_S, wait_until


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(alerts_module, "BACK_OFF_S", 0.0)
    monkeypatch.setattr(alerts_module, "ANSWER_S", 100.0)
    server = Hook()
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield server
    server.may_answer.set()
    server.shutdown()
    serving.join()
    server.server_close()


SECRET = "T0KEN"


@pytest.mark.parametrize(
    "address",
    [f"file:///{SECRET}", f"http://[bad/{SECRET}", f"http:///{SECRET}", f"http://h:99999/{SECRET}",
     f"http://h/a {SECRET}", f"{SECRET}", f"http://h/\n{SECRET}"],
)  # fmt: skip
def test_invalid_address_is_refused_at_the_start_without_its_secret(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as refused:
        AlertsConfig(webhook=address)
    monkeypatch.setenv("FEDVIT_ALERTS_WEBHOOK", address)
    with pytest.raises(ConfigError) as refused_from_environment:
        Alerts("r", AlertsConfig())
    assert SECRET not in f"{refused.value}{refused_from_environment.value}"


@pytest.mark.parametrize("answer", [b"HTTP/1.0 404 T0KEN\r\n\r\n", b"no HTTP T0KEN\r\n\r\n", b""])
def test_failure_is_logged_without_the_secret_and_later_alerts_are_sent(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server answers wrongly as often as an alert is tried, and then takes the next one."""
    monkeypatch.setattr(alerts_module, "BACK_OFF_S", 0.0)
    taken = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for number in range(alerts_module.ATTEMPTS + 1):
                with listening.accept()[0] as link:
                    link.recv(65536)
                    link.sendall(answer if number < alerts_module.ATTEMPTS else b"HTTP/1.0 200 OK\r\n\r\n")
            taken.set()

        serving = threading.Thread(target=serve)
        serving.start()
        alerts = Alerts("r", AlertsConfig(webhook=f"http://127.0.0.1:{listening.getsockname()[1]}/{SECRET}"))
        alerts.send("run_paused", "first")
        wait_until(lambda: "alerts not sent" in caplog.text)
        alerts.send("run_paused", "second")
        assert taken.wait(WAIT_S)
        serving.join()
        alerts.close()
    assert SECRET not in "".join(f"{vars(record)}" for record in caplog.records)
    assert caplog.records[0].__dict__["server"] == "http://127.0.0.1"


def test_alerts_of_a_run(stage: Stage, hook: Hook) -> None:
    """A device that has other classes is refused, one leaves, and the run ends."""
    stage.fake("honest")
    stage.fake("other", classes=("ant", "bee"))
    leaves = stage.fake("leaves", silent)
    stage.start(devices=2, alerts={"webhook": hook.url}, rejoin_grace_s=0.0)
    stage.drive(lambda: bool(leaves.tasks()) and ("device_refused", "other") in hook.events())
    leaves.transport.vanish()
    assert stage.finish() == "finished"
    assert set(hook.events()) == {("device_refused", "other"), ("device_gone", "leaves"), ("run_stopped", None)}
    last = hook.bodies[-1]
    assert (last["run"], last["alerts"][-1]["text"]) == ("r", "the run has stopped, finished")
    assert last["text"].endswith("r: the run has stopped, finished")


def test_alerts_are_tried_again(hook: Hook) -> None:
    hook.fails = alerts_module.ATTEMPTS - 1
    alerts = Alerts("r", AlertsConfig(webhook=hook.url))
    alerts.send("device_gone", "pi is gone", "pi")
    alerts.close()
    assert hook.requests == alerts_module.ATTEMPTS
    assert hook.events() == [("device_gone", "pi")]


def test_alerts_that_cannot_be_sent_are_given_up(hook: Hook) -> None:
    hook.fails = alerts_module.ATTEMPTS
    alerts = Alerts("r", AlertsConfig(webhook=hook.url))
    alerts.send("device_gone", "pi is gone", "pi")
    wait_until(lambda: hook.requests == alerts_module.ATTEMPTS)
    alerts.send("run_stopped", "over")
    alerts.close()
    assert hook.events() == [("run_stopped", None)]


def test_alerts_do_not_wait_for_a_server_that_does_not_answer(hook: Hook) -> None:
    """Those that come meanwhile are sent together, as far as there is room."""
    hook.may_answer.clear()
    alerts = Alerts("r", AlertsConfig(webhook=hook.url))
    alerts.send("device_gone", "first")
    wait_until(lambda: hook.requests == 1)
    for number in range(alerts_module.MOST_WAITING + 7):
        alerts.send("device_gone", f"{number}")
    assert hook.bodies == []
    hook.may_answer.set()
    alerts.close()
    assert [(len(body["alerts"]), body["dropped"]) for body in hook.bodies] == [
        (1, 0), (alerts_module.MOST_WAITING, 7)
    ]  # fmt: skip


def test_webhook_of_the_environment(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVIT_ALERTS_WEBHOOK", hook.url)
    alerts = Alerts("r", AlertsConfig())
    alerts.send("run_paused", "the disk is full")
    alerts.close()
    assert hook.events() == [("run_paused", None)]


@pytest.mark.parametrize("address", ["file:///etc/passwd", "example", "http://", "http://me:secret@host/hook"])
def test_webhook_that_is_not_allowed(address: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1020", "webhook")):
        AlertsConfig(webhook=address)
