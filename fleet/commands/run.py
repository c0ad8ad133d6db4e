"""`fleet run`: a coordinator and devices on this machine, as processes or as virtual devices."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import click
from msgspec import Struct

from coordinator.api import config_flags, merge_flags, print_run, runs_flag
from coordinator.config import read_toml
from coordinator.rounds.display import Display, choose_display
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError
from fedvit.roles import ProductPrecision
from fedvit.wire.topics import check_name
from fleet.clusters.cluster import connect
from fleet.clusters.hosts import check_hosts
from fleet.devices import device_folders, virtual_devices
from fleet.request import Engine, RunOutcome, RunRequest
from profiles.probes.host import usable_cores


class RunFlags(Struct, frozen=True, kw_only=True):
    """The command's own flags."""

    parts: Path
    file: Path | None  # a configuration
    folder: Path  # of all runs
    name: str | None
    threads: int | None
    virtual: int | None  # devices
    hosts: int | None
    ray: str | None
    engine: Engine
    checks_export: bool
    precision: ProductPrecision
    as_json: bool

    def check(self, devices: int | None) -> None:
        """Raises ConfigError for flags that do not go together; `devices` is --devices."""
        of_virtual = {f"--engine {self.engine}": self.engine != "onnx", "--ray": self.ray, "--hosts": self.hosts}
        of_torch = {f"--precision {self.precision}": self.precision != "fp32", "--check-export": self.checks_export}
        of_processes = {"--ray": self.ray, "--hosts": self.hosts}
        if self.virtual is None and (flag := _find_set(of_virtual)):
            raise ConfigError("FV2102", f"{flag} is for virtual devices: say how many with --virtual N")
        if self.virtual is not None and devices is not None:
            raise ConfigError(
                "FV2102", f"--virtual {self.virtual} says how many devices there are; leave out --devices {devices}"
            )
        if self.engine == "onnx" and (flag := _find_set(of_torch)):
            raise ConfigError("FV2102", f"{flag} is for --virtual N with --engine torch")
        if self.engine != "onnx" and (flag := _find_set(of_processes)):
            raise ConfigError(
                "FV2123", f"{flag} is for --engine onnx: engine {self.engine} has no processes of devices"
            )


def _find_set(flags: dict[str, Any]) -> str | None:
    return next((flag for flag, value in flags.items() if value), None)


@click.command(
    "run",
    cls=Command,
    examples=["fleet run --parts parts --method fedavg --rounds 20", "fleet run --virtual 500 --config run.toml"],
)
@click.option(
    "--parts",
    type=click.Path(path_type=Path),
    default=Path("parts"),
    show_default=True,
    help="Folder that `fleet partition` made.",
)
@click.option(
    "--config", "file", type=click.Path(path_type=Path), help="TOML file as for `coordinator start`; flags win over it."
)
@runs_flag
@click.option("--run", "name", metavar="NAME", default=None, help="Name of the run; by default date and time.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads per device; by default the cores divided among the devices."
)
@click.option(
    "--virtual",
    type=click.IntRange(min=1),
    metavar="N",
    help="N virtual devices in a few processes, in place of a process per folder; folders are assigned round-robin.",
)
@click.option("--hosts", type=click.IntRange(min=1), help="Processes of virtual devices; by default one per core.")
@click.option("--ray", metavar="HOST:PORT|local", help="Run the virtual devices on the nodes of a Ray cluster.")
@click.option(
    "--engine",
    type=click.Choice(["onnx", "torch", "eager", "auto"]),
    default="onnx",
    show_default=True,
    help="onnx: devices as processes or hosts with MQTT. torch: virtual devices in batches on the accelerator, "
    "without messages. eager: one virtual device after the other, as a method's code is written, for debugging. auto: "
    "torch where the accelerator is a GPU.",
)
@click.option(
    "--check-export",
    "checks_export",
    is_flag=True,
    help="In the engines of torch: also export the method's graphs, which real devices would run, and verify them.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(ProductPrecision)),
    default="fp32",
    show_default=True,
    help="Of products in engine torch.",
)
@json_flag
@config_flags
def run_command(devices: int | None, **flags: Any) -> None:
    """Run a coordinator and its devices on this machine: a process per device folder, or many virtual devices."""
    own = RunFlags(**{name: flags.pop(name) for name in RunFlags.__struct_fields__})
    values = merge_flags(read_toml(own.file) if own.file else {}, flags)
    own.check(devices)
    folders = device_folders(own.parts, devices) if own.virtual is None else virtual_devices(own.parts, own.virtual)
    outcome = _run(folders, values, own)
    if own.as_json:
        click.echo(outcome_json(outcome))
        return
    print_run(outcome.summary)
    click.echo(f"{outcome.seconds:.0f} s; logs, state and tensors: {outcome.folder}")


def _run(folders: list[Path] | dict[str, Path], values: dict[str, Any], flags: RunFlags) -> RunOutcome:
    from fleet import launch, simulate  # torch takes seconds, which a mistyped flag need not wait

    in_process = flags.engine != "onnx"
    threads = 1 if flags.virtual else max(1, usable_cores() // len(folders))
    request = RunRequest(
        folders,
        {"accelerator": "auto", **{key: value for key, value in values.items() if key != "broker"}}
        if in_process
        else values,
        out=flags.folder,
        run=check_name(flags.name or time.strftime("%Y%m%d-%H%M%S-fleet"), "run"),
        threads=flags.threads or threads,
        engine=flags.engine,
        checks_export=flags.checks_export,
        precision=flags.precision,
    )
    if flags.virtual is None:
        return launch.run_fleet(request, is_quiet=flags.as_json)
    if in_process:
        with Display() if flags.as_json else choose_display() as display:
            return simulate.simulate(request, display)
    with connect(flags.ray) if flags.ray else nullcontext() as cluster:
        hosts = check_hosts(cluster, flags.hosts, request.threads) if cluster else flags.hosts or usable_cores()
        virtual = launch.VirtualFleet(flags.parts, hosts, cluster)
        return launch.run_virtual(request, virtual, is_quiet=flags.as_json)


def outcome_json(outcome: RunOutcome) -> str:
    """The figures of a run, as one line of JSON."""
    summary = outcome.summary
    return json.dumps(
        {
            "mean_accuracy": summary.mean_accuracy,
            "seconds": round(outcome.seconds, 2),
            "max_edge_rss_bytes": summary.max_edge_rss_bytes,
            "bytes_down": summary.bytes_down,
            "bytes_up": summary.bytes_up,
            "run": summary.run,
        }
    )
