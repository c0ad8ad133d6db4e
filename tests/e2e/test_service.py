"""`coordinator serve`: runs from a queue on devices that stay, with real processes."""

import json
import signal
import subprocess
from typing import Any

import pytest

from coordinator.record.record import open_record
from fedvit.wire.messages import Hello, Task
from tests.support.event_files import steps
from tests.support.forked import Forked
from tests.support.programs import Stage, program, said, wait_for
from tests.support.waiting import WAIT_S

SITES = {"device-0": "berlin", "device-1": "munich"}
SLOW = {"*": {"epochs": 30}}


def serve(stage: Stage, *arguments: str) -> Forked:
    given = ["serve", "--runs", str(stage.out), "--broker", "embedded", "--broker.port", str(stage.port), *arguments]
    return stage.fork("service", *given)


def device(stage: Stage, name: str) -> "subprocess.Popen[bytes]":
    """One that stays when a run ends."""
    command = [*program("edge_client.cli"), "--broker", f"127.0.0.1:{stage.port}", "--data", str(stage.parts / name)]
    command += ["--state", str(stage.folder / "state" / name), "--id", name, "--threads", "1"]
    return stage.start(name, [*command, "--label", f"site={SITES[name]}"])


def statuses(stage: Stage) -> dict[str, str]:
    return dict(stage.query("select id, status from runs"))


def is_at_work(stage: Stage, run: str) -> bool:
    """Whether a device has begun a training task of the run."""
    return bool(stage.query(f"select 1 from tasks where run = '{run}' and outcome is null"))


def check_that_nobody_left(stage: Stage, devices: "dict[str, subprocess.Popen[bytes]]", *, joined: int) -> None:
    for name, process in devices.items():
        assert process.poll() is None, stage.log(name)
        said = stage.log(name)
        assert said.count(" joined ") == joined, said
        assert "Traceback" not in said
    assert "Traceback" not in stage.log("service")


def members(stage: Stage) -> dict[str, str]:
    """Which run each device of the service works for, as `status` has it."""
    return {member["device"]: member["run"] for member in service_status(stage)["members"]}


def service_status(stage: Stage) -> dict[str, Any]:
    return dict(stage.command("status", "--runs", str(stage.out))["service"])


def read_service_log(stage: Stage) -> str:
    return said(stage, "coordinator.cli", "status", "--runs", str(stage.out))


def list_runs(stage: Stage) -> dict[str, str]:
    """The status of each run as `runs` has it."""
    output = said(stage, "coordinator.cli", "runs", "--runs", str(stage.out), "--json")
    return {entry["run"]: entry["status"] for entry in json.loads(output)}


def test_service_serves_runs_side_by_side_and_one_after_the_other(stage: Stage) -> None:
    """Two runs on disjoint devices at the same time, then one on all of them: the devices join once."""
    # of several rounds, as a device may have sent its result of one when it is stopped; it stands still for long
    several = {"rounds": 8, "evaluate_every": 8, "variants": {"*": {"epochs": 10}}, "deadline_s": 600.0}
    assert stage.submit("berlin", devices_where="site=berlin", **several)["status"] == "queued"
    stage.submit("munich", devices_where="site=munich", **several)
    stage.submit("all", devices=2)
    assert statuses(stage) == dict.fromkeys(("berlin", "munich", "all"), "queued"), "without a service"
    service = serve(stage, "--side-by-side", "2")
    devices = {name: device(stage, name) for name in SITES}
    observer = stage.observer()
    # on a fast machine one run might be over before the other begins: its device stands still meanwhile
    runs = {"berlin": devices["device-0"], "munich": devices["device-1"]}

    def is_held(run: str) -> bool:
        if is_at_work(stage, run):
            runs[run].send_signal(signal.SIGSTOP)
            return True
        runs[run].send_signal(signal.SIGCONT)  # it had sent its result already: the next round's task holds it
        return False

    wait_for(lambda: {run for run in runs if is_held(run)} == set(runs), "both runs to be at work")
    # what `status` reads is written about once a second
    wait_for(lambda: members(stage) == {"device-0": "berlin", "device-1": "munich"}, "the status to show who is where")
    begun = {"begun": ["berlin", "munich"], "queued": ["all"]}
    wait_for(lambda: begun.items() <= service_status(stage).items(), "the status to name both runs")
    for process in runs.values():
        process.send_signal(signal.SIGCONT)
    warned = stage.submit("nowhere", devices_where="site=paris")
    assert "existing labels: site=berlin (1 device), site=munich (1 device)" in warned["warning"]
    wait_for(lambda: statuses(stage)["all"] == "finished", "the last run")
    assert statuses(stage) | {"nowhere": ""} == {
        **dict.fromkeys(("berlin", "munich", "all"), "finished"),
        "nowhere": "",
    }
    trained = stage.query("select distinct run, device from results where kind = 'train' order by run, device")
    assert trained == [("all", "device-0"), ("all", "device-1"), ("berlin", "device-0"), ("munich", "device-1")]
    logs = {run: (stage.out / run / "coordinator.log").read_text() for run in ("berlin", "munich")}
    assert all("run finished" in log for log in logs.values())
    assert "device-1" not in logs["berlin"], "of the other run"
    wait_for(lambda: statuses(stage)["nowhere"] == "waiting", "the next run")
    assert stage.command("cancel", "nowhere", "--runs", str(stage.out))["run"] == "nowhere"
    wait_for(lambda: statuses(stage)["nowhere"] == "cancelled", "the run to be cancelled")
    check_that_nobody_left(stage, devices, joined=1)
    asked = [message for message in observer.messages() if isinstance(message, Task | Hello)]
    assert len({message.instance for message in asked}) == len(devices), "no device began anew"
    service.send_signal(signal.SIGTERM)
    assert stage.finish(service, "service") == 130


