"""Reports as data: what is derived in them, and what an old reader makes of a new one."""

import msgspec
import pytest

from fedvit.errors import BadPayload
from fedvit.resources import Budget, ResourceUse
from profiles.report.document import Comparison, DeviceRound, ProfileDocument, RunDevice, RunDocument, decode, encode
from tests.support.reports import profile_document, run_document


@pytest.mark.parametrize("document", [profile_document(), run_document(), run_document(predicted=False)])
def test_json_holds_everything(document: ProfileDocument | RunDocument) -> None:
    assert decode(encode(document)) == document
    raw = msgspec.json.decode(encode(document))
    assert raw["schema"] == 1
    assert raw["kind"] in ("profile", "run")
    assert raw["convention"].startswith("2 FLOPs per multiply-add")


def test_a_newer_schema_is_refused() -> None:
    newer = msgspec.structs.replace(profile_document(), schema=2)
    with pytest.raises(BadPayload, match="schema 2, known is up to 1"):
        decode(encode(newer))
    with pytest.raises(BadPayload, match="no report"):
        decode(b'{"kind": "recipe"}')


def test_what_an_older_reader_does_not_know_is_left_out() -> None:
    raw = msgspec.json.decode(encode(run_document()))
    assert decode(msgspec.json.encode({**raw, "weather": "fine"})) == run_document()


def test_relative_errors_need_both_figures() -> None:
    """(predicted - measured) / measured: (3 - 4) / 4."""

    def error(predicted: float | None, measured: float | None) -> float | None:
        return Comparison(figure="f", unit="s", predicted=predicted, measured=measured).relative_error

    assert error(3.0, 4.0) == -0.25
    assert [error(None, 4.0), error(3.0, None), error(3.0, 0.0)] == [None, None, None]


def device(*rounds: DeviceRound) -> RunDevice:
    return RunDevice(
        device="pi", train_samples=1, test_samples=1, accuracy=None, rounds=list(rounds), bytes_down=0, bytes_up=0,
        peak_rss_bytes=None,
    )  # fmt: skip


def entry(number: int, measured: ResourceUse | None) -> DeviceRound:
    status = "accepted" if measured else "dropped out"
    return DeviceRound(round=number, status=status, expected=None, measured=measured, accuracy=None)


def test_medians_skip_what_was_not_measured() -> None:
    """Steps of 1, 9 and 2 s: 2; one round without, one that dropped out. Energy was never measured: no such line."""
    steps = (1.0, 9.0, None, 2.0)
    rounds = [entry(number, ResourceUse(step_s=step)) for number, step in enumerate(steps)]
    found = {one.figure: one for one in device(*rounds, entry(9, None)).comparisons()}
    assert found["step"].measured == 2.0
    assert found["step"].predicted is None
    assert "energy of a round" not in found


def test_broken_budgets_are_counted_by_kind() -> None:
    """Time in two rounds, memory in one."""
    one = device(
        entry(1, ResourceUse(broke=("time",))), entry(2, ResourceUse(broke=("memory", "time"))), entry(3, None)
    )
    assert one.broken == {"time": 2, "memory": 1}
    assert one.budget is None
    assert one.rounds_that_were("dropped out") == 1


def test_the_newest_budget_counts() -> None:
    document = run_document()
    assert document.devices[0].budget == Budget(memory_bytes=10**9, round_deadline_s=1000.0)
    assert document.mean_accuracy == pytest.approx(0.93 - 0.6 / 12)
