"""Serves a deployment: its broker, its enrolment service, and the consequences of joins and revocations.

mosquitto reloads its lists at SIGHUP, but keeps open connections. Of two connections with the same client id it closes
the older one. So the coordinator connects once under each client id of a revoked device, which ends the connections of
that device at once, and of no other.
"""

import contextlib
import logging
import math
import os
import queue
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue

from coordinator.security.authority import DEVICE_DAYS
from coordinator.security.broker.mosquitto import find_mosquitto, run_mosquitto
from coordinator.security.broker.process import Broker, claim_port
from coordinator.security.broker_log import BrokerLog, Misuse
from coordinator.security.enrolment import EnrolmentService
from coordinator.security.expiry import CertificateEnds, read_certificate_ends
from coordinator.security.folder import COORDINATOR, Deployment
from coordinator.security.serving_lock import exclusively_served
from coordinator.security.tending import Tending
from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.hints import command
from fedvit.transport.address import Address
from fedvit.transport.base import Connected
from fedvit.transport.mqtt import MqttTransport

log = logging.getLogger(__name__)

ANSWER_S = 5.0
RELOAD_S = 5.0
"""If a device was revoked, a broker that has not reloaded its lists after this time is restarted."""


class Service:
    """A deployment served by this process. `watch` must be called often, from one thread."""

    def __init__(
        self,
        deployment: Deployment,
        broker: Broker | None,
        address: Address,
        enrolment: EnrolmentService,
        operator_log: Callable[[str], None],
        *,
        applied: int,
        trusted: bytes,
    ) -> None:
        """`applied` is the generation of the registry before the broker was started, `trusted` are the authorities."""
        self.broker = broker  # None: it is not started by this process
        self.address = address
        self.signer = deployment.find_signer()
        self.revoked: SimpleQueue[str] = SimpleQueue()
        """Devices that were revoked while this process serves."""
        self._deployment = deployment
        self._enrolment = enrolment
        self._operator_log = operator_log
        self._log = BrokerLog(broker.log_file, broker.log_position) if broker else None
        self._tending = Tending(deployment, operator_log, restarts=broker is not None)
        self._applied = self._applying = applied
        self._trusted = trusted
        self._revoking: list[str] = []  # devices with certificates that are being revoked
        self._apply_until = math.inf
        self._report()

    def watch(self) -> None:
        """Restart the broker if it died, let it reload changed lists, and handle misuse by devices."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._operator_log(self._enrolment.news.get_nowait())
        if self.broker and self._log:
            for misuse in self._log.look():
                self._on_misuse(misuse)
            if done := self.broker.tend():
                self._operator_log(f"broker: {done}")
            self._end_connections(self.broker, self._log)
        if self._applying != self._applied:
            self._look_after_reload()
        elif self._deployment.registry.generation() != self._applied:
            self._tending.settle()
            self._apply()
        self._tending.tend()

    def note_seen(self, seen: Mapping[str, float]) -> None:
        """Store when devices were last seen, in monotonic time."""
        to_wall_s = time.time() - time.monotonic()
        self._enrolment.note_seen({name: at + to_wall_s for name, at in seen.items()})

    def all_revoked(self) -> list[str]:
        """Devices that are revoked now."""
        with self._deployment.registry.read() as rows:
            return rows.revocations.list_devices()

    def read_certificate_ends(self) -> CertificateEnds:
        """Return when the certificates of the deployment end."""
        return read_certificate_ends(self._deployment)

    def _apply(self) -> None:
        """Let the broker reload its lists and certificates, which were written before the generation increased.

        It reads the authorities that it trusts only when it starts.
        """
        with self._deployment.registry.read() as rows:
            self._applying = rows.generation()
            self._revoking = rows.revocations.list_since(self._applied)
        # read after the generation: a rotation in between is applied now, never missed
        former, self._trusted = self._trusted, self._deployment.authority_file.read_bytes()
        if self.broker is None or self._log is None:
            if self._trusted != former:
                self._operator_log("broker: restart mosquitto now: the authorities that it trusts have changed")
            else:
                self._operator_log(_reload_theirs(self._deployment.run / "mosquitto.pid"))
            self._on_applied()
        elif self._trusted != former:
            self._restart(self.broker, "the authorities that it trusts have changed")
        elif self._revoking and self._log.overlooked:
            self._restart(self.broker, "the id of a client hides its device")
        else:
            self._log.expect_reload(self._revoking)
            self._apply_until = time.monotonic() + RELOAD_S
            self.broker.reload()

    def _look_after_reload(self) -> None:
        assert self.broker is not None
        assert self._log is not None
        if not self.broker.up:
            return  # it reads its lists when it starts
        if self._log.has_reloaded and not self._log.to_end:
            self._on_applied()
        elif time.monotonic() > self._apply_until:
            if self._revoking:
                self._restart(self.broker, f"it did not read its lists within {RELOAD_S:.0f} s")
            else:
                self._on_applied()

    def _end_connections(self, broker: Broker, broker_log: BrokerLog) -> None:
        """End the connections of revoked or replaced devices; the log confirms it afterwards."""
        ending = broker_log.to_end.copy()
        if not ending or not broker.up:
            return
        if _take_over(self.address, ending):
            broker_log.to_end -= ending
        else:
            self._restart(broker, "it did not end the connections of a device that was shut out")

    def _restart(self, broker: Broker, why: str) -> None:
        """The last resort: ends all connections; permitted devices reconnect."""
        self._operator_log(f"broker: {why}; it {broker.restart()}")
        self._on_applied()

    def _on_applied(self) -> None:
        with self._deployment.registry.read() as rows:
            devices = [rows.find_device(name) for name in self._revoking]
        self._applied = self._applying
        self._report()
        for device in devices:
            if device is not None and device.revoked_at is not None:  # otherwise another one has taken its place
                self._operator_log(f"{device.name} was revoked")
                self.revoked.put(device.name)
        self._revoking = []

    def shut_out(self, device: str, reason: str) -> None:
        """Revoke a device that harms others; `watch` then ends its connections."""
        self._on_misuse(Misuse(device, reason, shut_out=True))

    def _on_misuse(self, misuse: Misuse) -> None:
        """Count misuse for `coordinator devices`; revoke devices that harm other clients."""
        name, what, shut_out = misuse
        if name == COORDINATOR:
            return
        with self._deployment.change() as rows:
            device = rows.find_device(name)
            if device is None or device.revoked_at is not None:
                return
            rows.count_misuse(name)
            if shut_out:
                rows.revocations.revoke(name, time.time())
        log.warning("broker misused", extra={"device": name, "reason": what})
        revoke = command("coordinator", "revoke", name, deployment=self._deployment.folder)
        remedy = "it is shut out" if shut_out else f"to shut it out: {revoke}"
        self._operator_log(f"{name} {what}; {remedy}")

    def _report(self) -> None:
        """Write the applied generation, for which `coordinator revoke` waits."""
        atomic_write(self._deployment.run / "applied", str(self._applied).encode())


@contextlib.contextmanager
def served(
    deployment: Deployment,
    operator_log: Callable[[str], None],
    *,
    broker: Address | None = None,
    device_days: float = DEVICE_DAYS,
    for_now: bool = False,
) -> Iterator[Service]:
    """Serve a deployment within the block, as its only process; `for_now`: until another one wants to.

    Without `broker`, mosquitto is started, unless one already runs with this deployment's configuration. Raises
    ConfigError if another process serves it, mosquitto is missing, or its port is taken.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusively_served(deployment.folder, for_now=for_now))
        deployment.write_configuration()
        applied, trusted = deployment.registry.generation(), deployment.authority_file.read_bytes()
        own = None if broker else _start(deployment, operator_log)
        if own:
            stack.callback(own.stop)
        address = broker or deployment.address
        enrolment = EnrolmentService(deployment, address, device_days=device_days)
        service = Service(deployment, own, address, enrolment, operator_log, applied=applied, trusted=trusted)
        enrolment.open()
        stack.callback(enrolment.close)
        yield service


