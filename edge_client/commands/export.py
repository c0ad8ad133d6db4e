"""`edge-client export`: the device's own model as ONNX files."""

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.storage.state import read_device_id, split_file, state_folder
from export.bundle.command import format_flag, licence_flag, out_flag, precisions_flag, round_flag, write
from export.bundle.write import Bench, check_new
from export.formats import ONNX, write_format
from fedvit.command_line import Command, json_flag
from fedvit.data.folder import DeviceData
from fedvit.data.split import KeptSplit, RandomSplit
from fedvit.errors import ConfigError
from profiles.probes.host import usable_cores


@click.command(
    "export",
    cls=Command,
    params=program_options("data", "state", "threads", "test_share", "vault_key"),
    examples=["edge-client export RUN --data ~/images --out bundle"],
)
@click.argument("run")
@round_flag
@format_flag(on_device=True)
@licence_flag
@out_flag
@precisions_flag
@json_flag
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    run: str,
    asked_round: str | int | None,
    format_name: str,
    licence: str | None,
    out: Path,
    precisions: tuple[str, ...],
    as_json: bool,
    **own: Any,
) -> None:
    """Write this device's own model of RUN as ONNX files that work without the coordinator.

    The model is the server's of the best or newest round that this device received, with its personal tensors.
    """

    from edge_client.owner.trained import load_own_model  # onnxruntime takes seconds

    settings = read_settings(context, own)
    data, threads = settings.data, settings.threads
    folder = state_folder(data, settings.state)
    check_new(out)
    if not (folder / "device-id").is_file():
        raise ConfigError("FV1411", f"no state of a device in {folder}; --state names another folder")
    split = KeptSplit.load(split_file(folder), settings.test_share) or RandomSplit(settings.test_share)
    images = DeviceData.open(data, split=split) if data else None
    trained, labelled = load_own_model(
        run,
        device=read_device_id(folder / "device-id"),
        state=folder,
        data=images,
        threads=threads,
        vault_key=settings.vault_key,
        round=asked_round,
    )
    trained = replace(trained, licence=licence)
    if format_name != ONNX:
        click.echo("\n".join(write_format(format_name, out, trained)))
        return
    bench = Bench(
        images=labelled.test if labelled else None,
        described="of the device's own test images",
        threads=threads,
        machine=platform.machine(),
        cores=usable_cores(),
        calibration=labelled.train if labelled else None,
    )
    write(out, trained, bench, precisions, as_json=as_json)
