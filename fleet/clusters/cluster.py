"""Connects to a Ray cluster: an existing one, or one on this machine for the time of a command."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from fedvit.errors import ConfigError, FedvitError, LinkDown
from fleet.clusters.programs import Files, ProgramJob, ProgramReport, run_program
from fleet.clusters.resources import Resources, capacity
from fleet.processes import last_line_of
from profiles.probes.host import usable_cores

LOCAL = "local"
ANSWER_S = 10.0
"""Longest wait for an answer at the address of a cluster."""
NODES_SEEN_S = 2.0
"""Time for which the list of nodes is cached."""


def _ray() -> Any:
    """Import the package. Raises ConfigError if the extra is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError("FV2114", "--ray needs the package ray: pip install 'fedvit[ray]'") from None
    return ray


@contextmanager
def connect(address: str) -> Iterator["Cluster"]:
    """Connect to the cluster at HOST:PORT, or start one on this machine, "local", that ends with the block.

    Ray runs what it is sent, so both sides show a token (RAY_AUTH_MODE=token, unless the environment says otherwise):
    Ray reads that of a cluster from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, and a local cluster gets
    a new one. Inside of the block nothing is printed on standard output. Raises ConfigError or LinkDown if no cluster
    can be used.
    """
    settings = {"RAY_AUTH_MODE": "token", "RAY_NUM_REDIS_GET_RETRIES": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)} if address == LOCAL else {}
    for name, value in settings.items():  # Ray reads them when it is imported
        os.environ.setdefault(name, value)
    ray = _ray()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # Ray prints what happens to nodes
        _start(ray, address)
        try:
            yield Cluster(ray)
        finally:
            ray.shutdown()


def _start(ray: Any, address: str) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": True, "logging_level": "CRITICAL"}
    if address == LOCAL:
        try:
            ray.init(address="local", num_cpus=usable_cores(), include_dashboard=False, **quiet)
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            raise FedvitError(
                "FV2115", f"--ray local: Ray does not start on this machine: {_first_line(error)}"
            ) from error
        return
    _check_answers(ray, address)
    try:
        ray.init(address=address, **quiet)
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(
            "FV2116",
            f"--ray {address}: the cluster does not know our token ({_first_line(error)}); copy ~/.ray/auth_token of "
            "its head to this machine, or set RAY_AUTH_TOKEN; for a cluster without tokens set RAY_AUTH_MODE=disabled",
        ) from error
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if "ersion mismatch" in str(error):
            reason = " ".join(str(error).split())
            raise ConfigError(
                "FV2117",
                f"--ray {address}: this is Ray {ray.__version__} under Python {sys.version.split()[0]}, and the "
                f"cluster runs others; install the same on all machines ({reason[:300]})",
            ) from error
        raise LinkDown(
            "FV2115",
            f"--ray {address}: no cluster that this machine is a node of ({_first_line(error)}); make it one with "
            f"`ray start --address {address} --num-cpus 0`, and see that all have the same token",
        ) from error


def _check_answers(ray: Any, address: str) -> None:
    """Raises ConfigError or LinkDown within seconds; Ray itself would retry for many minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError("FV2115", f"--ray {address!r}: expected HOST:PORT of the head of a Ray cluster, or {LOCAL}")
    if host in ("localhost", "127.0.0.1"):
        host = ray.util.get_node_ip_address()  # Ray uses this address instead
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LinkDown(
            "FV2115",
            f"--ray {address}: no answer from {host}:{port} ({reason}); start a cluster with `ray start --head "
            f"--port {port}`, or use --ray {LOCAL}",
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class Cluster:
    """A connected cluster."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self._task = ray.remote(num_returns="streaming", max_retries=0)(_run_here)
        self._actor = ray.remote(max_restarts=0, max_task_retries=0)(_HostActor)
        self._nodes: dict[str, Resources] = {}
        self._nodes_at = -NODES_SEEN_S

    def nodes(self) -> dict[str, Resources]:
        """The resources of the nodes that are alive, by address."""
        if time.monotonic() - self._nodes_at >= NODES_SEEN_S:
            self._nodes_at = time.monotonic()
            self._nodes = {}
            for number, node in enumerate(node for node in self.ray.nodes() if node["Alive"]):
                resources = node["Resources"]
                name = node["NodeManagerAddress"]
                self._nodes[name if name not in self._nodes else f"{name} ({number})"] = Resources(
                    resources.get("CPU", 0.0), resources.get("GPU", 0.0), int(resources.get("memory", 0))
                )
        return self._nodes

    def lack_of(self, needs: Resources) -> str | None:
        """A message if no node has these resources; None if one has."""
        nodes = self.nodes()
        if any(needs.fits(node) for node in nodes.values()):
            return None
        shares = "; ".join(f"{name}: {node}" for name, node in nodes.items()) or "none"
        return f"no node of the cluster has {needs}; nodes are {shares}"

    def at_once(self, needs: Sequence[Resources]) -> int:
        """Count the smallest of these programs that can run at the same time."""
        return sum(max((capacity(node, each) for each in set(needs)), default=0) for node in self.nodes().values())

    def run(self, job: ProgramJob, parts: Any, work: Files, needs: Resources) -> Any:
        """Run a program as a task on some node; `parts` is a reference to Files by `ray.put`. Returns its reports."""
        return self._task.options(
            name=job.name, num_cpus=needs.num_cpus, num_gpus=needs.num_gpus, memory=needs.memory_bytes or None
        ).remote(job, parts, self.ray.put(work))

    def host(self, job: ProgramJob, parts: Any, work: Files, needs: Resources) -> tuple[Any, Any]:
        """Run a program in a named actor on some node; the actor and its reports."""
        actor = self._actor.options(
            name=job.name, num_cpus=needs.num_cpus, num_gpus=needs.num_gpus, memory=needs.memory_bytes or None
        ).remote()
        return actor, actor.run.options(num_returns="streaming").remote(job, parts, self.ray.put(work))


def _run_here(job: ProgramJob, parts: Files, work: Files) -> Iterator[ProgramReport]:
    import ray

    yield from run_program(job, parts, work, ray.util.get_node_ip_address())


class _HostActor:
    """A host of virtual devices."""

    def run(self, job: ProgramJob, parts: Files, work: Files) -> Iterator[ProgramReport]:
        yield from _run_here(job, parts, work)


class NodeLost(Exception):
    """The node of a program, or Ray's worker for it, was lost."""


class Reports:
    """Iterates over the reports of a program on the cluster, without waiting."""

    def __init__(self, ray: Any, reports: Any) -> None:
        self._ray = ray
        self._reports = reports

    def __iter__(self) -> Iterator[ProgramReport]:
        """The new reports. Raises NodeLost, and FedvitError when the program cannot be run at all."""
        exceptions = self._ray.exceptions
        while self._ray.wait([self._reports], timeout=0)[0]:
            try:
                yield self._ray.get(next(self._reports), timeout=60)
            except StopIteration:
                raise NodeLost("it ended without a report") from None
            except exceptions.OutOfMemoryError:
                raise FedvitError(
                    "FV2120",
                    "its node ran out of memory, and Ray ended it; ask for more `memory` or `num_cpus` in [ray], so "
                    "that fewer programs share a node",
                ) from None
            except exceptions.RayTaskError as error:
                raise FedvitError("FV2120", f"it could not be run on its node: {last_line_of(str(error))}") from None
            except exceptions.RayError as error:
                raise NodeLost(_first_line(error)) from None
