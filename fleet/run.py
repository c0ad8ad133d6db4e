"""`fleet run`: a coordinator and N edge processes on this machine."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.cli import config_flags, merge_flags, print_summary
from coordinator.config import StartConfig, make_config, read_toml
from coordinator.store import Store
from coordinator.summary import RunSummary, summarise
from fedvit.errors import ConfigError, FedvitError, LinkDown
from fleet.processes import Fleet, program
from profiles.probes.host import usable_cores

DEVICES_LEAVE_S = 30.0


class FleetOutcome(msgspec.Struct, frozen=True):
    """What a whole fleet on one machine came to."""

    summary: RunSummary
    seconds: float
    folder: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def device_folders(parts: Path, wanted: int | None) -> list[Path]:
    """The first `wanted` device folders of a partition. Raises ConfigError when there are fewer."""
    found = sorted(parts.glob("device-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not found:
        raise ConfigError(f"{parts} holds no device-0, device-1, ...: make them with `fleet partition --out {parts}`")
    if wanted is not None and wanted > len(found):
        raise ConfigError(f"--devices {wanted}, but {parts} holds {len(found)} device folders")
    return found[:wanted]


def run_fleet(
    folders: list[Path], values: dict[str, Any], *, out: Path, run: str, threads: int, quiet: bool = False
) -> FleetOutcome:
    """Run one configuration on real processes until it is finished; none is left behind.

    `values` is a configuration as a file gives it. Logs of devices lie in `out/run/devices`, their state
    in `out/run/state`. Raises FedvitError when the run failed.
    """
    config = make_config({**values, "devices": len(folders)}, "run")
    own = config.broker.broker in ("auto", "mosquitto", "embedded")
    port = config.broker.port or free_port()
    address = f"localhost:{port}" if own else config.broker.broker
    home = out / run
    home.mkdir(parents=True, exist_ok=True)
    file = home / "run.toml"
    file.write_bytes(msgspec.toml.encode(_as_toml(config, port)))
    began = time.monotonic()
    with Fleet() as fleet:
        command = [*program("coordinator.cli"), "start", "--config", str(file), "--out", str(out), "--run", run]
        coordinator = fleet.start("coordinator", command + (["--quiet"] if quiet else []))
        devices = []
        for folder in folders:
            edge = [
                *program("edge_client.cli"), "--broker", address, "--data", str(folder), "--id", folder.name,
                "--state", str(home / "state" / folder.name), "--threads", str(threads),
                "--federation", config.run.federation, "--once",
            ]  # fmt: skip
            fleet.start(folder.name, edge, log=home / "devices" / f"{folder.name}.log")
            devices.append(folder.name)
        while coordinator.poll() is None:
            time.sleep(0.1)
            for name, code in fleet.ended().items():
                if name in devices and code != 0:
                    raise FedvitError(f"{name} ended with code {code}: {_last_line(home / 'devices' / f'{name}.log')}")
        if coordinator.returncode != 0:
            raise FedvitError(
                f"the coordinator ended with code {coordinator.returncode}; its log: {home}/coordinator.log"
            )
        seconds = time.monotonic() - began
        if not fleet.wait(devices, DEVICES_LEAVE_S):
            raise LinkDown(f"devices are still there {DEVICES_LEAVE_S:.0f} s after the run ended")
    store = Store.in_folder(out)
    try:
        return FleetOutcome(summarise(store, run), seconds, home)
    finally:
        store.close()


def _as_toml(config: StartConfig, port: int) -> dict[str, Any]:
    run, broker = (_said(msgspec.to_builtins(part)) for part in (config.run, config.broker))
    return {**run, "broker": {**broker, "port": port}}


def _said(values: dict[str, Any]) -> dict[str, Any]:
    """Without what was left open, for which TOML has no word; in tables neither."""
    said = {key: _said(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in said.items() if value is not None}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


@click.command("run")
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
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of all runs."
)
@click.option("--name", default=None, help="Name of the run; by default date and time.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads per device; by default the cores divided among the devices."
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
@config_flags
def run_command(
    parts: Path, file: Path | None, out: Path, name: str | None, threads: int | None, as_json: bool, **flags: Any
) -> None:
    """Run a coordinator and N edge processes on this machine, one per device folder."""
    wanted = flags.pop("devices")
    values = merge_flags(read_toml(file) if file else {}, flags)
    folders = device_folders(parts, wanted)
    name = name or time.strftime("%Y%m%d-%H%M%S-fleet")
    threads = threads or max(1, usable_cores() // len(folders))
    outcome = run_fleet(folders, values, out=out, run=name, threads=threads, quiet=as_json)
    if as_json:
        click.echo(outcome_json(outcome))
        return
    print_summary(outcome.summary)
    click.echo(f"{outcome.seconds:.0f} s; logs, state and tensors: {outcome.folder}")


def outcome_json(outcome: FleetOutcome) -> str:
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
