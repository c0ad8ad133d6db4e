"""All checks, one after the other."""

from dataclasses import replace
from pathlib import Path

from edge_client.health.doctor import CHECKS, run_checks, worst
from edge_client.health.doctor_context import DoctorContext


def test_all_checks_are_made_one_after_the_other(context: DoctorContext, digits: Path) -> None:
    found = [*run_checks(replace(context, data=digits))]
    assert len(CHECKS) == 17
    assert [finding.check for finding in found] == [
        "engine", "kernels", "sandbox", "training", "memory", "disk", "clock", "temperature", "throttling", "battery",
        "policy", "state", "files", "vault key", "identity", "data", "broker",
    ]  # fmt: skip
    assert worst(found) == "error"
    assert worst(found[:-1]) == "ok"
    assert worst([]) == "ok"
    assert all(finding.hint for finding in found if finding.level != "ok")
