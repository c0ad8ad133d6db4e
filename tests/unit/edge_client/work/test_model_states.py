"""A real agent whose coordinator compares its models, and says which of them it is to use."""

import pytest

from edge_client.storage.models import DeviceModels
from edge_client.storage.serving import ServedAnswers, ServingStatus, write_serving
from fedvit.policy import ModelsPolicy, Policy
from fedvit.wire.messages import ModelReport, Models, WantedState
from tests.support.agents import World
from tests.support.settings import Setting


def tell(world: World, **states: WantedState) -> ModelReport:
    """Say which states the models are to have, RUN_ROUND for RUN-ROUND; return the report."""
    wanted = {name.replace("_", "-"): state for name, state in states.items()}
    world.server.tell(Models(world.server.instance, world.server.epoch, wanted))
    return world.server.expect(ModelReport)


def test_comparison_makes_a_challenger_and_the_coordinator_promotes_it(world: World, fedavg: Setting) -> None:
    device = world.device()
    first = world.result(fedavg, kind="compare")
    assert first.metrics.keys() == {"challenger", "neither"}
    assert sum(first.metrics.values()) == first.samples == 12
    assert (first.upload, first.by_class) == (None, ())
    assert device.vault.pending() == []
    world.server.acknowledge(first)
    assert tell(world, run_1="champion") == ModelReport(world.server.instance, {"run-1": "champion"}, "run-1")
    assert tell(world, run_1="champion").states == {"run-1": "champion"}, "again and again"
    second = world.result(fedavg, kind="compare", round=2)
    assert second.metrics == {
        "both": first.metrics["challenger"], "challenger": 0.0, "champion": 0.0, "neither": first.metrics["neither"],
    }  # fmt: skip
    report = tell(world, run_1="champion", run_2="canary")
    assert (report.states, report.serving) == ({"run-1": "champion", "run-2": "canary"}, "run-2")
    report = tell(world, run_1="champion", run_2="retired")
    assert (report.states, report.serving) == ({"run-1": "champion"}, "run-1")


def test_unnamed_canary_ends_and_the_champion_stays(world: World, fedavg: Setting) -> None:
    world.device()
    for number in (1, 2):
        world.server.acknowledge(world.result(fedavg, kind="compare", round=number))
        tell(world, **{f"run_{number}": "champion" if number == 1 else "canary"})
    assert tell(world).serving == "run-1"


def test_missing_model_is_reported(world: World) -> None:
    world.device()
    report = tell(world, other_7="champion")
    assert (report.states, report.serving) == ({}, "")
    assert "does not have other-7" in report.reason


def test_equal_reports_have_one_line_in_the_ledger(world: World) -> None:
    device = world.device()
    message = Models(world.server.instance, world.server.epoch, {"other-7": "champion"})
    for _ in range(1000):
        world.server.tell(message)
    world.server.mark()
    assert world.server.count(ModelReport) == 1000
    assert [line.kind for line in device.agent.storage.ledger.read()].count("model counts") == 1


def test_owner_who_chooses_alone_is_neither_asked_nor_told(world: World, fedavg: Setting) -> None:
    world.device(policy=Policy(models=ModelsPolicy(from_coordinator=False)))
    assert "from_coordinator = false" in world.refusal(fedavg, kind="compare")
    report = tell(world, run_1="champion")
    assert (report.states, report.reason) == ({}, "policy: from_coordinator = false")


def test_model_that_the_device_stopped_is_reported_and_not_used_again_before_that_was_heard(
    world: World, fedavg: Setting
) -> None:
    device = world.device()
    models: DeviceModels = device.agent.storage.models
    for number in (1, 2):
        world.server.acknowledge(world.result(fedavg, kind="compare", round=number))
        tell(world, **{f"run_{number}": "champion"})
    models.roll_back("it ended 3 times")  # by the process that answers pictures
    report = world.server.expect(ModelReport)
    assert (report.serving, report.failed, report.reason) == ("run-1", "run-2", "it ended 3 times")
    report = tell(world, run_1="former", run_2="champion")  # it was on its way
    assert (report.serving, report.failed) == ("run-1", "run-2")
    report = tell(world, run_1="champion", run_2="retired")
    assert (report.states, report.failed) == ({"run-1": "champion"}, "")


def test_sums_of_the_process_that_answers_are_reported(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.work.model_states.SUMS_S", 0.0)
    device = world.device()
    world.server.acknowledge(world.result(fedavg, kind="compare"))
    tell(world, run_1="champion")
    write_serving(world.state, ServingStatus(name="run-1", answered=ServedAnswers(pictures=40, confidence=30.0)))
    report = world.server.expect(ModelReport)
    assert (report.serving, report.answered, report.confidence) == ("run-1", 40, 30.0)
    assert [line.what for line in device.agent.storage.ledger.read() if line.kind == "model counts"][-1] == (
        "1 model, 40 pictures answered"
    )


@pytest.mark.parametrize("allowed", [True, False])
def test_drift_is_reported_as_a_flag_if_the_owner_allows_it(world: World, fedavg: Setting, *, allowed: bool) -> None:
    device = world.device(policy=Policy(models=ModelsPolicy(report_drift=allowed)))
    world.server.acknowledge(world.result(fedavg, kind="compare"))
    assert not tell(world, run_1="champion").has_drifted
    write_serving(world.state, ServingStatus(name="run-1", drift={"blur": 1e9}))
    assert tell(world, run_1="champion").has_drifted is allowed
    ledger = [line.what for line in device.agent.storage.ledger.read() if line.kind == "model counts"]
    assert ledger[-1].endswith("answered, drift" if allowed else "answered")
    write_serving(world.state, ServingStatus(name="other-7", drift={"blur": 1e9}))
    assert not tell(world, run_1="champion").has_drifted, "of another model"


def test_states_outlive_a_restart_and_messages_of_an_earlier_coordinator_change_nothing(
    world: World, fedavg: Setting
) -> None:
    device = world.device()
    world.server.acknowledge(world.result(fedavg, kind="compare"))
    tell(world, run_1="champion")
    device.stop()
    again = world.device()
    world.server.tell(Models(world.server.instance, world.server.epoch - 1, {"run-1": "retired"}))
    world.server.tell(Models("other", world.server.epoch, {"run-1": "retired"}))
    world.server.mark()
    serving = again.agent.storage.models.read().serving()
    assert serving is not None
    assert serving.name == "run-1"
