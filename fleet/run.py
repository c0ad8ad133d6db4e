"""`fleet run`: a coordinator and devices on this machine, as processes or as virtual devices."""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import click
import msgspec

from coordinator.commands.config_flags import config_flags, merge_flags
from coordinator.commands.flags import runs_flag
from coordinator.commands.show import print_run
from coordinator.config import BrokerConfig, StartConfig, read_toml, with_listen_port
from coordinator.security.broker.process import FLEET_USER, claim_port
from edge_client.commands.options import BROKER_VARIABLE
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError, FedvitError
from fedvit.files import private_files
from fedvit.wire.topics import check_name
from fleet.devices import device_folders, virtual_devices
from fleet.processes import Fleet, last_line, program
from profiles.probes.host import usable_cores

if TYPE_CHECKING:
    from coordinator.run_view import RunView
    from fleet.clusters.cluster import Cluster

DEVICES_LEAVE_S = 30.0
"""For devices that heard of the run's end. Later they are ended: who was not connected then hears of it never."""
MAX_RESTARTS = 3
"""Times that a process of virtual devices is started again when it was killed."""
VIRTUAL_DEFAULTS: dict[str, Any] = {"deadline_s": 7 * 86400.0}
"""Defaults of runs on virtual devices that differ from those on real ones: devices wait for their turn to compute, and
must not be lost on a slow machine."""


class FleetOutcome(msgspec.Struct, frozen=True):
    """The outcome of a run of a fleet on one machine."""

    summary: "RunView"
    seconds: float
    folder: Path


