"""Checks whether this device can take part in a run. Each finding comes with a hint.

A check is a function in one of the modules `*_checks`, and a line in CHECKS.
"""

from collections.abc import Callable, Iterator

from edge_client.health.broker_checks import check_broker, check_coordinator
from edge_client.health.doctor_context import LEVELS, DoctorContext, Finding, Level
from edge_client.health.keys import check_identity, check_vault_key
from edge_client.health.machine_checks import (
    check_battery,
    check_clock,
    check_disk,
    check_engine,
    check_heat,
    check_kernels,
    check_memory,
    check_sandbox,
    check_training,
)
from edge_client.health.state_checks import check_data, check_files, check_policy, check_state

CHECKS: tuple[Callable[[DoctorContext], Iterator[Finding]], ...] = (
    check_engine,
    check_kernels,
    check_sandbox,
    check_training,
    check_memory,
    check_disk,
    check_clock,
    check_heat,
    check_battery,
    check_policy,
    check_state,
    check_files,
    check_vault_key,
    check_identity,
    check_data,
    check_broker,
    check_coordinator,
)


def run_checks(context: DoctorContext) -> Iterator[Finding]:
    """Run all checks and yield their findings."""
    for check in CHECKS:
        yield from check(context)


def worst(findings: list[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def lines(finding: Finding) -> str:
    """One finding as plain text."""
    shown = f"{finding.level:<7}  {finding.check:<11}  {finding.what}"
    return f"{shown}\n{'':<22}{finding.hint}" if finding.hint else shown
