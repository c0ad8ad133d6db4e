"""Owners' policies with real processes: the strictest one that allows a method trains it, others are not asked."""

import json
from typing import Any

import pytest

from fedvit.errors import ConfigError
from tests.e2e.test_deployment import make_deployment
from tests.support.forked import Forked
from tests.support.programs import CONFIG, Stage, program, said, toml, wait_for

NO_UPDATES = '[send]\nupdates = "none"\nmin_mask = 0.75\nlogs = false\nmax_bytes_per_day = "5MB"\n'
NO_FEATURES = '[send]\nfeatures = "none"\nlogs = false\nmax_bytes_per_day = "5MB"\n'


def start_run(stage: Stage, method: str, options: dict[str, Any]) -> Forked:
    """Start a run of one round that waits for one device."""
    values = {**CONFIG, "method": method, "options": {"epochs": 1, "batch_size": 8, **options}, "variants": {}}
    config = stage.folder / "run.toml"
    classes = [str(digit) for digit in range(10)]
    config.write_text(toml({**values, "rounds": 1, "devices": 1, "classes": classes}))
    flags = ["start", "--config", str(config), "--run", "run", "--runs", str(stage.out)]
    flags += ["--broker", "embedded", "--broker.port", str(stage.port)]
    return stage.keep(Forked("coordinator.cli", flags, stage.log_path("coordinator"), stage.environment))


@pytest.mark.parametrize(
    ("method", "options", "strict", "stricter", "denied"),
    [
        ("eftvit", {"local_blocks": 1, "mask": 0.75}, NO_UPDATES, NO_FEATURES, "features"),
        pytest.param("fedtp", {}, NO_FEATURES, NO_UPDATES, "updates", marks=pytest.mark.slow),
    ],
)
def test_strictest_policy_that_allows_a_method_trains_it(
    stage: Stage, method: str, options: dict[str, Any], strict: str, stricter: str, denied: str
) -> None:
    coordinator = start_run(stage, method, options)
    for name, policy in (("device-0", strict), ("device-1", stricter)):
        (stage.folder / f"{name}.toml").write_text(policy)
    stage.device("device-1", "--policy", str(stage.folder / "device-1.toml"))
    line = f"device-1 does not allow {denied}, which {method} needs; no device that is here allows it"
    wait_for(lambda: line in stage.log("coordinator"), "the line about device-1")
    device = stage.device("device-0", "--policy", str(stage.folder / "device-0.toml"))
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.finish(device, "device-0") == 0, stage.log("device-0")
    assert stage.query("select distinct device, kind from results order by kind") == [
        ("device-0", "evaluate"),
        ("device-0", "train"),
    ]
    state = ["--state", str(stage.folder / "state" / "device-0")]
    lines = json.loads(said(stage, "edge_client.cli", "ledger", *state, "--json"))
    sent = "features" if method == "eftvit" else "update"
    assert [line["kind"] for line in lines] == ["hello counts", sent, "evaluation counts"]
    assert lines[1].get("left_out") == (0.75 if method == "eftvit" else None)
    assert "by class" not in lines[2]["what"]
    status = said(stage, "edge_client.cli", "status", *state)
    assert "1 evaluation; no image" in status
    assert "0 tasks refused" in status
    report = stage.report()
    [shown] = report["devices"]
    assert shown["received"].endswith(", 1 evaluations")
    assert shown["declined"] == 0


@pytest.mark.slow
def test_run_with_a_smaller_mask_says_so_and_waits_for_other_devices(stage: Stage) -> None:
    """The Program, which is made once a device is here, names the mask; the device gets no task."""
    start_run(stage, "eftvit", {"local_blocks": 1, "mask": 0.25})
    stage.device("device-0")
    line = "device-0 does not allow features with less than 50% of the patches left out, which eftvit needs"
    wait_for(lambda: line in stage.log("coordinator"), "the line about device-0")
    willing = stage.device("device-1", "--min-mask", "0.25")
    assert stage.finish(willing, "device-1") == 0, stage.log("device-1")
    assert stage.query("select distinct device from results") == [("device-1",)]


def test_policy_comes_with_the_token_and_stays(stage: Stage) -> None:
    """Who prepares the device writes it; another one later needs the owner's word. `devices` tells what it denies."""
    folder = make_deployment(stage)
    policy = stage.folder / "policy.toml"
    policy.write_text('[send]\nfeatures = "none"\n')

    def enroll(name: str, *more: str) -> str:
        flags = ["enroll", name, "--deployment", folder, "--no-wait", *more]
        return said(stage, "coordinator.cli", *flags).split()[-1]

    state = ["--state", str(stage.folder / "state" / "device-0")]
    coordinator = stage.coordinator("--devices", "1", "--rounds", "1", "--broker.deployment", folder, broker="auto")
    wait_for(lambda: "broker: mosquitto" in stage.log("coordinator"), "the broker")
    token = enroll("device-0", "--policy", str(policy))
    shown = said(stage, "edge_client.cli", "join", token, *state).splitlines()
    assert "may be sent: updates of single devices; no features; no counts by class" in shown
    assert (stage.folder / "state" / "device-0" / "policy.toml").read_text() == policy.read_text()
    policy.write_text('[send]\nfeatures = "any"\n')
    again = [*program("edge_client.cli"), "join", enroll("device-0", "--replace", "--policy", str(policy)), *state]
    assert stage.finish(stage.start("again", [*again, "--replace"]), "again") == ConfigError.exit_code
    assert "--replace-policy" in stage.log("again")
    train = [*program("edge_client.cli"), "--data", str(stage.parts / "device-0"), *state, "--threads", "1"]
    stage.start("device-0", train)
    wait_for(lambda: "device-0 does not allow features" in stage.log("coordinator"), "the line about device-0")
    listed = said(stage, "coordinator.cli", "devices", "--deployment", folder, "--runs", str(stage.out))
    assert "device-0 does not allow features" in listed.splitlines()
    assert coordinator.poll() is None
