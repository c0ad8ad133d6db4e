"""`coordinator export`: writes the model of a run as a bundle."""

import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import newest_run, open_existing_record
from coordinator.views.trained import read_trained_model
from export.bundle.command import format_flag, licence_flag, out_flag, precisions_flag, round_flag, write
from export.bundle.write import Bench, check_new
from export.formats import ONNX, write_format
from fedvit.command_line import Command, json_flag
from fedvit.data.folder import DeviceData
from profiles.probes.host import usable_cores


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
    check_new(out)
    data, threads = measuring["data"], measuring["threads"]
    with open_existing_record(folder) as store:
        run = run or newest_run(store, folder)
        trained = read_trained_model(store, folder, run, device, f"coordinator {version('fedvit')}", asked_round)
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
