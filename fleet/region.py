"""`fleet region`: a coordinator that is a device of another one, its centre.

Toward its devices it is the coordinator of an ordinary run; toward the centre it is an edge client, in a thread of its
own, whose tasks the run answers.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec
import numpy as np

from coordinator.api import config_flags, record_flag, run_to_end, runs_flag
from coordinator.config import CENTRE, REGION
from coordinator.rounds.regional import CentralTask, RegionAnswer, RegionCounts, RegionLead
from edge_client.agent import TICK_S, Agent
from edge_client.health.guard import Guard, Guarded
from edge_client.link.device_link import DeviceIdentity, DeviceLink
from edge_client.link.endpoint import find_endpoint
from edge_client.link.identity import Identity, Renewal
from edge_client.link.session import RETURN_SPREAD_S
from edge_client.storage.device_storage import DeviceStorage, FixedImages
from edge_client.storage.vault import Vault
from edge_client.work.runtime import Runtime, Stopped
from edge_client.work.task_executor import TaskExecution, TaskExecutor, Upload, Worked
from fedvit import monitoring
from fedvit.blobs import BlobStore
from fedvit.command_line import Command, log_format_flag
from fedvit.data.folder import DeviceData, Files, Split
from fedvit.errors import ConfigError, FedvitError
from fedvit.files import make_private, private_files
from fedvit.policy import Policy, SendPolicy
from fedvit.program import Program
from fedvit.secure.layout import make_evaluation_payload
from fedvit.tensors import map_tensors
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import MAX_CLASS_COUNTS, AnyMessage, Result, RunEnded, Task
from fedvit.wire.topics import Topics, check_name
from profiles.probes.host import device_profile

if TYPE_CHECKING:
    from fedvit.transport.base import Transport

log = logging.getLogger(__name__)

LEAVE_S = 10.0
"""Longest wait for the last answer to be sent, before the region leaves its centre."""


class AnotherRun(ConfigError):
    """The centre gave the region a task of another run than the one that it takes part in."""


class _Executor(TaskExecutor):
    """Gives each task to the region's run, and waits for its answer."""

    offered: CentralTask | None = None  # the task that has no answer yet
    finished: CentralTask | None = None  # the newest that was offered and has an answer
    counts: RegionCounts | None = None  # of the newest answer

    def run(self, execution: TaskExecution, program: Program) -> Result:
        """Raises the error that the run gives as its answer, and Stopped when the centre does not wait any longer."""
        task = execution.task
        if others := [run for run in self.storage.vault.notes.list_runs() if run != task.run]:
            raise AnotherRun(
                "FV2204",
                f"this region takes part in run {others[0]!r} of its centre, the task is of run {task.run!r}: begin "
                "another run of the region, with another --run",
            )
        self.check_files(execution, program)
        self.rebuild_blobs(execution)
        self.storage.vault.notes.write(task)
        offered = CentralTask(
            kind=task.kind,
            round=task.round,
            seed=task.seed,
            lr_scale=task.lr_scale,
            program=program,
            groups={group: self.storage.blobs.path(digest) for group, digest in task.groups.items()},
            progress=self._scale_progress(task, program),
        )
        try:
            with self.guard.watching(task.kind) as guarded:
                self.offered = offered
                answer = _outcome(offered, execution.stop)
                self.counts = answer.counts
                if task.kind == "evaluate":
                    return self._evaluate(execution, program, answer, guarded)
                assert answer.update is not None  # of a training
                # in the vault afterwards: the region's run may delete its devices' updates
                upload = Upload(map_tensors(answer.update), {}, {}, answer.samples, answer.metrics)
                return self.commit(execution, program, upload, guarded, flops=answer.flops)
        finally:
            self.offered, self.finished = None, offered
            offered.settled.set()

    def _evaluate(self, execution: TaskExecution, program: Program, answer: RegionAnswer, guarded: Guarded) -> Result:
        use, task = self.measure_use(execution, guarded, answer.flops), execution.task
        if program.secure:
            correct, counts = int(answer.metrics["correct"]), None
            if answer.by_class and program.evaluate.counts_classes:
                counts = [(count.label, count.images, count.correct) for count in answer.by_class]
            payload = make_evaluation_payload(program, answer.samples, correct, counts)
            self.storage.sums.keep_payload(task.run, task.round, task.kind, payload)
            return self.make_result(task, 0, {}, use)
        result = self.make_result(task, answer.samples, answer.metrics, use)
        by_class = answer.by_class if len(answer.by_class) <= MAX_CLASS_COUNTS else ()
        return msgspec.structs.replace(result, by_class=by_class)

    def _scale_progress(self, task: Task, program: Program) -> Callable[[int, int], None]:
        """Report progress in steps of the centre's prediction, for a device with this many images."""
        data = self.storage.data
        train, test = len(data.train), len(data.test)
        if task.kind == "train":
            steps = sum(program.steps_of(phase, train) for phase in program.train)
        else:
            steps = (train + test) // program.batch.answer_size
        steps, report = max(1, steps), self.make_reporter(task)
        return lambda done, total: report(done * steps // max(1, total), steps, None)


def _outcome(offered: CentralTask, stop: threading.Event) -> RegionAnswer:
    while True:
        if stop.is_set() and offered.outcome.cancel():
            raise Stopped("FV1422", "the centre does not wait for the answer any longer")
        with suppress(TimeoutError):
            return offered.outcome.result(timeout=TICK_S)


class _Agent(Agent):
    """The region, toward its centre."""

    worker: _Executor
    sent: CentralTask | None = None  # the newest whose answer was sent
    final_status: str | None = None  # how the centre's run ended

    def on_message(self, message: AnyMessage) -> None:
        """Handle a message of the centre, but no task after the end of its run.

        A centre that is a service gives the region to its next run at once: that task waits for the region's next run.
        """
        if isinstance(message, Task) and self.final_status is not None:
            return
        super().on_message(message)
        if isinstance(message, RunEnded) and self.storage.vault.is_over(message.run):
            self.final_status = message.status

    def on_event(self, event: object) -> None:
        """Handle an event. Raises AnotherRun: each further task of that run would fail as well.

        The region's devices may have become more: their numbers are announced before the result, which the centre
        compares with them.
        """
        counts = self.worker.counts
        if isinstance(event, Worked) and event.result and counts and counts != self.storage.data.counts:
            self.storage.images = FixedImages(_images(counts, self.storage.data.folder))
            self.session.announce()
        super().on_event(event)
        if isinstance(event, Worked):
            self.sent = self.worker.finished
            if isinstance(event.error, AnotherRun):
                raise event.error


def _images(counts: RegionCounts, folder: Path) -> DeviceData:
    """The images of a region's devices, of which a region knows only the numbers."""
    train, test = (
        Split(np.broadcast_to(np.int64(0), number), Files(()))  # takes no memory
        for number in (counts.train_samples, counts.test_samples)
    )
    return DeviceData(folder=folder, classes=counts.classes, train=train, test=test, checked={})


class CentreLink:
    """The link of a region to its centre: an edge client in a thread; see `coordinator.rounds.regional.Centre`.

    `transport` makes its connection to the centre's broker. What a device keeps is in the folder `state`: its
    unacknowledged result, and blobs of the newest task.
    """

    def __init__(
        self,
        *,
        name: str,
        federation: str,
        transport: "Callable[[], Transport]",
        state: Path,
        identity: Identity | None = None,
    ) -> None:
        self._name = name
        self._federation = federation
        self._transport = transport
        self._state = state
        self._identity = identity
        self._stop = threading.Event()
        self._opened: tuple[_Agent, threading.Thread] | None = None
        self._given: CentralTask | None = None  # the newest task that the run has seen
        self._error: FedvitError | None = None

    def open(self, counts: RegionCounts) -> None:
        if self._opened:
            return
        make_private(self._state / kept for kept in ("blobs", "vault"))
        identity = DeviceIdentity(
            device=self._name,
            federation=self._federation,
            software=version("fedvit"),
            profile=device_profile(1, self._state),
            labels=REGION,
        )
        images = FixedImages(_images(counts, self._state))
        policy = Policy(send=SendPolicy(class_counts=True))  # its devices decide what they send
        storage = DeviceStorage(Vault(self._state / "vault"), BlobStore(self._state / "blobs"), images)
        renewal = Renewal(self._identity, Topics(self._federation)) if self._identity else None
        link = DeviceLink(identity, self._transport(), storage, renewal=renewal)
        agent = _Agent(link, storage, _Executor(link, storage, Runtime(1), Guard(), policy), policy)
        thread = threading.Thread(target=self._serve, args=(agent,), name="centre", daemon=True)
        self._opened = agent, thread
        thread.start()

    def _serve(self, agent: _Agent) -> None:
        try:
            agent.serve(self._stop)
        except FedvitError as error:
            self._error = error
        except Exception as error:
            log.exception("the link to the centre ended")
            self._error = FedvitError("FV2207", f"the link to the centre ended: {type(error).__name__}: {error}")

    def task(self) -> CentralTask | None:
        if self._opened and (offered := self._opened[0].worker.offered):
            self._given = offered
            return offered
        return None

    def ended(self) -> str | None:
        if self._error:
            raise self._error
        return self._opened[0].final_status if self._opened else None

    def trouble(self) -> str:
        return self._opened[0].session.trouble if self._opened else ""

    def close(self) -> None:
        if not self._opened:
            return
        agent, thread = self._opened
        until = time.monotonic() + LEAVE_S
        while self._has_unsent(agent) and thread.is_alive() and time.monotonic() < until:
            time.sleep(TICK_S / 2)
        self._stop.set()
        thread.join()

    def _has_unsent(self, agent: _Agent) -> bool:
        """Return whether the run has an answer that the agent has not sent."""
        given = self._given
        return bool(given and given.outcome.done() and given is not agent.sent and agent.task)


class CentreFlags(NamedTuple):
    """The command's flags that name the centre."""

    centre: str | None
    device: str | None
    centre_federation: str | None
    centre_ca_file: Path | None
    state: Path | None


@click.command(
    "region",
    cls=Command,
    examples=[
        "fleet region --centre SERVER --id north --config run.toml --devices 100",
        "fleet region --centre mqtts://SERVER:8883 --centre-ca-file ca.pem --id north --config run.toml --run second",
    ],
)
@click.option(
    "--centre",
    metavar="HOST[:PORT]",
    envvar="FEDVIT_CENTRE",
    help="MQTT broker of the centre, as `--broker` of `edge-client`. Or set FEDVIT_CENTRE, which other users of this "
    "machine cannot read.",
)
@click.option(
    "--id", "device", metavar="NAME", help="Name of this region at its centre; by default that of its certificate."
)
@click.option("--centre-federation", help="Federation of the centre; by default that of its certificate, else home.")
@click.option(
    "--centre-ca-file", type=click.Path(path_type=Path), help="Certificate authority of the centre's mqtts:// broker."
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="FOLDER of `edge-client join TOKEN --state FOLDER`: this region's certificate for a centre with a deployment.",
)
@click.option(
    "--least-results",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Devices of which an update is made at least; with fewer results the region's task fails.",
)
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; flags override it.")
@runs_flag
@record_flag
@click.option(
    "--run",
    "name",
    metavar="NAME",
    default=None,
    help="Name of the region's run; by default --id. If it exists, it is resumed.",
)
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@click.option("--prometheus", "metrics_address", **monitoring.OPTION)
@click.option("--prometheus-password-file", **monitoring.PASSWORD_OPTION)
@log_format_flag
@config_flags
@private_files()
def region_command(
    least_results: int, file: Path | None, folder: Path, url: str | None, name: str | None, **flags: Any
) -> None:
    """Serve a region: a coordinator whose devices count as one device of another coordinator, the centre."""
    centre = CentreFlags(**{field: flags.pop(field) for field in CentreFlags._fields})
    endpoint = find_endpoint(
        centre.centre,
        ca_file=centre.centre_ca_file,
        federation=centre.centre_federation,
        device=centre.device,
        state=centre.state,
    )
    if endpoint.device is None:
        raise ConfigError("FV2201", "--id is missing: the name of this region at its centre")
    own = check_name(endpoint.device, "--id")
    name = check_name(name or own, "--run")
    link = CentreLink(
        name=own,
        federation=endpoint.federation,
        transport=lambda: MqttTransport(
            SimpleQueue(), endpoint.address, f"{own}-{secrets.token_hex(4)}", return_spread_s=RETURN_SPREAD_S
        ),
        state=folder / name / CENTRE,
        identity=endpoint.identity,
    )
    run_to_end(
        file=file,
        folder=folder,
        url=url,
        resume=None,
        name=name,
        resume_or_new=True,
        only_check=False,
        quiet=flags.pop("quiet"),
        metrics_address=flags.pop("metrics_address"),
        flags=flags,
        lead=partial(RegionLead, centre=link, least_results=least_results),
    )
