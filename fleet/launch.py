"""Runs of real programs on this machine: a coordinator, and a process per device or hosts of virtual devices."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec

from coordinator.compute.planning.checks import checked_config
from coordinator.config import BrokerConfig, StartConfig, with_listen_port
from coordinator.record.record import open_record
from coordinator.run_view import read_run
from coordinator.security.broker.process import FLEET_USER, claim_port
from edge_client.commands.options import BROKER_VARIABLE
from fedvit.errors import FedvitError
from fedvit.files import private_files
from fedvit.wire.topics import check_name
from fleet.clusters.cluster import Cluster
from fleet.clusters.hosts import HostsOnRay, find_broker_host
from fleet.processes import Fleet, last_line, program
from fleet.request import LONG_DEADLINE_S, RunOutcome, RunRequest

DEVICES_LEAVE_S = 30.0
"""Time for devices to leave after the run; a device that was not connected then never hears of its end."""
MAX_RESTARTS = 3
"""Times that a process of virtual devices is started again when it was killed."""
VIRTUAL_DEFAULTS: dict[str, Any] = {"deadline_s": LONG_DEADLINE_S}
"""Defaults of runs on virtual devices that differ from those on real ones."""


class VirtualFleet(NamedTuple):
    """Processes that host the virtual devices of a request."""

    parts: Path
    hosts: int  # processes
    cluster: Cluster | None = None  # on whose nodes they run; None: this machine


class DeviceProcesses(Protocol):
    """Starts the processes of devices, as `Fleet` does."""

    def start(
        self, name: str, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
    ) -> object: ...

    def exit_codes(self) -> dict[str, int]: ...

    def wait(self, names: Sequence[str], timeout_s: float) -> bool: ...


class Launch(NamedTuple):
    """A checked configuration, and the commands of the devices."""

    config: StartConfig
    home: Path
    commands: Mapping[str, Sequence[str]]
    is_quiet: bool
    restarts: int  # of a process that was killed


def run_fleet(request: RunRequest, *, is_quiet: bool = False) -> RunOutcome:
    """Run one configuration with a process per device until it is finished; all processes have ended afterwards.

    Logs of devices are in `out/run/devices`, their states in `out/run/state`. Raises FedvitError when the run failed.
    """
    config = _check(request, {})
    home = request.home
    commands = {
        name: [
            *program("edge_client.cli"), "--data", str(folder), "--id", name,
            "--state", str(home / "state" / name), "--threads", str(request.threads),
            "--federation", config.run.federation, "--once",
            "--features", "any", "--class-counts",  # the images are the operator's own
        ]
        for name, folder in request.folders.items()
    }  # fmt: skip
    return run_processes(Launch(config, home, commands, is_quiet, restarts=0))


def run_virtual(request: RunRequest, virtual: VirtualFleet, *, is_quiet: bool = False) -> RunOutcome:
    """Run one configuration on virtual devices in processes that are started again when they are killed.

    The settings override VIRTUAL_DEFAULTS. Logs of hosts are in `out/run/devices`. Hosts on a cluster copy their states
    back to `out/run/state`. Raises FedvitError when the run failed.
    """
    config = _check(request, VIRTUAL_DEFAULTS)
    states = request.home / "state"
    if virtual.cluster is None:
        commands = {
            name: [*program("fleet.commands.host"), *arguments]
            for name, arguments in _host_arguments(request, virtual, config, virtual.parts, states).items()
        }
        return run_processes(Launch(config, request.home, commands, is_quiet, MAX_RESTARTS))
    port = config.broker.port or claim_port()
    address = None
    if _has_own_broker(config):
        address = _own_broker(config.broker, find_broker_host(virtual.cluster, config.broker), port)
    config = msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, port=port))
    on_node = _host_arguments(request, virtual, config, Path("parts"), Path("work"))
    commands = {name: [*arguments, "--at-once", "1"] for name, arguments in on_node.items()}
    with HostsOnRay(virtual.cluster, virtual.parts, states, threads=request.threads) as hosts:
        return run_processes(Launch(config, request.home, commands, is_quiet, MAX_RESTARTS), hosts, address)


def _check(request: RunRequest, defaults: Mapping[str, Any]) -> StartConfig:
    """Check the request; its broker takes a free port if none is set, since only its devices connect."""
    values = {**request.settings}
    broker = values.get("broker", {})
    if isinstance(broker, dict):  # the check of the configuration refuses anything else
        values["broker"] = {"port": 0, **with_listen_port(broker, "broker")}
    config = checked_config({**defaults, **values, "devices": len(request.devices)}, "run")
    check_name(request.run, "run")
    return config


def _host_arguments(
    request: RunRequest, virtual: VirtualFleet, config: StartConfig, parts: Path, states: Path
) -> dict[str, list[str]]:
    """Arguments of `fleet host` by the name of each host."""
    count = len(request.devices)
    return {
        f"host-{number}": [
            "--parts", str(parts), "--devices", str(count), "--number", str(number),
            "--hosts", str(virtual.hosts), "--state", str(states), "--threads", str(request.threads),
            "--federation", config.run.federation, "--once",
        ]
        for number in range(min(virtual.hosts, count))
    }  # fmt: skip


def _has_own_broker(config: StartConfig) -> bool:
    """Return True if the coordinator starts the broker."""
    return config.broker.broker in ("auto", "mosquitto", "embedded")


def _own_broker(broker: BrokerConfig, host: str, port: int) -> str:
    """Address of the broker that the coordinator starts, with its password, for devices that reach it at `host`."""
    password = broker.password or os.environ.get("FEDVIT_BROKER_PASSWORD")
    secret = f"{FLEET_USER}:{quote(password, safe='')}@" if password else ""
    return f"mqtt://{secret}{f'[{host}]' if ':' in host else host}:{port}"


@private_files()
def run_processes(launch: Launch, devices: DeviceProcesses | None = None, address: str | None = None) -> RunOutcome:
    """Start a coordinator and the processes of the devices; wait for the run's end.

    The processes are started by `devices`, by default on this machine, and find the broker at `address`, by default
    the address on this machine.
    """
    config, home = launch.config, launch.home
    own = _has_own_broker(config)
    port = config.broker.port or claim_port()
    home.mkdir(parents=True, exist_ok=True)
    file = home / "run.toml"
    file.write_bytes(msgspec.toml.encode(_as_toml(config, port)))
    began = time.monotonic()
    with Fleet() as fleet:
        command = [*program("coordinator.cli"), "start", "--config", str(file), "--runs", str(home.parent)]
        quiet = ["--quiet"] if launch.is_quiet else []
        coordinator = fleet.start("coordinator", [*command, "--run", home.name, *quiet])
        host = {"0.0.0.0": "127.0.0.1"}.get(config.broker.listen, config.broker.listen)
        address = address or (_own_broker(config.broker, host, port) if own else config.broker.broker)
        processes = _DeviceProcesses(devices or fleet, launch, address)
        # the coordinator loads torch first; a device that came earlier would find no broker, and wait to try again
        while own and coordinator.poll() is None and not _is_listening(host, port):
            time.sleep(0.1)
        processes.start_all()
        while coordinator.poll() is None:
            time.sleep(0.1)
            processes.restart_killed()
        if coordinator.returncode != 0:
            raise FedvitError(
                "FV1218", f"the coordinator ended with code {coordinator.returncode}; its log: {home}/coordinator.log"
            )
        seconds = time.monotonic() - began
        processes.wait()
    with open_record(home.parent) as store:
        return RunOutcome(read_run(store, home.name), seconds, home)


class _DeviceProcesses:
    """The processes of a run's devices."""

    def __init__(self, devices: DeviceProcesses, launch: Launch, address: str) -> None:
        self._devices, self._launch = devices, launch
        self._environment = {BROKER_VARIABLE: address}
        self._restarts = dict.fromkeys(launch.commands, launch.restarts)

    def start_all(self) -> None:
        """Start all processes."""
        for name in self._launch.commands:
            self._start(name)

    def restart_killed(self) -> None:
        """Start killed processes again, as a real device starts again. Raises FedvitError for any other end."""
        for name, code in self._devices.exit_codes().items():
            if name not in self._restarts or code == 0:
                continue
            if code > 0 or not self._restarts[name]:
                raise FedvitError("FV1218", f"{name} ended with code {code}: {last_line(self._log(name))}")
            self._restarts[name] -= 1
            self._start(name)

    def wait(self) -> None:
        """Wait until the devices have left."""
        self._devices.wait(list(self._launch.commands), DEVICES_LEAVE_S)

    def _start(self, name: str) -> None:
        command = self._launch.commands[name]
        self._devices.start(name, command, self._log(name), environment=self._environment)

    def _log(self, name: str) -> Path:
        return self._launch.home / "devices" / f"{name}.log"


def _is_listening(host: str, port: int) -> bool:
    """Return True if a program listens at this address."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _as_toml(config: StartConfig, port: int) -> dict[str, Any]:
    run, broker = (_without_none(msgspec.to_builtins(part)) for part in (config.run, config.broker))
    return {**run, "broker": {**broker, "port": port}}


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out None, which TOML does not have; in nested tables, too."""
    inner = {key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in inner.items() if value is not None}
