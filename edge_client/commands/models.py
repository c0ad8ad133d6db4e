"""`edge-client models`: the models of this device, and which one answers."""

import time
from typing import Any

import click
import msgspec

from edge_client.commands.options import program_options, read_settings
from edge_client.storage.models import DeviceModel, DeviceModels, ModelList
from edge_client.storage.serving import ServingStatus, describe_serving, read_serving
from edge_client.storage.state import state_folder
from export.bundle.assemble import Precision
from export.bundle.command import round_flag
from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError
from fedvit.terminal import escape_line


@click.command(
    "models",
    cls=Command,
    params=program_options("data", "state", "threads", "test_share", "vault_key"),
    examples=[
        "edge-client models --data ~/images",
        "edge-client models add RUN --data ~/images",
        "edge-client models add RUN --round best --precision int8_static --data ~/images",
        "edge-client models promote RUN-12 --data ~/images",
    ],
)
@click.argument("action", type=click.Choice(["list", "add", "promote", "rollback", "retire"]), default="list")
@click.argument("name", required=False)
@round_flag
@click.option(
    "--precision",
    type=click.Choice([entry.value for entry in Precision]),
    help="File of the bundle that `add` makes, by default fp32; int8_static answers faster.",
)
@json_flag
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    action: str,
    name: str | None,
    asked_round: str | int | None,
    precision: str | None,
    as_json: bool,
    **own: Any,
) -> None:
    """List the models of this device, or change which one answers pictures.

    `add RUN` makes a bundle of an own model of a run, `promote NAME` lets it answer, `rollback` returns to the
    model before it, `retire NAME` removes one. `edge-client serve` follows within a second.
    """
    settings = read_settings(context, own)
    state = state_folder(settings.data, settings.state)
    models = DeviceModels(state)
    if (name is None) is (action in ("add", "promote", "retire")):
        wanted = "needs the name of a run" if action == "add" else "needs the name of a model"
        raise ConfigError("FV1491", f"models {action} {wanted if name is None else 'takes no name'}")
    if action != "add" and (asked_round or precision):
        raise ConfigError("FV1491", f"models {action} takes neither --round nor --precision: they are for models add")
    if action == "add":
        from edge_client.owner.bundles import add_model  # onnxruntime takes seconds

        add_model(settings, name or "", asked_round, Precision(precision or Precision.FP32))
    elif action == "promote":
        models.promote(name or "", reason="by the owner")
    elif action == "rollback":
        models.roll_back("by the owner")
    elif action == "retire":
        models.retire(name or "", "by the owner")
    listed, serving = models.read(), read_serving(state)
    if as_json:
        print_json({**msgspec.to_builtins(listed), "serving": msgspec.to_builtins(serving)})
    else:
        click.echo("\n".join(map(escape_line, _lines(listed, serving))))


def _lines(listed: ModelList, serving: ServingStatus | None) -> list[str]:
    if not listed.models:
        lines = ["no models: edge-client models add RUN"]
    else:
        width = max(len(model.name) for model in listed.models)
        lines = [_line(model, width) for model in listed.models]
    lines += [f"withdrawn: {name}: {reason or 'no reason'}" for name, reason in listed.withdrawn.items()]
    if serving and serving.name:
        lines.append(describe_serving(serving))
    return lines


def _line(model: DeviceModel, width: int) -> str:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.changed_s))
    parts = [f"{model.name:<{width}}  {model.state:<10}  {since}  {model.method}"]
    if model.comparison:
        counts = model.comparison
        parts.append(
            f"right: both {counts.both}, only it {counts.only_challenger}, only the champion {counts.only_champion}"
        )
    return "  ".join([*parts, model.reason]).rstrip()
