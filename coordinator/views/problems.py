"""Problems of a fleet and its service, each with what to do.

The limits are those of the alerts in deploy/prometheus; ends of certificates are named 30 days earlier.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from coordinator.views.fleet import FleetDevice, FleetView, WorkingRun, was_written
from coordinator.views.service_facts import (
    CERTIFICATES,
    LEAST_DAYS,
    LEAST_DISK_BYTES,
    OLDEST_BACKUP_S,
    ServiceFacts,
    count_days,
    rough,
    show_date,
)
from fedvit.explanations import Explanation, read_explanations
from fedvit.hints import command
from profiles.report.page import size

MOST_REFUSALS = 20
"""Refusals of a run within an hour."""
MOST_OFFLINE = 0.2
"""Share of the devices."""
LONGEST_WAIT_S = 7200.0
"""Longest time for which a round may have no end."""
LONGEST_QUEUE_S = 600.0
"""Time after which a queued or waiting run is a problem."""
FAILED_S = 86_400.0
"""Time for which a failed run is a problem."""
MOST_NAMES = 5

Severity = Literal["bad", "mild"]


class Problem(NamedTuple):
    """Something that needs an operator."""

    severity: Severity
    text: str  # one sentence
    remedy: str  # what to do
    command: str | None = None
    run: str | None = None  # whose page has the buttons
    device: str | None = None  # whose page has the buttons


def find_problems(
    fleet: FleetView, facts: ServiceFacts, folder: Path, deployment: Path | None, doubt: str | None
) -> list[Problem]:
    """List the problems, the worst first.

    `folder` is that of all runs, `deployment` the folder of the devices' certificates, `doubt` the doubt of the clock.
    """
    found = [
        *_find_in_service(fleet, facts, folder, doubt),
        *_find_ending(facts, deployment),
        *(problem for working in fleet.runs for problem in _find_in_run(working, folder)),
        *_find_failed(fleet, folder),
        *_find_in_devices(fleet, folder, deployment),
    ]
    return sorted(found, key=lambda problem: problem.severity != "bad")


@cache
def _explanations() -> dict[str, Explanation]:
    return read_explanations()


def _advise(code: str) -> str:
    """Return the advice of an error code."""
    return _explanations()[code].remedy


def _find_in_service(fleet: FleetView, facts: ServiceFacts, folder: Path, doubt: str | None) -> Iterator[Problem]:
    status = facts.status
    serve = command("coordinator", "serve", runs=folder)
    is_needed = fleet.record.queue or any(one.run.is_submitted for one in fleet.runs)
    if is_needed and not facts.is_served:
        since = f" since {status.at.replace('T', ' ')[:16]} UTC" if status else ""
        remedy = "Start it with the flags of before; it resumes the runs."
        yield Problem("bad", f"No service takes runs from the queue{since}.", remedy, serve)
    if status and facts.is_here and not status.connected:
        yield Problem("bad", f"The service has no connection to its broker at {status.broker}.", _advise("FV0004"))
    if facts.disk and facts.disk.free_bytes < LEAST_DISK_BYTES:
        free = size(facts.disk.free_bytes)
        gc = command("coordinator", "gc", runs=folder)
        yield Problem("bad", f"The disk of the runs has {free} left; without space runs pause.", _advise("FV0012"), gc)
    if status and status.backup:
        age_s = facts.backups[0].age_s if facts.backups else None
        if age_s is None or age_s > OLDEST_BACKUP_S:
            when = "There is no backup yet" if age_s is None else f"The newest backup is {rough(age_s)} old"
            backup = command("coordinator", "backup", status.backup, runs=folder)
            yield Problem("mild", f"{when}, in {status.backup}.", "The service's log says why it made none.", backup)
    if doubt:
        yield Problem("bad", f"{doubt[:1].upper()}{doubt[1:]}.", _advise("FV1303"))


def _find_ending(facts: ServiceFacts, deployment: Path | None) -> Iterator[Problem]:
    """Find the certificates of the deployment itself that end soon."""
    for name in CERTIFICATES:
        if name in facts.certificates and count_days(end_s := facts.certificates[name]) < LEAST_DAYS:
            verb = "ended" if end_s < time.time() else "ends"
            text = f"The certificate of the {name} {verb} on {show_date(end_s)}; then no device can connect."
            if name == "authority":
                remedy = "Replace it before, so that all devices can move to the new one."
                yield Problem("bad", text, remedy, command("coordinator", "rotate-authority", deployment=deployment))
            else:
                yield Problem("bad", text, "Renew it before.", command("coordinator", "renew", deployment=deployment))


def _find_in_run(working: WorkingRun, folder: Path) -> Iterator[Problem]:
    run, status, progress = working.run, working.status, working.run.progress
    name = progress.run
    if progress.status == "interrupted" or (status is None and not run.is_submitted):
        resume = command("coordinator", "start", "--resume", name, runs=folder)
        if not run.is_submitted:
            yield Problem("bad", f"Run {name} is interrupted.", "Resume it; nothing is lost.", resume, name)
        return
    if status and status.store_trouble:
        text = f"The object store of run {name} cannot be used: {status.store_trouble.rstrip('.')}."
        yield Problem(
            "bad", text, "Check its address, its keys and its space; the run then resumes automatically.", run=name
        )
    if run.paused_at:
        unpause = command("coordinator", "unpause", name, runs=folder)
        since = run.paused_at.replace("T", " ")[:16]
        yield Problem("mild", f"Run {name} is paused since {since} UTC.", "Let it open rounds again.", unpause, name)
    elif status and status.doing.startswith("paused"):
        remedy = "It resumes automatically when the cause is removed."
        yield Problem("bad", f"Run {name} is {status.doing}.", remedy, run=name)
    elif progress.status == "waiting" and _age_s(progress.created_at) > LONGEST_QUEUE_S:
        doing = status.doing if status else "waiting"
        text = f"Run {name} has not begun for {rough(_age_s(progress.created_at))}: {doing}."
        enroll = command("coordinator", "enroll", "NAME")
        yield Problem("mild", text, "Start more devices, or enrol new ones.", enroll, name)
    elif status and run.openings and status.waiting_for and _age_s(run.openings[-1]) > LONGEST_WAIT_S:
        text = (
            f"Run {name} waits for {_count(len(status.waiting_for))} in a round of {rough(_age_s(run.openings[-1]))}."
        )
        yield Problem(
            "mild",
            text,
            "See which devices are awaited, and until when.",
            command("coordinator", "status", name, runs=folder),
            name,
        )
    if run.refusals > MOST_REFUSALS:
        text = f"Run {name} had {run.refusals} refusals within an hour."
        yield Problem("mild", text, "Read their reasons.", command("coordinator", "show", name, runs=folder), name)


def _find_failed(fleet: FleetView, folder: Path) -> Iterator[Problem]:
    """Find the runs that failed within FAILED_S; equal reasons are one problem."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for failed in fleet.record.failed:
        at = was_written(folder, failed.run) or datetime.fromisoformat(failed.created_at).timestamp()
        if time.time() - at < FAILED_S:
            by_reason[failed.reason or "its log says why"].append(failed.run)
    for reason, runs in by_reason.items():
        more = f" and {len(runs) - 1} more" if runs[1:] else ""
        text = f"Run {runs[0]}{more} failed: {reason.rstrip('.')}."
        remedy = "Remove the reason, then submit it again or resume it."
        yield Problem("bad", text, remedy, command("coordinator", "show", runs[0], runs=folder), runs[0])