def is_served(deployment: Deployment) -> bool:
    """Return whether a process serves this deployment now."""
    try:
        with exclusively_served(deployment.folder, for_now=True):
            return False
    except ConfigError:
        return True


def read_applied_generation(deployment: Deployment) -> int:
    """The generation that the serving process applied last; -1 if there was none."""
    try:
        return int((deployment.run / "applied").read_text())
    except (OSError, ValueError):
        return -1


def _start(deployment: Deployment, operator_log: Callable[[str], None]) -> Broker | None:
    """Start mosquitto with the deployment's configuration; None if one already runs."""
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
            "FV1202",
            "mosquitto was not found on this machine, and the embedded broker cannot ask for certificates: "
            "sudo apt-get install mosquitto",
        )
    log_file = deployment.run / "mosquitto.log"
    return run_mosquitto(
        program, deployment.configuration, address, log_file, lambda line: operator_log(f"broker: {line}")
    )


def _lets_in(address: Address) -> bool:
    """Return whether a broker with this deployment's certificates is running and accepts the coordinator."""
    return _take_over(address, [f"preflight-{secrets.token_hex(4)}"])


def _take_over(address: Address, client_ids: Iterable[str]) -> bool:
    """Connect once under each client id, which ends other connections with that id. False if one of them failed."""
    until = time.monotonic() + ANSWER_S
    inboxes: list[SimpleQueue[object]] = []
    with contextlib.ExitStack() as stack:
        for client_id in client_ids:
            inboxes.append(SimpleQueue())
            transport = MqttTransport(inboxes[-1], address, client_id)
            transport.open()
            stack.callback(transport.close)
        try:
            events = [inbox.get(timeout=max(0.0, until - time.monotonic())) for inbox in inboxes]
        except queue.Empty:
            return False
    return all(isinstance(event, Connected) for event in events)


def _reload_theirs(pid_file: Path) -> str:
    """Let a mosquitto that another process started reload its lists; returns the outcome as text."""
    try:
        pid = int(pid_file.read_text())
        if "mosquitto" not in Path(f"/proc/{pid}/comm").read_text():
            raise ProcessLookupError
        os.kill(pid, signal.SIGHUP)
    except (OSError, ValueError):
        return "broker: reload it now (systemctl reload mosquitto, or kill -HUP): which devices may connect has changed"
    return f"broker: mosquitto, process {pid}, has reloaded which devices may connect"