def _answers(host: str, port: int) -> bool:
    """Whether a program listens at this address."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def run_fleet(
    folders: list[Path], values: dict[str, Any], *, out: Path, run: str, threads: int, quiet: bool = False
) -> FleetOutcome:
    """Run one configuration with a process per device until it is finished; all processes have ended afterwards.

    `values` is a configuration as in a file. Logs of devices are in `out/run/devices`, their states in `out/run/state`.
    Raises FedvitError when the run failed.
    """
    from coordinator.compute.planning.checks import checked_config  # imports torch, which takes seconds

    config = checked_config({**_with_free_port(values), "devices": len(folders)}, "run")
    home = out / run

    commands = {
        folder.name: [
            *program("edge_client.cli"), "--data", str(folder), "--id", folder.name,
            "--state", str(home / "state" / folder.name), "--threads", str(threads),
            "--federation", config.run.federation, "--once",
        ]
        for folder in folders
    }  # fmt: skip
    return _run_processes(config, commands, out=out, run=run, quiet=quiet, restarts=False)


def run_virtual(
    parts: Path,
    count: int,
    values: dict[str, Any],
    *,
    hosts: int,
    out: Path,
    run: str,
    threads: int = 1,
    quiet: bool = False,
    cluster: "Cluster | None" = None,
) -> FleetOutcome:
    """As `run_fleet`, with `count` virtual devices in `hosts` processes, which are restarted when they are killed.

    `values` override VIRTUAL_DEFAULTS. Logs of hosts are in `out/run/devices`. With `cluster` the hosts run on its
    nodes, and their states are copied back to `out/run/state`.
    """
    from coordinator.compute.planning.checks import checked_config  # imports torch, which takes seconds

    config = checked_config({**VIRTUAL_DEFAULTS, **_with_free_port(values), "devices": count}, "run")
    home = out / run

    def arguments(parts: str, state: str) -> dict[str, list[str]]:
        return {
            f"host-{number}": [
                "--parts", parts, "--devices", str(count), "--number", str(number),
                "--hosts", str(hosts), "--state", state, "--threads", str(threads),
                "--federation", config.run.federation, "--once",
            ]
            for number in range(min(hosts, count))
        }  # fmt: skip

    virtual_devices(parts, count)  # raises where there are no folders, before anything is started
    if cluster is not None:
        commands = {name: [*given, "--at-once", "1"] for name, given in arguments("parts", "work").items()}
        return _run_on_nodes(config, cluster, commands, parts, threads, out=out, run=run, quiet=quiet)
    commands = {
        name: [*program("fleet.host"), *given] for name, given in arguments(str(parts), str(home / "state")).items()
    }
    return _run_processes(config, commands, out=out, run=run, quiet=quiet, restarts=True)


def _run_on_nodes(
    config: StartConfig,
    cluster: "Cluster",
    commands: Mapping[str, Sequence[str]],
    parts: Path,
    threads: int,
    *,
    out: Path,
    run: str,
    quiet: bool,
) -> FleetOutcome:
    from fleet.clusters.hosts import HostsOnRay, broker_for_nodes

    port = config.broker.port or claim_port()
    address = None
    if _is_own(config):
        address = _own_broker(config.broker, broker_for_nodes(cluster, config.broker), port)
    config = msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, port=port))
    with HostsOnRay(cluster, parts, out / check_name(run, "run") / "state", threads=threads) as hosts:
        return _run_processes(
            config, commands, out=out, run=run, quiet=quiet, restarts=True, devices=hosts, address=address
        )


def _with_free_port(values: dict[str, Any]) -> dict[str, Any]:
    """Configuration whose broker takes a free port, if none is given: nobody but the devices started here connects."""
    broker = values.get("broker", {})
    if not isinstance(broker, dict):
        return values  # the check of the configuration refuses it
    return {**values, "broker": {"port": 0, **with_listen_port(broker, "broker")}}


class Devices(Protocol):
    """Starts the processes of devices; see `Fleet`."""

    def start(
        self, name: str, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
    ) -> object: ...

    def ended(self) -> dict[str, int]: ...

    def wait(self, names: Sequence[str], timeout_s: float) -> bool: ...


def _is_own(config: StartConfig) -> bool:
    """Whether the coordinator starts the broker."""
    return config.broker.broker in ("auto", "mosquitto", "embedded")


def _own_broker(broker: BrokerConfig, host: str, port: int) -> str:
    """Address of the broker that the coordinator starts, with its password, for devices that reach it at `host`."""
    password = broker.password or os.environ.get("FEDVIT_BROKER_PASSWORD")
    secret = f"{FLEET_USER}:{quote(password, safe='')}@" if password else ""
    return f"mqtt://{secret}{f'[{host}]' if ':' in host else host}:{port}"


@private_files()
def _run_processes(
    config: StartConfig,
    commands: Mapping[str, Sequence[str]],
    *,
    out: Path,
    run: str,
    quiet: bool,
    restarts: bool,
    devices: Devices | None = None,
    address: str | None = None,
) -> FleetOutcome:
    """Start a coordinator and the processes of `commands`; wait for the run's end.

    The processes are started by `devices`, by default on this machine, and find the broker at `address`, by default
    where this machine does.
    """
    from coordinator.record.store import Store  # imports SQLAlchemy, which takes half a second
    from coordinator.run_view import read_run

    own = _is_own(config)
    port = config.broker.port or claim_port()
    home = out / check_name(run, "run")
    home.mkdir(parents=True, exist_ok=True)
    file = home / "run.toml"
    file.write_bytes(msgspec.toml.encode(_as_toml(config, port)))
    began = time.monotonic()
    with Fleet() as fleet:
        command = [*program("coordinator.cli"), "start", "--config", str(file), "--runs", str(out), "--run", run]
        coordinator = fleet.start("coordinator", command + (["--quiet"] if quiet else []))
        devices = devices or fleet
        host = {"0.0.0.0": "127.0.0.1"}.get(config.broker.listen, config.broker.listen)
        address = address or (_own_broker(config.broker, host, port) if own else config.broker.broker)
        environment = {BROKER_VARIABLE: address}
        left = dict.fromkeys(commands, MAX_RESTARTS if restarts else 0)

        def begin(name: str) -> None:
            devices.start(name, commands[name], home / "devices" / f"{name}.log", environment=environment)

        # the coordinator loads torch first; who came earlier would find no broker, and take its time to try again
        while own and coordinator.poll() is None and not _answers(host, port):
            time.sleep(0.1)
        for name in commands:
            begin(name)
        while coordinator.poll() is None:
            time.sleep(0.1)
            for name, code in devices.ended().items():
                if name not in commands or code == 0:
                    continue
                if code > 0 or not left[name]:
                    raise FedvitError(f"{name} ended with code {code}: {last_line(home / 'devices' / f'{name}.log')}")
                left[name] -= 1  # killed by a signal: real devices would start again
                begin(name)
        if coordinator.returncode != 0:
            raise FedvitError(
                f"the coordinator ended with code {coordinator.returncode}; its log: {home}/coordinator.log"
            )
        seconds = time.monotonic() - began
        devices.wait(list(commands), DEVICES_LEAVE_S)
    store = Store.in_folder(out)
    try:
        return FleetOutcome(read_run(store, run), seconds, home)
    finally:
        store.close()


def _as_toml(config: StartConfig, port: int) -> dict[str, Any]:
    run, broker = (_without_none(msgspec.to_builtins(part)) for part in (config.run, config.broker))
    return {**run, "broker": {**broker, "port": port}}


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    """Without None, which TOML does not have; in nested tables, too."""
    inner = {key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in inner.items() if value is not None}


@click.command(
    "run",
    cls=Command,
    examples=[
        "fleet run --parts parts --method fedavg --rounds 20",
        "fleet run --virtual 500 --config run.toml",
    ],
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
    type=click.Choice(["onnx", "torch", "auto"]),
    default="onnx",
    show_default=True,
    help="onnx: devices as processes or hosts with MQTT. torch: virtual devices in batches on the accelerator, "
    "without messages. auto: torch where the accelerator is a GPU.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Of products in engine torch.",
)
@json_flag
@config_flags
def run_command(
    parts: Path,
    file: Path | None,
    folder: Path,
    name: str | None,
    threads: int | None,
    virtual: int | None,
    hosts: int | None,
    ray: str | None,
    engine: str,
    precision: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run a coordinator and its devices on this machine: a process per device folder, or many virtual devices."""
    wanted = flags.pop("devices")
    values = merge_flags(read_toml(file) if file else {}, flags)
    name = name or time.strftime("%Y%m%d-%H%M%S-fleet")
    if virtual is None:
        if engine != "onnx":
            raise ConfigError(f"--engine {engine} is for virtual devices: say how many with --virtual N")
        if ray:
            raise ConfigError("--ray is for virtual devices: say how many with --virtual N")
        if hosts:
            raise ConfigError("--hosts is for virtual devices: say how many with --virtual N")
        folders = device_folders(parts, wanted)
        threads = threads or max(1, usable_cores() // len(folders))
        outcome = run_fleet(folders, values, out=folder, run=name, threads=threads, quiet=as_json)
    else:
        if wanted is not None:
            raise ConfigError(f"--virtual {virtual} says how many devices there are; leave out --devices {wanted}")
        if engine != "onnx":
            if ray:
                raise ConfigError("--ray is for --engine onnx: engine torch has no processes of devices")
            outcome = _simulate(parts, virtual, values, folder, name, threads, engine, precision, quiet=as_json)
            _show(outcome, as_json)
            return
        if precision != "fp32":
            raise ConfigError(f"--precision {precision} is for --engine torch")
        threads = threads or 1
        with _cluster(ray) as cluster:
            if cluster is None:
                hosts = hosts or usable_cores()
            else:
                from fleet.clusters.hosts import check_hosts

                hosts = check_hosts(cluster, hosts, threads)
            outcome = run_virtual(
                parts,
                virtual,
                values,
                hosts=hosts,
                out=folder,
                run=name,
                threads=threads,
                quiet=as_json,
                cluster=cluster,
            )
    _show(outcome, as_json)


def _cluster(address: str | None) -> "AbstractContextManager[Cluster | None]":
    """The Ray cluster of that address; None where there is no address."""
    if address is None:
        return nullcontext()
    from fleet.clusters.cluster import connected

    return connected(address)


def _simulate(
    parts: Path,
    count: int,
    values: dict[str, Any],
    out: Path,
    run: str,
    threads: int | None,
    engine: str,
    precision: str,
    *,
    quiet: bool,
) -> FleetOutcome:
    """Virtual devices in this process, without a broker: see `fleet.simulate`."""
    from coordinator.rounds.display import Display, choose_display
    from fedvit.roles import ProductPrecision
    from fleet.simulate import Engine, simulate  # with torch: seconds that a mistyped flag need not wait

    given = {key: value for key, value in values.items() if key != "broker"}
    with Display() if quiet else choose_display() as display:
        return simulate(
            virtual_devices(parts, count),
            {"accelerator": "auto", **given},
            out=out,
            run=check_name(run, "run"),
            threads=threads or 1,
            display=display,
            engine=msgspec.convert(engine, Engine),
            precision=msgspec.convert(precision, ProductPrecision),
        )


def _show(outcome: FleetOutcome, as_json: bool) -> None:
    if as_json:
        click.echo(outcome_json(outcome))
        return
    print_run(outcome.summary)
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
