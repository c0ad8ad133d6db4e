"""`fleet demo`: a federation on one machine, with handwritten digits and real processes."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import click

from coordinator.api import print_run
from fedvit.command_line import Command, Group, json_flag, print_json
from fedvit.hints import command
from fleet.commands.run import outcome_json
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from fleet.partition_plot import summary_table
from fleet.request import RunOutcome, RunRequest
from profiles.probes.host import usable_cores
from profiles.report.console import Console

DEMO: dict[str, Any] = {
    "method": "eftvit",
    "rounds": 12,
    "seed": 0,
    "options": {"epochs": 5, "lr": 1e-3, "mask": 0.25, "batch_size": 16, "server_epochs": 4, "warmup_rounds": 0},
    "model_options": {"image_size": 32, "patch_size": 4, "width": 64, "depth": 6, "heads": 4},
    "images": {"crop_padding": 2},
    "broker": {"broker": "embedded", "port": 0},
}


class DemoFlags(NamedTuple):
    """The command's flags."""

    devices: int
    rounds: int
    seed: int
    method: str
    out: Path
    as_json: bool


@click.group(
    "demo",
    cls=Group,
    invoke_without_command=True,
    examples=["fleet demo", "fleet demo --devices 8 --method fedavg --json", "fleet demo loop"],
)
@click.option("--devices", type=click.IntRange(min=1), default=4, show_default=True, help="Edge processes.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=DEMO["rounds"], show_default=True, help="Rounds to train."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of every random draw.")
@click.option("--method", default=DEMO["method"], show_default=True, help="Federated method, with its defaults.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("demo"), show_default=True, help="Folder for everything."
)
@json_flag
@click.pass_context
def demo_command(context: click.Context, /, **flags: Any) -> None:
    """Partition handwritten digits over devices, and train on them with real processes over MQTT."""
    own = DemoFlags(**flags)
    if context.invoked_subcommand is not None:
        context.default_map = {context.invoked_subcommand: {"out": own.out, "seed": own.seed, "as_json": own.as_json}}
        return
    parts = own.out / "parts"
    summary = deal("digits", "dirichlet", own.devices, parts, DealSettings(seed=own.seed, overwrite=True))
    if not own.as_json:
        Console(stderr=True).print(summary_table(summary))
    outcome = _run(own, parts)
    if own.as_json:
        click.echo(outcome_json(outcome))
        return
    print_run(outcome.summary)
    home = outcome.folder
    click.echo(f"took {outcome.seconds:.0f} s")
    click.echo(f"trained on the server:   {home / 'model.safetensors'}")
    click.echo(f"personal, per device:    {home / 'state' / 'DEVICE' / 'vault'}")
    click.echo(f"logs:                    {home / 'coordinator.log'}, {home / 'devices'}")
    again = command("coordinator", "show", outcome.summary.run, runs=own.out / "runs")
    click.echo(f"show this again:         {again}")


def _run(flags: DemoFlags, parts: Path) -> RunOutcome:
    from fleet.launch import run_fleet  # torch: --help need not wait for it

    values = {**DEMO, "rounds": flags.rounds, "seed": flags.seed, "method": flags.method}
    if flags.method != DEMO["method"]:
        values["options"] = {"epochs": 2, "lr": 0.05, "momentum": 0.9}
    request = RunRequest(
        device_folders(parts, None),
        values,
        out=flags.out / "runs",
        run=time.strftime("%Y%m%d-%H%M%S") + f"-{flags.method}",
        threads=max(1, usable_cores() // flags.devices),
    )
    return run_fleet(request, is_quiet=flags.as_json)


@demo_command.command(
    "loop",
    cls=Command,
    examples=[
        "fleet demo loop",
        "fleet demo loop --data cifar10.zip --class airplane,automobile,frog --pretrained deit_tiny.safetensors",
    ],
)
@click.option("--data", default="digits", show_default=True, help="Name or path of a data set of images.")
@click.option(
    "--class", "names", default="", metavar="A,B,C", help="Classes; the last one is new. By default the first three."
)
@click.option(
    "--pretrained",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Weights of DeiT-Tiny: devices train its head. Without them a small model learns from the start.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of every random draw.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("demo"), show_default=True, help="Folder for everything."
)
@json_flag
def loop_command(data: str, names: str, pretrained: Path | None, seed: int, out: Path, as_json: bool) -> None:
    """Use a model on two devices, let a new class appear, label it, learn it, try it and promote it.

    It takes a few minutes: a service, and on each device one process that trains and one that answers pictures.
    """
    from fleet.loop.story import LoopSettings, play_story  # onnxruntime: --help need not wait for it

    began = time.monotonic()

    def report(line: str) -> None:
        click.echo(f"{time.monotonic() - began:4.0f} s  {line}", err=as_json)

    outcome = play_story(LoopSettings(out, data, tuple(filter(None, names.split(","))), seed, pretrained), report)
    if as_json:
        print_json(outcome)
        return
    click.echo(f"took {outcome.seconds:.0f} s")
    click.echo(f"see its pages:           {command('coordinator', 'dashboard', runs=out / 'loop' / 'runs')}")
    click.echo(f"pictures, answers, logs: {out / 'loop'}")
