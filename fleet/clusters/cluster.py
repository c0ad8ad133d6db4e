"""The way to a Ray cluster: one that is there, or one on this machine for as long as a command runs."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from fedvit.errors import ConfigError, FedvitError, LinkDown
from fleet.clusters.programs import Files, Order, Report, run_program
from fleet.clusters.resources import Resources, places
from profiles.probes.host import usable_cores

LOCAL = "local"
ANSWER_S = 10.0
"""Patience with the address of a cluster."""
NODES_SEEN_S = 2.0
"""For so long the list of nodes is taken to be right."""


def _ray() -> Any:
    """The package. Raises ConfigError where the extra is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs the package ray: pip install 'fedvit[ray]'") from None
    return ray


@contextmanager
def connected(address: str) -> Iterator["Cluster"]:
    """The cluster at HOST:PORT, or with "local" one on this machine that ends with the block.

    Ray runs what it is sent, so both sides show a token (RAY_AUTH_MODE=token, unless the environment says otherwise):
    that of a cluster is found by Ray in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, a local cluster gets
    one of its own. Within the block nothing is printed on standard output. Raises ConfigError or LinkDown where there
    is no cluster that can be used.
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
            raise FedvitError(f"--ray local: Ray does not start on this machine: {_first_line(error)}") from error
        return
    _check_answers(ray, address)
    try:
        ray.init(address=address, **quiet)
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(
            f"--ray {address}: the cluster does not know our token ({_first_line(error)}); copy ~/.ray/auth_token of "
            "its head to this machine, or set RAY_AUTH_TOKEN; for a cluster without tokens set RAY_AUTH_MODE=disabled"
        ) from error
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if "ersion mismatch" in str(error):
            there = " ".join(str(error).split())
            raise ConfigError(
                f"--ray {address}: this is Ray {ray.__version__} under Python {sys.version.split()[0]}, and the "
                f"cluster runs others; install the same on all machines ({there[:300]})"
            ) from error
        raise LinkDown(
            f"--ray {address}: no cluster that this machine is a node of ({_first_line(error)}); make it one with "
            f"`ray start --address {address} --num-cpus 0`, and see that all have the same token"
        ) from error


def _check_answers(ray: Any, address: str) -> None:
    """Raises ConfigError or LinkDown, soon: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(f"--ray {address!r}: expected HOST:PORT of the head of a Ray cluster, or {LOCAL}")
    if host in ("localhost", "127.0.0.1"):
        host = ray.util.get_node_ip_address()  # where Ray will look instead
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LinkDown(
            f"--ray {address}: nobody answers at {host}:{port} ({reason}); start a cluster with `ray start --head "
            f"--port {port}`, or use --ray {LOCAL}"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class Cluster:
    """What is done with a cluster that one is connected to."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self._task = ray.remote(num_returns="streaming", max_retries=0)(_run_here)
        self._actor = ray.remote(max_restarts=0, max_task_retries=0)(_HostActor)
        self._nodes: dict[str, Resources] = {}
        self._nodes_at = -NODES_SEEN_S

    def nodes(self) -> dict[str, Resources]:
        """The nodes that are there, by address, with all that each has."""
        if time.monotonic() - self._nodes_at >= NODES_SEEN_S:
            self._nodes_at = time.monotonic()
            self._nodes = {}
            for number, node in enumerate(node for node in self.ray.nodes() if node["Alive"]):
                there = node["Resources"]
                name = node["NodeManagerAddress"]
                self._nodes[name if name not in self._nodes else f"{name} ({number})"] = Resources(
                    there.get("CPU", 0.0), there.get("GPU", 0.0), int(there.get("memory", 0))
                )
        return self._nodes

    def why_nowhere(self, wanted: Resources) -> str | None:
        """What to say where no node has what is wanted; None where one has."""
        nodes = self.nodes()
        if any(wanted.fits(node) for node in nodes.values()):
            return None
        there = "; ".join(f"{name}: {node}" for name, node in nodes.items()) or "none"
        return f"no node of the cluster has {wanted}; nodes are {there}"

    def at_once(self, wanted: Sequence[Resources]) -> int:
        """How many programs can run at the same time, of those that need least."""
        return sum(max(places(node, each) for each in set(wanted)) for node in self.nodes().values())

    def run(self, order: Order, parts: Any, work: Files, wanted: Resources) -> Any:
        """A task that runs a program on some node; `parts` is what `ray.put` made of Files. Gives its reports."""
        return self._task.options(
            name=order.name, num_cpus=wanted.num_cpus, num_gpus=wanted.num_gpus, memory=wanted.memory_bytes or None
        ).remote(order, parts, self.ray.put(work))

    def host(self, order: Order, parts: Any, work: Files, wanted: Resources) -> tuple[Any, Any]:
        """An actor of that name that runs a program on some node, and its reports."""
        actor = self._actor.options(
            name=order.name, num_cpus=wanted.num_cpus, num_gpus=wanted.num_gpus, memory=wanted.memory_bytes or None
        ).remote()
        return actor, actor.run.options(num_returns="streaming").remote(order, parts, self.ray.put(work))


def _run_here(order: Order, parts: Files, work: Files) -> Iterator[Report]:
    import ray

    yield from run_program(order, parts, work, ray.util.get_node_ip_address())


class _HostActor:
    """A host of virtual devices."""

    def run(self, order: Order, parts: Files, work: Files) -> Iterator[Report]:
        yield from _run_here(order, parts, work)


class Lost(Exception):
    """The node of a program, or the worker that watched it, is gone."""


class Reports:
    """What a program on the cluster reported, without waiting."""

    def __init__(self, ray: Any, reports: Any) -> None:
        self._ray = ray
        self._reports = reports

    def __iter__(self) -> Iterator[Report]:
        """Those that are there and were not seen. Raises Lost, and FedvitError where it cannot be run at all."""
        exceptions = self._ray.exceptions
        while self._ray.wait([self._reports], timeout=0)[0]:
            try:
                yield self._ray.get(next(self._reports), timeout=60)
            except StopIteration:
                raise Lost("it ended without a word") from None
            except exceptions.OutOfMemoryError:
                raise FedvitError(
                    "its node ran out of memory, and Ray ended it; ask for more `memory` or `num_cpus` in [ray], so "
                    "that fewer programs share a node"
                ) from None
            except exceptions.RayTaskError as error:
                raise FedvitError(f"it could not be run on its node: {_last_line(str(error))}") from None
            except exceptions.RayError as error:
                raise Lost(_first_line(error)) from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
