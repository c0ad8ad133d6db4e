"""`edge-client export`: the device's own model as ONNX files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from export.bundle.command import check_flags, format_flag, licence_flag, out_flag, precisions_flag, round_flag, write
from export.bundle.write import check_new
from export.formats import ONNX, write_format
from fedvit.command_line import Command, json_flag


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

    check_flags(format_name, precision=precisions, json=as_json)
    from edge_client.owner.bundles import load_model  # onnxruntime takes seconds

    settings = read_settings(context, own)
    check_new(out)
    trained, bench = load_model(settings, run, round=asked_round)
    trained = replace(trained, licence=licence)
    if format_name != ONNX:
        click.echo("\n".join(write_format(format_name, out, trained)))
        return
    write(out, trained, bench, precisions, as_json=as_json)
