"""`coordinator bugreport`: packs what is needed to find a fault of a run or of the service."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import newest_run, open_existing_record
from coordinator.run_view import list_runs, read_run, show_document
from fedvit.bug_report import BugReport
from fedvit.command_line import Command
from fedvit.errors import FedvitError

MOST_RUNS = 200
LOGS = ("coordinator.log", "coordinator.log.1", "worker.log")


@click.command(
    cls=Command,
    examples=["coordinator bugreport --runs runs", "coordinator bugreport RUN --runs runs --out report.zip"],
)
@click.argument("run", required=False)
@runs_flag
@click.option("--out", type=click.Path(path_type=Path), default=Path("fedvit-report.zip"), help="File to write.")
def bugreport(run: str | None, folder: Path, out: Path) -> None:
    """Write a ZIP file for the report of a fault: versions, configuration, rounds and logs.

    The rounds are those of RUN, by default of the newest. It has no tensors, names of classes, keys, passwords, tokens
    or addresses. Look into it before you send it.
    """
    classes: set[str] = set()
    documents: dict[str, object] = {}
    named, trouble = run, ""
    try:
        store = open_existing_record(folder)
        try:
            documents["runs.json"] = msgspec.to_builtins(list_runs(store, folder))[:MOST_RUNS]  # newest first
            run = run or newest_run(store, folder)
            view = read_run(store, run)
            documents["show.json"] = show_document(view)
            classes = set(store.runs.read(run).classes or ())
        finally:
            store.close()
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
        for name in LOGS:
            if (folder / run / name).exists():
                report.add_file(f"run/{name}", folder / run / name)
        report.add_folder("run/files.txt", folder / run)
    names = report.write(out)
    click.echo(f"{out}: {', '.join(names)}; look into it before you send it")
