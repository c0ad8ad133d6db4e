"""Serving a deployment: its broker, its enrolment desk, and what must follow when somebody joins or is revoked."""

import contextlib
import fcntl
import logging
import os
import queue
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

from coordinator.broker.mosquitto import find_mosquitto, run_mosquitto
from coordinator.broker.process import Broker, claim_port
from coordinator.deployment.authority import DEVICE_DAYS
from coordinator.deployment.desk import Desk
from coordinator.deployment.folder import COORDINATOR, Deployment
from coordinator.deployment.misuse import Misuse, MisuseWatch
from coordinator.deployment.registry import Registry
from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.transport.base import Connected
from fedvit.transport.mqtt import Address, MqttTransport

log = logging.getLogger(__name__)

ANSWER_S = 5.0


class Service:
    """A deployment that is being served by this process. `watch` must be called often, from one thread."""

    def __init__(
        self, deployment: Deployment, broker: Broker | None, address: Address, desk: Desk, say: Callable[[str], None]
    ) -> None:
        self.broker = broker  # None: it runs by itself
        self.address = address
        self.revoked: SimpleQueue[str] = SimpleQueue()
        """Devices that were revoked while this process serves."""
        self._deployment = deployment
        self._desk = desk
        self._say = say
        self._stamp = deployment.registry.stamp()
        self._done = deployment.registry.read()
        self._misuse = MisuseWatch(broker.log_file) if broker else None
        self._report(self._done)

    def watch(self) -> None:
        """Start the broker again if it died, let it know what changed in the registry, and see to who misuses it."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._say(self._desk.news.get_nowait())
        if self.broker and (done := self.broker.tend()):
            self._say(f"broker: {done}")
        for misuse in self._misuse.look() if self._misuse else ():
            self._on_misuse(misuse)
        stamp = self._deployment.registry.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._apply(self._deployment.registry.read())

    def _apply(self, registry: Registry) -> None:
        before, self._done = self._done, registry
        if self.broker is None:
            if registry.generation != before.generation:
                self._say(_reload_theirs(self._deployment.run / "mosquitto.pid"))
        elif registry.cuts != before.cuts:
            self.broker.restart()
        elif registry.generation != before.generation:
            self.broker.reload()
        self._report(registry)
        for name, device in registry.devices.items():
            known = before.devices.get(name)
            if device.revoked_at is not None and (known is None or known.revoked_at is None):
                self._say(f"{name} was revoked")
                self.revoked.put(name)

    def _on_misuse(self, misuse: Misuse) -> None:
        """Count it for `coordinator devices`; revoke who keeps others from the broker."""
        name, what, shut_out = misuse
        if name == COORDINATOR:
            return
        with self._deployment.change() as registry:
            device = registry.devices.get(name)
            if device is None or device.revoked_at is not None:
                return
            device.misuses += 1
            if shut_out:
                self._deployment.revoke(registry, device)
        log.warning("broker misused", extra={"device": name, "reason": what})
        remedy = "it is shut out" if shut_out else f"to shut it out: coordinator revoke {name}"
        self._say(f"{name} {what}; {remedy}")

    def _report(self, registry: Registry) -> None:
        """For `coordinator revoke`, which waits for it."""
        atomic_write(self._deployment.run / "applied", str(registry.generation).encode())


@contextlib.contextmanager
def served(
    deployment: Deployment,
    say: Callable[[str], None],
    *,
    broker: Address | None = None,
    device_days: float = DEVICE_DAYS,
) -> Iterator[Service]:
    """Serve a deployment till the end of the block, and alone.

    Without `broker` mosquitto is started, unless one runs with this deployment's configuration already. Raises
    ConfigError when another process serves it, there is no mosquitto, or its port is taken.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(deployment))
        deployment.write_configuration()
        own = None if broker else _start(deployment)
        if own:
            stack.callback(own.stop)
        address = broker or deployment.address
        desk = Desk(deployment, address, device_days=device_days)
        service = Service(deployment, own, address, desk, say)
        desk.open()
        stack.callback(desk.close)
        yield service


def is_served(deployment: Deployment) -> bool:
    """Whether a process serves this deployment now."""
    try:
        with _alone(deployment):
            return False
    except ConfigError:
        return True


def applied_generation(deployment: Deployment) -> int:
    """What the process that serves it has done last; -1 when there never was one."""
    try:
        return int((deployment.run / "applied").read_text())
    except (OSError, ValueError):
        return -1


@contextlib.contextmanager
def _alone(deployment: Deployment) -> Iterator[None]:
    handle = os.open(deployment.run / "served", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode().strip()
            raise ConfigError(f"{deployment.folder} is being served by process {owner}") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _start(deployment: Deployment) -> Broker | None:
    """mosquitto with the deployment's configuration; None when one runs already."""
    address, settings = deployment.address, deployment.settings
    try:
        claim_port(settings.listen, settings.port)
    except ConfigError:
        if _lets_in(address):
            return None
        raise
    claim_port(settings.listen, settings.enrolment_port)
    program = find_mosquitto()
    if program is None:
        raise ConfigError(
            "mosquitto was not found on this machine, and the embedded broker cannot ask for certificates: "
            "sudo apt-get install mosquitto"
        )
    return run_mosquitto(program, deployment.configuration, address, deployment.run / "mosquitto.log")


def _lets_in(address: Address) -> bool:
    """Whether a broker is there that this deployment's authority vouches for, and that knows the coordinator."""
    inbox: SimpleQueue[object] = SimpleQueue()
    transport = MqttTransport(inbox, address, client_id=f"preflight-{secrets.token_hex(4)}")
    transport.open()
    try:
        return isinstance(inbox.get(timeout=ANSWER_S), Connected)
    except queue.Empty:
        return False
    finally:
        transport.close()


def _reload_theirs(pid_file: Path) -> str:
    """Ask a mosquitto that we did not start to read its lists anew; the answer is for people."""
    try:
        pid = int(pid_file.read_text())
        if "mosquitto" not in Path(f"/proc/{pid}/comm").read_text():
            raise ProcessLookupError
        os.kill(pid, signal.SIGHUP)
    except (OSError, ValueError):
        return "broker: reload it now (systemctl reload mosquitto, or kill -HUP): who may come in has changed"
    return f"broker: mosquitto, process {pid}, was told who may come in"
