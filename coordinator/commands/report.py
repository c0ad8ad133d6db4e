"""`coordinator report`: reports accuracy and cost of a run."""

from importlib import import_module
from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import newest_run, open_existing_record
from coordinator.views.report.devices import device_sheet
from coordinator.views.report.document import encode_report, read_report
from coordinator.views.terminal import draw_report
from fedvit.command_line import Command, json_flag
from fedvit.files import atomic_write
from profiles.report.console import Console


@click.command(cls=Command, examples=["coordinator report RUN --out report.html --csv devices.csv"])
@click.argument("run", required=False)
@runs_flag
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page: FILE.html.")
@click.option(
    "--csv", "table", type=click.Path(path_type=Path, dir_okay=False), help="Also write the table of devices: FILE.csv."
)
@json_flag
def report(run: str | None, folder: Path, out: Path | None, table: Path | None, as_json: bool) -> None:
    """Report RUN, by default the newest: accuracy, bytes, time, memory, energy; predicted beside measured."""

    with open_existing_record(folder) as store:
        document = read_report(store, run or newest_run(store, folder))
    if as_json:
        click.echo(encode_report(document).decode(), nl=False)
    else:
        console = Console()
        console.print(draw_report(document, console.width))
    if table:
        atomic_write(table, device_sheet(document.devices).csv().encode())
        click.echo(f"written: {table}", err=True)
    if out:
        page = import_module("coordinator.views.report.page")  # late: matplotlib, which the tables do not need
        atomic_write(out, page.run_page(document).encode())
        click.echo(f"written: {out}", err=True)
