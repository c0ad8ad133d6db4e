"""The contents of a report of a fault of a run or of the service, for `coordinator bugreport` and `fleet bugreport`."""

from pathlib import Path

import msgspec

from coordinator.record.opening import newest_run, open_existing_record
from coordinator.record.record import Record
from coordinator.rounds.service.status import read_service_status
from coordinator.run_view import list_runs, read_run, show_document
from coordinator.views.fleet import make_fleet, read_fleet_record
from coordinator.views.problems import find_problems
from coordinator.views.service_facts import make_facts, read_record_facts
from fedvit.bug_report import BugReport
from fedvit.errors import FedvitError

MOST_RUNS = 200
MOST_DEVICE_LOGS = 50
LOGS = ("coordinator.log", "coordinator.log.1", "worker.log", "run.toml")


def collect_report(folder: Path, run: str | None) -> BugReport:
    """Collect what a report of RUN has, by default of the newest; `folder` is that of all runs.

    Raises FedvitError if there is no such run. A record that cannot be read is named in the report.
    """
    named, trouble = run, ""
    classes: set[str] = set()
    documents: dict[str, object] = {}
    try:
        with open_existing_record(folder) as store:
            runs = list_runs(store, folder)[:MOST_RUNS]  # newest first
            for each in runs:  # the log of a service names those of all runs
                classes |= set(store.runs.read(each.run).classes or ())
            documents["runs.json"] = msgspec.to_builtins(runs)
            documents["problems.json"] = _find_problems(store, folder)
            run = run or newest_run(store, folder)
            documents["show.json"] = show_document(read_run(store, run))
            classes |= set(store.runs.read(run).classes or ())
    except FedvitError as error:
        if named:
            raise
        trouble = f"{error.code}: {error}\n"
    report = BugReport({*classes, str(folder.absolute())})
    report.add_machine()
    for name, document in documents.items():
        report.add_object(name, document)
    if trouble:
        report.add("failed.txt", trouble)
    report.add_file("service.json", folder / "service.json")
    report.add_file("service.log", folder / "service.log")
    if run:
        home = folder / run
        report.add_folder("run/files.txt", home)
        devices = sorted(home.glob("devices/*.log"))[:MOST_DEVICE_LOGS]  # only `fleet` writes them
        for path in (*(home / name for name in LOGS), *devices):
            if path.exists():
                report.add_file(f"run/{path.relative_to(home)}", path)
    return report


def _find_problems(store: Record, folder: Path) -> list[object]:
    """Find what the dashboard shows as problems, except those of a deployment."""
    service = read_service_status(folder)
    fleet = make_fleet(read_fleet_record(store), folder, service, {})
    facts = make_facts(read_record_facts(store), folder, service, None)
    return [problem._asdict() for problem in find_problems(fleet, facts, folder, None, None)]
