"""A real Prometheus scrapes a real run; the programs report to a real socket what systemd waits for."""

import json
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from coordinator.security.broker.process import claim_port
from tests.support.programs import CONFIG, Stage, wait_for
from tests.support.prometheus import Prometheus, condition, page, password_file

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"


def test_promtool_accepts_the_alerts_and_the_example() -> None:
    """The example names the file of alerts, which is checked with it."""
    command = ["promtool", "check", "config", str(DEPLOY / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout


class Systemd:
    """The socket to which a program reports."""

    def __init__(self, stage: Stage, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(stage.folder / f"{name}.socket"))
        self.environment = {"NOTIFY_SOCKET": self._socket.getsockname(), "WATCHDOG_USEC": "300000"}
        self.received: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            self.received.append(self._socket.recv(1000).decode())

    def has_reported(self, message: str) -> bool:
        return message in self.received


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_prometheus_scrapes_a_run(stage: Stage) -> None:
    """A coordinator and two devices; one device is held at work until Prometheus has seen the run. All log JSON."""
    ports = [claim_port() for _ in range(3)]
    stage.environment = {**stage.environment, "FEDVIT_PROMETHEUS_PASSWORD_FILE": str(password_file(stage))}
    plain = stage.environment
    systemd = Systemd(stage, "coordinator"), Systemd(stage, "device")
    prometheus = Prometheus(stage, {"fedvit-coordinator": ports[:1], "fedvit-edge": ports[1:]})
    stage.environment = {**plain, **systemd[0].environment, "FEDVIT_LOG_FORMAT": "json"}
    coordinator = stage.coordinator("--devices", "2", "--rounds", "1", "--prometheus", str(ports[0]))

    def device(name: str, port: int, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        stage.environment = {**plain, **variables}
        return stage.device(name, "--prometheus", str(port), "--log-format", "json")

    # the device that will be held cannot be scraped then, so that it is scraped before the other one lets the run begin
    devices = {"device-1": device("device-1", ports[2], {})}
    wait_for(lambda: prometheus.values("sum(up)") == [2.0], "the coordinator and the first device to be scraped")
    devices["device-0"] = device("device-0", ports[1], systemd[1].environment)
    held, at_work = devices["device-1"], "select 1 from tasks where device = 'device-1' and outcome is null"
    wait_for(lambda: stage.query(at_work), "a task")
    held.send_signal(signal.SIGSTOP)
    wait_for(lambda: prometheus.values('fedvit_results_total{kind="train",outcome="accepted"}') == [1.0], "a result")
    wait_for(lambda: prometheus.values("fedvit_round_awaited_devices") == [1.0], "a device that is awaited")
    wait_for(lambda: prometheus.values("sum(max_over_time(up[10m]))") == [3.0], "all three programs to be scraped")
    held.send_signal(signal.SIGCONT)
    assert prometheus.values("fedvit_round") == [1.0]
    assert prometheus.values('count(count by (__name__) ({__name__=~"fedvit_.+"}))')[0] > 30
    assert page(ports[0], "healthz") == (200, "ok\n")
    assert condition(ports[0]) == (200, "run", set())
    assert condition(ports[1]) == (200, "device", set())
    wait_for(lambda: all(found.has_reported("WATCHDOG=1") for found in systemd), "signs of life")
    for name, device in devices.items():
        assert stage.finish(device, name) == 0, stage.log(name)
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    wait_for(lambda: all(found.has_reported("STOPPING=1") for found in systemd), "the programs to report their end")
    for found in systemd:
        assert found.received[0] == "READY=1"
    log = lines_of((stage.out / "run" / "coordinator.log").read_text())
    assert {line["run"] for line in log} == {"run"}
    accepted = [line for line in log if line["message"] == "result accepted"]
    assert {(line["device"], line["round"]) for line in accepted} == {(name, 1) for name in devices}
    done = [line for line in lines_of(stage.log("device-0")) if line["message"] == "task done"]
    assert {line["device"] for line in done} == {"device-0"}
    assert any(line["message"].startswith("finished;") for line in lines_of(stage.log("coordinator")))


@pytest.mark.slow
def test_device_without_logs_sends_none_with_its_failure(stage: Stage) -> None:
    """Two devices whose training diverges: one sends its last lines, the other was started with --no-logs."""
    diverging = {"epochs": 4, "batch_size": 8, "lr": 1e6, "momentum": 0.9}
    values = {**CONFIG, "variants": {}, "method": "fedavg", "devices": 2, "options": diverging}
    coordinator = stage.coordinator(values=values)
    stage.device("device-0")
    stage.device("device-2", "--no-logs")

    failed = "select distinct device from refusals where reason like '%diverged%' order by device"
    wait_for(lambda: len(stage.query(failed)) == 2, "both failures")
    wait_for(lambda: stage.query("select count(*) from logs") != [(0,)], "the lines of one of them")
    coordinator.send_signal(signal.SIGINT)
    stage.finish(coordinator, "coordinator")
    [(device, lines)] = stage.query("select distinct device, lines from logs limit 1")
    assert device == "device-0"
    assert "diverged" in lines
    assert stage.query("select count(*) from logs where device = 'device-2'") == [(0,)]
    assert "diverged" in stage.log("device-2"), "its own log has them"
