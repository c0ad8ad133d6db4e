"""Alerts of a real Prometheus over faults that are really made: the leader killed, the record down, the object store
gone, a run paused. Those that need days or hours are made of series that promtool evaluates."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coordinator.security.broker.process import claim_port
from tests.support.hosts import Hosts
from tests.support.programs import DEVICES, Stage, program, said, wait_for
from tests.support.prometheus import RULES, Prometheus, condition, password_file
from tests.support.s3_server import KEYS
from tests.support.stores import s3_server

JOB = "fedvit-coordinator"
LEADER = 'fedvit_leader{{job="c",federation="home",instance="{}"}}'
SLOW_ALERTS = {
    "FedvitQueueStuck": {'fedvit_queue_oldest_seconds{instance="a"}': "1000+60x200"},
    "FedvitCleanUpOld": {"fedvit_gc_age_seconds": "700000+60x200"},
    "FedvitTwoLeaders": {LEADER.format(name): "1+0x200" for name in "ab"},
    "FedvitBackupOld": {"fedvit_backup_age_seconds": "200000+60x200"},
    "FedvitCertificateExpires": {'fedvit_certificate_expires_seconds{certificate="broker"}': "2592000-60x200"},
    "FedvitDeviceCertificateExpires": {"fedvit_devices_certificate_ending": "1+0x200"},
    "FedvitPicturesDrifted": {"fedvit_devices_drifted": "2+0x200"},
}
"""Alert -> series that raise it, by the minute."""
CALM = {
    'fedvit_queue_oldest_seconds{instance="a"}': "1000+60x200",
    'fedvit_run_info{instance="a",run="r"}': "1+0x200",
    "fedvit_gc_age_seconds": "0+60x200",
    'fedvit_certificate_expires_seconds{certificate="broker"}': "9000000-60x200",
    'fedvit_certificate_expires_seconds{certificate="device"}': "100000-60x200",
    "fedvit_devices_certificate_ending": "0+0x200",
    "fedvit_devices_drifted": "0+0x200",
    LEADER.format("a"): "1+0x200",
    LEADER.format("b"): "0+0x200",
}
"""Series of a service that serves a run while another one waits."""


def test_alerts_that_need_hours(tmp_path: Path) -> None:
    """Each is raised by its series, and none by those of a service that is well."""

    def expect(series: dict[str, str], firing: set[str]) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count by (alertname) (ALERTS{{alertname="{name}",alertstate="firing"}})',
                    "eval_time": "3h",
                    "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name in firing else [],
                }
                for name in SLOW_ALERTS
            ],
        }

    tests = [expect(series, {name}) for name, series in SLOW_ALERTS.items()] + [expect(CALM, set())]
    file = tmp_path / "alerts.json"  # which is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def device(stage: Stage, name: str) -> "subprocess.Popen[bytes]":
    """One that stays when a run ends."""
    command = [*program("edge_client.cli"), "--broker", f"127.0.0.1:{stage.port}", "--data", str(stage.parts / name)]
    return stage.start(name, [*command, "--state", str(stage.folder / "state" / name), "--id", name, "--threads", "1"])


@pytest.mark.slow
def test_alerts_of_a_takeover_and_of_a_lost_record(stage: Stage, hosts: Hosts) -> None:
    """The leader is killed; then the one that took over loses the database, as does the last standby."""
    ports = {name: claim_port() for name in ("first", "second", "third")}
    stage.environment["FEDVIT_PROMETHEUS_PASSWORD_FILE"] = str(password_file(stage))
    prometheus = Prometheus(stage, {JOB: list(ports.values())}, at_once=True)

    def serve(name: str) -> object:
        return hosts.serve(name, "--standby", "--prometheus", str(ports[name]))

    first = hosts.serve("first", "--standby", "--prometheus", str(ports["first"]))
    wait_for(lambda: condition(ports["first"]) == (200, "leader", set()), "a leader")
    serve("second")
    wait_for(lambda: condition(ports["second"]) == (200, "standby", set()), "a standby")
    wait_for(lambda: sorted(prometheus.values("fedvit_leader")) == [0.0, 1.0], "both to be scraped")
    wait_for(lambda: prometheus.values("max(fedvit_standbys)") == [1.0], "the standby to be counted")
    seen = "count_over_time(max by (job, federation) (fedvit_leader_term)[15m:])"
    wait_for(lambda: prometheus.values(seen), "the rule of a changed leader to have seen the first one")
    term = max(prometheus.values("fedvit_leader_term"))
    assert "FedvitNoLeader" not in prometheus.firing()
    first.kill()
    wait_for(lambda: condition(ports["second"]) == (200, "leader", set()), "the standby to lead")
    wait_for(
        lambda: {"FedvitLeaderChanged", "FedvitNoStandby", "FedvitCoordinatorDown"} <= prometheus.firing(),
        "alerts of the takeover",
    )
    wait_for(lambda: max(prometheus.values("fedvit_leader_term"), default=0) > term, "the new term to be scraped")
    serve("third")
    wait_for(lambda: condition(ports["third"]) == (200, "standby", set()), "the new standby")
    wait_for(lambda: "FedvitNoStandby" not in prometheus.firing(), "the new standby to be seen")
    for name in ("second", "third"):
        hosts.links.cut(name)
    wait_for(lambda: {"FedvitNoLeader", "FedvitRecordUnreadable"} <= prometheus.firing(), "alerts of the record")
    wait_for(lambda: condition(ports["second"]) == (503, "leader", {"record"}), "the leader without its record")
    wait_for(lambda: condition(ports["third"]) == (503, "standby", {"record"}), "the standby without its record")
    for name in ("second", "third"):
        hosts.links.mend(name)
    wait_for(lambda: "FedvitNoLeader" not in prometheus.firing(), "a leader again")
    wait_for(lambda: "FedvitRecordUnreadable" not in prometheus.firing(), "the record again")


@pytest.mark.slow
def test_alerts_of_a_lost_store_a_pause_and_a_queue_that_stands(stage: Stage, tmp_path: Path) -> None:
    """One run with a mirror, that is paused later; then another run waits for its turn."""
    port = claim_port()
    stage.environment |= {**KEYS, "FEDVIT_PROMETHEUS_PASSWORD_FILE": str(password_file(stage))}
    prometheus = Prometheus(stage, {JOB: [port]}, at_once=True)
    given = ["serve", "--runs", str(stage.out), "--broker", "embedded", "--broker.port", str(stage.port)]
    service = stage.fork("service", *given, "--prometheus", str(port))
    wait_for(lambda: condition(port) == (200, "leader", set()), "the service")
    with s3_server(tmp_path) as server:
        store = {"url": "s3://models/fleet", "endpoint": server.endpoint, "mirror": True}
        stage.submit("run", devices=2, rounds=200, blobs=store)
        for name in DEVICES[:2]:
            device(stage, name)
        wait_for(lambda: prometheus.values("fedvit_object_store_up") == [1.0], "the run to be scraped")
        wait_for(lambda: stage.query("select 1 from rounds where closed_at is not null"), "a round")
        assert not prometheus.firing() & {"FedvitObjectStoreLost", "FedvitRunPaused"}
        server.kill()
        wait_for(lambda: {"FedvitObjectStoreLost", "FedvitRunPaused"} <= prometheus.firing(), "alerts of the store")
        assert condition(port) == (503, "leader", {"object_store"})
        assert prometheus.values('fedvit_run_paused{reason="object_store"}') == [1.0]
        server.start()
        wait_for(lambda: "FedvitObjectStoreLost" not in prometheus.firing(), "the store again")
        wait_for(lambda: condition(port) == (200, "leader", set()), "the run to go on")

        said(stage, "coordinator.cli", "pause", "run", "--runs", str(stage.out))
        wait_for(lambda: "FedvitRunPausedByOperator" in prometheus.firing(), "the alert of the pause")
        assert condition(port) == (503, "leader", {"operator"})
        stage.submit("next", devices=2)
        wait_for(lambda: prometheus.values("fedvit_queue_length") == [1.0], "the queue")
        assert prometheus.values("fedvit_queue_oldest_seconds")[0] >= 0
        said(stage, "coordinator.cli", "unpause", "run", "--runs", str(stage.out))
        wait_for(lambda: condition(port) == (200, "leader", set()), "the run to go on")
        assert prometheus.values("fedvit_gc_age_seconds")[0] >= 0, "the service cleaned up at its start"
    service.send_signal(signal.SIGTERM)
    assert stage.finish(service, "service") == 130