@pytest.mark.slow
def test_service_that_is_killed_resumes_its_run_before_the_queue(stage: Stage) -> None:
    """A cancelled run makes room for the next; that one is resumed after kill -9, and then the queue's turn comes, in
    which a run that fails holds up nobody."""
    where = {"devices_where": "site=berlin"}
    stage.submit("dropped", **where, variants=SLOW, rounds=9)
    stage.submit("kept", **where, variants=SLOW, rounds=2, trackers={"writers": ["tensorboard"]})
    stage.submit("never", **where)
    stage.submit("wrong", **where, start_from="never")
    stage.submit("unfit", **where, model="lstm_small_text", model_options={}, options={}, variants={})
    stage.submit("queued", **where)
    service = serve(stage)
    devices = {"device-0": device(stage, "device-0")}
    wait_for(lambda: is_at_work(stage, "dropped"), "the first run to be at work")
    assert stage.command("cancel", "never", "--runs", str(stage.out)) == {"run": "never", "status": "cancelled"}
    stage.command("cancel", "dropped", "--runs", str(stage.out))
    wait_for(lambda: is_at_work(stage, "kept"), "the second run to be at work")
    assert "run ended" in stage.log("device-0")
    wait_for(lambda: stage.query("select 1 from results where run = 'kept' and kind = 'train'"), "a result of it")
    service.kill()
    assert service.wait(WAIT_S) == -signal.SIGKILL
    over = {"dropped": "cancelled", "never": "cancelled"}
    assert statuses(stage) == {**over, "kept": "running", "wrong": "queued", "unfit": "queued", "queued": "queued"}
    wait_for(lambda: "run kept: interrupted" in read_service_log(stage), "status to notice")
    assert list_runs(stage)["kept"] == "interrupted", "the record cannot know it"
    service = serve(stage)
    wait_for(lambda: statuses(stage)["queued"] == "finished", "the run of the queue")
    assert statuses(stage) == {**over, "kept": "finished", "wrong": "failed", "unfit": "failed", "queued": "finished"}
    [(reason,)] = stage.query("select reason from runs where id = 'wrong'")
    assert reason == "run wrong: start_from = 'never': that run closed no round"
    [(reason,)] = stage.query("select reason from runs where id = 'unfit'")
    assert reason.startswith("run unfit: EFTViT with these options needs")
    assert "run kept is resumed" in stage.log("service")
    assert stage.query("select count(*) from results where run = 'kept' and kind = 'train'") == [(2,)]
    check_that_nobody_left(stage, devices, joined=2)  # once with each service
    service.send_signal(signal.SIGINT)
    assert stage.finish(service, "service") == 130
    assert steps(stage.out / "kept", "loss/train") == [1, 2]


@pytest.mark.slow
def test_service_cleans_up_its_folder(stage: Stage) -> None:
    """By the policy of the newest run; not with `--gc-every-h 0`."""
    with open_record(stage.out) as store:
        for name in ("old", "new"):
            store.runs.create(name, {"keep_runs": 1})
            store.runs.update(name, status="finished")
            (stage.out / name / "blobs").mkdir(parents=True)
    stray = stage.out / "record.copies" / ".writing-half"
    stray.parent.mkdir()
    stray.write_bytes(bytes(1000))
    idle = serve(stage, "--gc-every-h", "0")
    wait_for((stage.out / "service.json").exists, "the service to have looked at its runs")
    idle.send_signal(signal.SIGTERM)
    assert stage.finish(idle, "service") == 130
    assert stray.exists()
    assert set(statuses(stage)) == {"old", "new"}
    service = serve(stage)
    wait_for(lambda: "gc: removed" in stage.log("service"), "the clean-up")
    service.send_signal(signal.SIGTERM)
    assert stage.finish(service, "service") == 130
    assert not stray.exists()
    assert set(statuses(stage)) == {"new"}
    assert not (stage.out / "old").exists()
    assert (stage.out / "new").exists()
