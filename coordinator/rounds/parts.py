"""The parts of one run that is served, each with its dependencies; `events` handles what they mean for each other."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from coordinator.compute.integrity import VerifiedBlobs
from coordinator.compute.messages import Compute, ComputeRequest
from coordinator.compute.planning.method_entry import find_stored_needs
from coordinator.config import BlobsConfig, RunConfig
from coordinator.record.backups import Backups, Struck
from coordinator.record.record import Record
from coordinator.rounds.acceptance import Acceptance
from coordinator.rounds.alerts import Alerts
from coordinator.rounds.collector import ResultCollector
from coordinator.rounds.device_profiles import DeviceProfiles
from coordinator.rounds.display import Display
from coordinator.rounds.inbox import Inbox
from coordinator.rounds.lease import Lease
from coordinator.rounds.membership import Admission
from coordinator.rounds.models.keeper import ModelKeeper, describe_drift
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.recovery import Recovery
from coordinator.rounds.reporter import Reporter
from coordinator.rounds.scheduler import TaskScheduler
from coordinator.rounds.spans import RunSpans
from coordinator.rounds.state import RunState
from coordinator.rounds.sums import SumRounds
from coordinator.rounds.task_ends import TaskEnds
from coordinator.rounds.uploads import Uploads
from coordinator.security.signing import GraphSigner
from fedvit.terminal import escape_line
from fedvit.tracing import open_tracing
from fedvit.transport.base import Transport
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import BlobPut, FromCoordinator, TransferMessage, Welcome
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import chunk_bytes_within

if TYPE_CHECKING:
    from coordinator.rounds.object_store import ObjectStore

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """A run, and everything that its process provides for it."""

    run: str
    config: RunConfig
    transport: Transport
    store: Record
    folder: Path  # of this run
    display: Display
    compute: Compute
    signer: GraphSigner | None = None


class RunParts:
    """Only this module connects the parts of a run."""

    def __init__(self, setup: RunSetup) -> None:
        run, config, store = setup.run, setup.config, setup.store
        self.cancelled: str | None = None  # reason, once the run is to be cancelled
        self.transport = transport = setup.transport
        self.folder = folder = setup.folder
        self.display = setup.display
        self.compute = compute = setup.compute
        blobs = VerifiedBlobs(folder / "blobs")
        blobs.chunk_bytes = chunk_bytes_within(transport.limits.max_payload_bytes)
        self.backups = Backups(store, run, folder, config.backup_every)
        self.inbox = Inbox(transport, Topics(config.federation))
        self.state = state = RunState(
            run,
            config,
            store,
            blobs,
            Topics(config.federation),
            operator_log=self.operator_log,
            send=self._send,
            classes=config.classes,
            unsent_bytes=transport.pending_bytes,
            limits=transport.limits,
            signer=setup.signer,
            needs=find_stored_needs(config.method, secure=config.secure),
            offers_refused=transport.offers_refused,
            spans=RunSpans(run, open_tracing("fedvit-coordinator")),
        )
        # a service keeps the models of all its runs' devices
        self.models = None if transport.offers_refused else self._keep_models(store)
        self.alerts = Alerts(run, config.alerts)
        state.alert = self.alerts.send
        compute.progress = state.set_doing
        self.objects = make_object_store(config.blobs, run, blobs)
        if self.objects and self.objects.is_mirror:
            state.mirror = self.objects.mirror.put
        self.lease = Lease(transport, state.topics, run, self.operator_log)
        self.exchange = BlobExchange(
            transport,
            state.blobs,
            send=self._send_transfer_message,
            topics=ChunkTopics(state.topics.broadcast, state.tasks.count_receivers, state.topics.chunks_for),
            may_read=state.tasks.may_read,
            places=self.objects,
        )
        self.quarantine = Quarantine(run, store, config.robust)
        self.profiles = DeviceProfiles(run, store, state.presence, config.budget.limits())
        self.membership = Admission(state, self.exchange, self.quarantine)
        self.scheduler = TaskScheduler(state, self.exchange)
        self.ends = TaskEnds(state)
        self.acceptance = Acceptance(state, self.backups, self.profiles, self.ends)
        self.uploads = Uploads(state, self.exchange, self.acceptance, self.ends)
        self.collector = ResultCollector(
            state, self.profiles, acceptance=self.acceptance, uploads=self.uploads, ends=self.ends
        )
        self.sums = SumRounds(state, self.inbox, self.exchange, self.backups, folder)
        self.recovery = Recovery(state, self.exchange, self.backups, compute)
        self.reporter = Reporter(folder)

    def stop(self) -> None:
        """Ask the run to end; safe from a signal handler."""
        self.inbox.stop()

    def cancel(self, reason: str) -> None:
        """Ask the run to be cancelled; safe from any thread."""
        self.cancelled = reason
        self.inbox.stop()

    def operator_log(self, text: str) -> None:
        """Print a line for the operator."""
        self.display.line(escape_line(text))  # the text may quote a device, which must not forge a line

    def ask(self, request: ComputeRequest[Answer]) -> Answer:
        """Ask the compute side. Devices are served meanwhile; Ctrl-C does not wait for the answer."""
        return self.inbox.in_background(lambda: self.compute.ask(request))

    def mirror(self, digests: set[str]) -> None:
        """Put blobs into the run's mirror, if it has one, before the record names them."""
        if mirror := self.state.mirror:
            self.inbox.in_background(lambda: mirror(digests))

    def strike(self, device: str, number: int, reason: str) -> None:
        """Record a strike of a device, which may put it into quarantine."""
        self.backups.note(Struck(device, number, reason))
        if self.quarantine.strike(device, number, reason):
            self.membership.on_quarantined(device)

    def _send(self, device: str, message: FromCoordinator) -> None:
        self.inbox.send(device, message)
        if isinstance(message, Welcome) and self.models:
            self.models.welcome(device, message.instance)

    def _keep_models(self, store: Record) -> ModelKeeper:
        keeper = ModelKeeper(store, self.inbox.send, lambda: self.state.epoch, self.operator_log)
        keeper.on_drift = lambda device, model: self.alerts.send("drift", describe_drift(device, model), device)
        return keeper

    def _send_transfer_message(self, device: str, message: TransferMessage) -> None:
        assert not isinstance(message, BlobPut)  # only devices send them
        self.inbox.send(device, message)


def make_object_store(config: BlobsConfig, run: str, blobs: VerifiedBlobs) -> "ObjectStore | None":
    """Return the object store of a run; None if its configuration has none."""
    if config.url is None:
        return None
    stores = import_module("coordinator.rounds.object_store")  # late: obstore, which other runs do not need
    store: ObjectStore = stores.ObjectStore(config, run, blobs)
    return store
