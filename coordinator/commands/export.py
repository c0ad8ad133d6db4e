"""`coordinator export`: writes the model of a run as a bundle."""

import platform
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from coordinator.commands.flags import runs_flag
from coordinator.config import make_config
from coordinator.record.opening import newest_run, open_existing_record
from coordinator.record.tables import RunRecord
from coordinator.views.trained import ExportedProgram, RunFiles, read_trained_model
from export.bundle.command import check_flags, format_flag, licence_flag, out_flag, precisions_flag, round_flag, write
from export.bundle.write import Bench, check_new
from export.formats import ONNX, write_format
from fedvit.blobs import BlobStore
from fedvit.command_line import Command, json_flag
from fedvit.data.folder import DeviceData
from profiles.probes.host import usable_cores

ENGINES_WITHOUT_GRAPHS = ("torch", "eager")
"""Engines of simulations: the record has their name in place of a Program's digest."""


@click.command(
    cls=Command,
    examples=["coordinator export RUN --out bundle", "coordinator export RUN --device device-0 --out bundle"],
)
@click.argument("run", required=False)
@click.option("--device", metavar="ID", help="The model that was generated for this device (FedTP, pFedHN, ...).")
@round_flag
@format_flag(on_device=False)
@licence_flag
@out_flag
@runs_flag
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Images to measure with: those in test/CLASS, or a fifth of those in CLASS.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads to measure with; by default all cores.")
@precisions_flag
@json_flag
def export(
    run: str | None,
    device: str | None,
    asked_round: str | int | None,
    format_name: str,
    licence: str | None,
    out: Path,
    folder: Path,
    precisions: tuple[str, ...],
    as_json: bool,
    **measuring: Any,
) -> None:
    """Write a model of RUN, by default the newest run, as ONNX files that work without this software."""
    data, threads = measuring["data"], measuring["threads"]
    check_flags(format_name, data=data, precision=precisions, json=as_json)
    check_new(out)
    with open_existing_record(folder) as store, tempfile.TemporaryDirectory(prefix="fedvit-export-") as scratch:
        record = store.runs.read(run or newest_run(store, folder))
        exported = _export_program(record, Path(scratch)) if record.program in ENGINES_WITHOUT_GRAPHS else None
        files = RunFiles(folder / record.id, record, exported)
        trained = read_trained_model(store, files, device, f"coordinator {version('fedvit')}", asked_round)
    trained = replace(trained, licence=licence)
    if format_name != ONNX:
        click.echo("\n".join(write_format(format_name, out, trained)))
        return
    labelled = DeviceData.open(data).relabel(trained.classes).fit_to(trained.batch) if data else None
    bench = Bench(
        images=labelled.test if labelled else None,
        described=f"test images of {data.name}" if data else "",
        threads=threads or usable_cores(),
        machine=platform.machine(),
        cores=usable_cores(),
        training=labelled.train if labelled else None,
    )
    write(out, trained, bench, precisions, as_json=as_json)


def _export_program(record: RunRecord, folder: Path) -> ExportedProgram:
    """Export and verify the graphs of a run that an engine of torch trained. Raises ConfigError, ExportMismatch."""
    from coordinator.compute.planning.planner import make_plan  # torch takes seconds

    config = make_config(record.config, f"run {record.id}").run
    blobs = BlobStore(folder)
    plan = make_plan(config, record.classes, blobs, progress=lambda line: click.echo(f"coordinator: {line}", err=True))
    return ExportedProgram(plan.first.digest, blobs)
