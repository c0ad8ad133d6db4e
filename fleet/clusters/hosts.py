"""Hosts of virtual devices as actors of a Ray cluster."""

import socket
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coordinator.config import BrokerConfig
from fedvit.errors import ConfigError, FedvitError
from fleet.clusters.cluster import Cluster, NodeLost, Reports
from fleet.clusters.programs import ProgramJob, pack, unpack
from fleet.clusters.resources import Resources

LOST = -9
"""Exit code of a host whose node was lost: that of a killed process."""


class HostsOnRay:
    """Hosts on nodes, with the interface of `fleet.processes.Fleet`. Use it as a context manager.

    The state of a host's devices is copied back to `states/HOST` every few seconds. A restarted host continues from the
    copy on any node; it requests no cores, since the cluster has lost those of its first node.
    """

    def __init__(self, cluster: Cluster, parts: Path, states: Path, *, threads: int) -> None:
        self._cluster = cluster
        self._parts = cluster.ray.put(pack(parts))
        self._states = states
        self._needs = Resources(threads, 0, 0)
        self._hosts: dict[str, _Host] = {}

    def __enter__(self) -> "HostsOnRay":
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():
            host.stop()

    def start(
        self, name: str, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a host, or start it again; `command` are the arguments of `fleet host`, with paths as on a node."""
        job = ProgramJob(
            name, "fleet.commands.host", tuple(command), progress=None, software=version("fedvit"),
            environment=dict(environment or {}),
        )  # fmt: skip
        folder = self._states / name
        work = pack(folder) if folder.is_dir() else {}
        needs = Resources(0, 0, 0) if name in self._hosts else self._needs
        actor, reports = self._cluster.host(job, self._parts, work, needs)
        self._hosts[name] = _Host(actor, Reports(self._cluster.ray, reports), self._cluster.ray, folder, log)

    def exit_codes(self) -> dict[str, int]:
        """Exit codes of the hosts that have ended, by name."""
        return {name: code for name, host in self._hosts.items() if (code := host.poll()) is not None}

    def wait(self, names: Sequence[str], timeout_s: float) -> bool:
        """Wait; return True if all of `names` ended by themselves within the time."""
        until = time.monotonic() + timeout_s
        while not (over := set(names) <= self.exit_codes().keys()) and time.monotonic() < until:
            time.sleep(0.1)
        return over


class _Host:
    """One actor, and the files that were copied back."""

    def __init__(self, actor: Any, reports: Reports, ray: Any, folder: Path, log: Path) -> None:
        self._actor = actor
        self._reports = reports
        self._ray = ray
        self._folder = folder
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._earlier_log = log.read_bytes() if log.is_file() else b""
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                for report in self._reports:
                    if report.files is not None:
                        unpack(report.files, self._folder)
                    if report.log:
                        self._log.write_bytes(self._earlier_log + report.log)
                    self._code = report.code
            except (FedvitError, NodeLost) as error:
                self._code = LOST if isinstance(error, NodeLost) else 1
                with open(self._log, "a") as log:
                    log.write(f"{error}\n")
            if self._code is not None:
                self.stop()
        return self._code

    def stop(self) -> None:
        self._ray.kill(self._actor)


def check_hosts(cluster: Cluster, hosts: int | None, threads: int) -> int:
    """The number of hosts with `threads` threads each, by default as many as fit. Raises ConfigError."""
    needs = Resources(threads, 0, 0)
    if why := cluster.lack_of(needs):
        raise ConfigError("FV2119", f"--threads {threads}: {why}")
    most = cluster.at_once([needs])
    if hosts is not None and hosts > most:
        raise ConfigError(
            "FV2119", f"--hosts {hosts} of {needs} each, but the cluster has room for {most}: give --hosts {most}"
        )
    return hosts or most


def find_broker_host(cluster: Cluster, broker: BrokerConfig) -> str:
    """The host at which the nodes reach the run's own broker. Raises ConfigError where they cannot."""
    if broker.listen in ("0.0.0.0", "::"):
        return str(cluster.ray.util.get_node_ip_address())
    others = [name for name in cluster.nodes() if not _is_here(name)]
    if others and broker.listen in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            "FV2121",
            f"nodes {', '.join(others)} are other machines and do not reach a broker on {broker.listen}: set "
            "`listen` and `password` of [broker], or name a broker that all reach with --broker",
        )
    return broker.listen


def _is_here(address: str) -> bool:
    try:
        with socket.socket() as probe:
            probe.bind((address.split()[0], 0))
    except OSError:
        return False
    return True
