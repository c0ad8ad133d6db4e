"""Two services with one record in PostgreSQL: one leads, the other takes over. Real processes, mosquitto and server."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Hosts
from tests.support.programs import CONFIG, DEVICES, ROUNDS, Stage, wait_for
from tests.support.s3_server import KEYS
from tests.support.stores import s3_server


def submit(stage: Stage, **more: Any) -> None:
    stage.submit("run", rounds=ROUNDS, devices=len(DEVICES), variants=CONFIG["variants"], **more)


@pytest.mark.slow
def test_others_take_over_from_leaders_that_are_killed_hang_or_are_cut_off(
    stage: Stage, hosts: Hosts, undisturbed: bytes
) -> None:
    """In each round the service that leads meets another end, and one of those that stand by resumes the run. Those
    that return have written nothing more, and end."""
    services = {"first": hosts.serve("first", "--standby")}
    wait_for(lambda: "serving the runs" in stage.log("first"), "a leader")
    refused = hosts.serve("other")
    assert stage.finish(refused, "other") == 2
    assert "by another `coordinator serve`, at the same database" in stage.log("other")
    waiting = ["second", "third", "fourth"]
    for name in waiting:
        services[name] = hosts.serve(name, "--standby")
    wait_for(lambda: all("standing by" in stage.log(name) for name in waiting), "the others to stand by")
    known = stage.command("status", "--runs", str(stage.out))["service"]["hosts"]
    assert [host["leads"] for host in known] == [True, False, False, False]
    submit(stage)
    devices = {name: stage.device(name) for name in DEVICES}

    def next_leader(number: int) -> str:
        """Which service leads now, when the run is in this round."""
        leads = wait_for(lambda: [name for name in waiting if "serving the runs" in stage.log(name)], "a leader")
        [name] = leads
        waiting.remove(name)
        wait_for(lambda: hosts.is_at_work(number), f"round {number}")
        return str(name)

    wait_for(lambda: hosts.is_at_work(1), "round 1")
    services["first"].kill()
    hanging = next_leader(2)
    services[hanging].send_signal(signal.SIGSTOP)
    cut_off = next_leader(3)
    hosts.links.silence(cut_off)
    assert all(stage.finish(process, name) == 0 for name, process in devices.items())
    wait_for(lambda: hosts.query("select 1 from runs where status = 'finished'"), "the run to be finished")
    [last] = waiting
    assert all("run run is resumed" in stage.log(name) for name in (hanging, cut_off, last))
    services[hanging].send_signal(signal.SIGCONT)
    hosts.links.mend(cut_off)
    for name in (hanging, cut_off):
        assert stage.finish(services[name], name) == 10
        assert "this service led in term" in stage.log(name).splitlines()[-1]
    hosts.check_run(undisturbed)
    services[last].send_signal(signal.SIGTERM)
    assert stage.finish(services[last], last) == 130


@pytest.mark.slow
def test_standby_on_another_disk_takes_over_from_the_mirror(
    stage: Stage, hosts: Hosts, undisturbed: bytes, tmp_path: Path
) -> None:
    """The leader is killed after it has accepted a result of round 2, and its disk is gone: uploads and states come
    from S3."""
    stage.environment |= KEYS
    own_disk = tmp_path / "standby" / "runs"
    with s3_server(tmp_path) as server:
        leader = hosts.serve("leader", "--standby")
        wait_for(lambda: "serving the runs" in stage.log("leader"), "a leader")
        hosts.serve("standby", "--standby", runs=own_disk)
        wait_for(lambda: "standing by" in stage.log("standby"), "a standby")
        store = {"url": "s3://models/fleet", "endpoint": server.endpoint, "mirror": True, "min_bytes": 1000}
        submit(stage, blobs=store)
        devices = {name: stage.device(name) for name in DEVICES}
        wait_for(lambda: hosts.query("select 1 from results where round = 2 and kind = 'train'"), "a result of round 2")
        leader.kill()
        assert not (own_disk / "run").exists()
        stage.out.rename(tmp_path / "gone")
        assert all(stage.finish(process, name) == 0 for name, process in devices.items())
        wait_for(lambda: hosts.query("select 1 from runs where status = 'finished'"), "the run to be finished")
        assert "run run is resumed" in stage.log("standby")
        own_disk.rename(stage.out)
        hosts.check_run(undisturbed)
        assert "damaged" not in stage.log("standby")
        assert (server.bucket / "fleet/run/results/model.safetensors").read_bytes() == undisturbed