def _find_in_devices(fleet: FleetView, folder: Path, deployment: Path | None) -> Iterator[Problem]:
    by_state: dict[str, list[FleetDevice]] = defaultdict(list)
    for device in fleet.devices:
        by_state[device.state].append(device)
    by_run: dict[str | None, list[FleetDevice]] = defaultdict(list)
    for device in by_state["quarantined"]:
        by_run[device.run].append(device)
    for run, devices in by_run.items():
        if run is not None:
            first = devices[0]
            release = command("coordinator", "quarantine", run, "--release", first.device, runs=folder)
            text = f"{_names(devices)} {_are(devices)} in quarantine in run {run}: {first.detail}."
            yield Problem(
                "mild", text, "Find the cause on the device before you release it.", release, None, first.device
            )
    by_detail: dict[str, list[FleetDevice]] = defaultdict(list)
    for device in by_state["set aside"]:
        if not device.detail.startswith("declined"):  # it is asked again by itself
            by_detail[device.detail].append(device)
    for detail, devices in by_detail.items():
        text = f"{_names(devices)} {_are(devices)} set aside: {detail}."
        yield Problem("mild", text, "Ask the device's owner, or change the run.", None, None, devices[0].device)
    if ending := by_state["certificate ending"]:
        enroll = command("coordinator", "enroll", ending[0].device, "--replace", deployment=deployment)
        remedy = "Connect the device: it renews the certificate. If that has ended, enrol the device again."
        yield Problem("mild", f"{_names(ending)}: {ending[0].detail}.", remedy, enroll, None, ending[0].device)
    away, all_devices = len(by_state["away"]), len(fleet.devices)
    if any(one.status for one in fleet.runs) and away > MOST_OFFLINE * all_devices:
        text = f"{away} of {all_devices} devices are away."
        yield Problem("mild", text, "Check network and power of the sites where they are.")


def _names(devices: list[FleetDevice]) -> str:
    """Name at most MOST_NAMES devices in words.

    >>> _names([FleetDevice(name, "", "away", "", None) for name in "abc"])
    'a, b and c'
    """
    names = [device.device for device in devices[:MOST_NAMES]]
    if (more := len(devices) - MOST_NAMES) > 0:
        names.append(f"{more} more")
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]


def _are(devices: list[FleetDevice]) -> str:
    return "are" if devices[1:] else "is"


def _count(devices: int) -> str:
    return f"{devices} device{'s' if devices != 1 else ''}"


def _age_s(at: str) -> float:
    return max(0.0, time.time() - datetime.fromisoformat(at).timestamp())


def next_commands(fleet: FleetView, facts: ServiceFacts, folder: Path, deployment: Path | None) -> list[str]:
    """Return the next commands, at most two, that lead from an empty folder to a first run."""
    steps = {
        command("coordinator", "init"): deployment is None and not facts.is_served,
        command(
            "coordinator", "serve", "--broker.deployment", deployment or "deployment", runs=folder
        ): not facts.is_served,
        command("coordinator", "enroll", "NAME", deployment=deployment): not fleet.devices,
        command("coordinator", "submit", "run.toml", runs=folder): not (fleet.runs or fleet.record.queue),
    }
    return [line for line, is_missing in steps.items() if is_missing][:2]
