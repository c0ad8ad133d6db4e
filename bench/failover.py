"""`python -m bench failover`: services with one record in PostgreSQL, whose leader is killed, stopped or cut off.

Real services, devices, mosquitto and PostgreSQL on loopback. Each service has a link of its own to the database. Run
follows run; every run must end with the tensors of a calm one, with each result counted once.
"""

import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import paho.mqtt.client as paho
from msgspec import Struct
from paho.mqtt.enums import CallbackAPIVersion
from rich import box
from rich.console import RenderableType
from rich.table import Table

from bench.chaos.commands import deal_digits
from bench.chaos.network import Links
from bench.chaos.outcome import count_duplicates
from bench.chaos.scenario import SCENARIO, undisturbed_run
from bench.postgresql_server import Postgresql
from coordinator.config import make_config
from coordinator.record.database import Database
from coordinator.record.record import Record
from coordinator.rounds.status import read_status
from coordinator.security.broker import start_broker
from fedvit.errors import FedvitError, NoRoom
from fedvit.wire.messages import CoordinatorState, Task, decode, term_of
from fleet.processes import Fleet, last_line, log_text, program

Kind = Literal["kill", "stop", "cut", "silence"]
KINDS: tuple[Kind, ...] = ("kill", "stop", "cut", "silence")
"""Kill -9; SIGSTOP, and SIGCONT after the takeover; connections to the database reset, or without any more data."""
DEVICES = ("device-0", "device-1", "device-2")
PATIENCE_S = 300.0
POLL_S = 0.02
LATEST_S = 4.0
"""A fault happens up to this time after a task was sent: rounds take about as long."""
LOST = "this service led in term"


class Fault(Struct, frozen=True, kw_only=True):
    """A fault of the leader."""

    kind: Kind
    after_s: float  # a task was sent
    doing: str  # what the leader did, as `coordinator status` says it
    leads_s: float  # until another service announced itself to devices
    works_s: float  # until that one sent a task
    ended_s: float | None  # from its return until the former leader ended; None: it was killed


class FailoverReport(Struct, frozen=True, kw_only=True):
    """All faults, and what became of the runs."""

    seed: int
    standbys: int
    faults: list[Fault]
    runs: int
    runs_equal: int  # with the tensors of the calm run
    results: int  # of training, accepted
    results_lost: int  # a device asked in a round without one
    results_twice: int

    @property
    def ok(self) -> bool:
        return self.runs_equal == self.runs and not self.results_lost and not self.results_twice


class _Watch:
    """Listens at the broker: when each term was announced first, and when its first and its newest task were sent."""

    def __init__(self, port: int) -> None:
        self.announced: dict[int, float] = {}
        self.first_task: dict[int, float] = {}
        self.tasks = 0
        self._lock = threading.Lock()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id="failover")
        self._client.on_connect = lambda client, *_: client.subscribe("#", 0)
        self._client.on_message = lambda _client, _data, message: self._heard(bytes(message.payload))
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def _heard(self, payload: bytes) -> None:
        with suppress(FedvitError):
            match decode(payload):
                case CoordinatorState(alive=True) as state:
                    self._note(self.announced, state.epoch)
                case Task() as task:
                    self._note(self.first_task, task.epoch)
                    self.tasks += 1

    def _note(self, times: dict[int, float], epoch: int) -> None:
        with self._lock:
            times.setdefault(term_of(epoch), time.monotonic())

    def first_after(self, times: dict[int, float], term: int) -> float | None:
        """When a later term did it first."""
        with self._lock:
            return min((at for later, at in times.items() if later > term), default=None)

    def newest_term(self) -> int:
        with self._lock:
            return max(self.announced, default=0)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class _Scene:
    """The processes."""

    def __init__(self, home: Path, stack: ExitStack, standbys: int, rounds: int, report: Callable[[str], None]) -> None:
        self._home = home
        self._report = report
        self.runs = home / "runs"
        self._server = Postgresql()
        stack.callback(self._server.close)
        self._broker = start_broker("mosquitto", home / "broker", port=0)
        stack.callback(self._broker.stop)
        self.links = stack.enter_context(Links(self._server.port))
        self.watch = _Watch(self._broker.address.port)
        stack.callback(self.watch.close)
        self._fleet = stack.enter_context(Fleet())
        url = self._server.schema()
        # without a port: each service has its own in its environment
        self._url = url.replace(f":{self._server.port}/", "/")
        self.store = Record(Database(url))
        stack.callback(self.store.close)
        folders = deal_digits(home / "parts", DEVICES)
        values = {**SCENARIO, "rounds": rounds}
        self._config = {**values, "devices": len(DEVICES)}
        self._rounds = rounds
        report("a calm run, for comparison")
        self._calm = undisturbed_run(folders, values, home / "calm")
        for folder in folders:
            command = [*program("edge_client.cli"), "--broker", f"127.0.0.1:{self._broker.address.port}", "--data"]
            command += [
                str(folder),
                "--state",
                str(home / "state" / folder.name),
                "--id",
                folder.name,
                "--threads",
                "1",
            ]
            self._fleet.start(folder.name, command, home / f"{folder.name}.log")
        self._submitted: list[str] = []
        self.services: dict[str, Any] = {}
        self._starts = 0
        self._look_at = 0.0
        for number in range(standbys + 1):
            name = f"service-{number}"
            self.start(name)
            self.until(partial(self.is_ready, name), f"{name} to be ready")

    def start(self, name: str) -> None:
        self._starts += 1
        log = self._home / f"{name}-{self._starts}.log"
        command = [*program("coordinator.cli"), "serve", "--runs", str(self.runs), "--standby"]
        command += ["--broker", f"mqtt://{self._broker.address}"]
        environment = {"FEDVIT_RECORD": self._url, "PGPORT": str(self.links.port(name))}
        self.services[name] = self._fleet.start(f"{name}-{self._starts}", command, log, environment=environment), log

    def is_ready(self, name: str) -> bool:
        """Whether a service leads or stands by."""
        process, log = self.services[name]
        if process.poll() is not None:
            raise FedvitError(f"{name} ended: {last_line(log)}")
        return any(line in log_text(log) for line in ("standing by for", "serving the runs"))

    def leader(self) -> str | None:
        for name, (process, log) in self.services.items():
            if process.poll() is None and "serving the runs" in log_text(log) and LOST not in log_text(log):
                return name
        return None

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (value := holds()):
            if time.monotonic() > until:
                lines = "; ".join(f"{name}: {last_line(log)}" for name, (_, log) in self.services.items())
                raise FedvitError(f"waited {PATIENCE_S:.0f} s for {what}. Last lines: {lines}")
            self.submit()
            time.sleep(POLL_S)
        return value

    def submit(self) -> None:
        """Keep one run in the queue; looks once a second."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + 1.0
        with suppress(NoRoom):
            if not any(record.status == "queued" for record in self.store.runs.read_submitted()):
                run = f"run-{len(self._submitted) + 1}"
                self.store.runs.submit(run, msgspec.to_builtins(make_config(self._config, run).run))
                self._submitted.append(run)

    def doing(self) -> str:
        """What the run that is being served waits for; empty between two runs."""
        served = (record.id for record in self.store.runs.read_submitted() if record.status == "running")
        with suppress(FedvitError):
            return next((read_status(self.runs / run).doing for run in served), "")
        return ""

    # --- one fault --------------------------------------------------------------------------------------

    def inject(self, kind: Kind, after_s: float) -> Fault:
        """Wait for a task, then for `after_s`, and let the leader fail; returns when all services are there again."""
        tasks = self.watch.tasks
        self.until(lambda: self.watch.tasks > tasks, "a task")
        name = self.until(self.leader, "a leader")
        time.sleep(after_s)
        doing, term = self.doing(), self.watch.newest_term()
        process, log = self.services[name]
        began = time.monotonic()
        if kind in ("kill", "stop"):
            process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        else:
            (self.links.cut if kind == "cut" else self.links.silence)(name)
        leads = self.until(lambda: self.watch.first_after(self.watch.announced, term), "another leader") - began
        works = self.until(lambda: self.watch.first_after(self.watch.first_task, term), "its first task") - began
        ended = None
        if kind != "kill":
            back = time.monotonic()
            process.send_signal(signal.SIGCONT)
            self.links.mend(name)
            self.until(lambda: process.poll() is not None, f"{name} to end")
            ended = time.monotonic() - back
            if LOST not in last_line(log):
                raise FedvitError(f"{name} did not say why it ended: {last_line(log)}")
        process.wait(PATIENCE_S)
        self.start(name)
        self.until(lambda: self.is_ready(name), f"{name} to stand by")
        return Fault(
            kind=kind, after_s=round(after_s, 2), doing=doing, leads_s=round(leads, 2), works_s=round(works, 2),
            ended_s=None if ended is None else round(ended, 2),
        )  # fmt: skip

    def finish(self) -> tuple[int, int, int, int, int]:
        """Let the runs that have begun end: (runs, with the calm tensors, results, lost, twice)."""
        begun = [record.id for record in self.store.runs.read_all() if record.status != "queued"]

        def over() -> bool:
            return all(record.status == "finished" for record in self.store.runs.read_all() if record.id in begun)

        self.until(over, "the runs to finish")
        equal = results = lost = twice = 0
        for run in begun:
            equal += (self.runs / run / "model.safetensors").read_bytes() == self._calm
            accepted = len(self.store.tasks.read_results(run, kind="train"))
            counted = sum(record.totals.rounds for record in self.store.devices.read_all(run))
            asked = self._rounds * len(DEVICES)
            results, lost = results + accepted, lost + max(0, asked - accepted)
            twice += max(0, counted - asked) + count_duplicates(self.runs / run / "coordinator.log")
        return len(begun), equal, results, lost, twice


def run_failover(
    *, faults: int, seed: int, standbys: int, rounds: int, kinds: tuple[Kind, ...] = KINDS,
    progress: Callable[[str], None] = lambda line: None,
) -> FailoverReport:  # fmt: skip
    """Inject faults of the leader, drawn from the seed. Raises FedvitError if a service does not recover."""
    drawn = random.Random(seed)
    schedule = [(drawn.choice(kinds), drawn.uniform(0.0, LATEST_S)) for _ in range(faults)]
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made, ExitStack() as stack:
        scene = _Scene(Path(made), stack, standbys, rounds, progress)
        injected = []
        for number, (kind, after_s) in enumerate(schedule, 1):
            fault = scene.inject(kind, after_s)
            injected.append(fault)
            progress(
                f"{number}/{faults} {kind}: leads after {fault.leads_s:.2f} s, works after {fault.works_s:.2f} s "
                f"({fault.doing})"
            )
        runs, equal, results, lost, twice = scene.finish()
    return FailoverReport(
        seed=seed, standbys=standbys, faults=injected, runs=runs, runs_equal=equal, results=results, results_lost=lost,
        results_twice=twice,
    )  # fmt: skip


def failover_table(report: FailoverReport) -> RenderableType:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1),
        caption=f"{report.runs} runs, {report.runs_equal} with the calm run's tensors; {report.results} results, "
        f"{report.results_lost} lost, {report.results_twice} counted twice",
    )  # fmt: skip
    for heading in ("fault", "times", "leads s: median", "longest", "works s: median", "longest"):
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for kind in KINDS:
        if of_kind := [fault for fault in report.faults if fault.kind == kind]:
            leads, works = [fault.leads_s for fault in of_kind], [fault.works_s for fault in of_kind]
            figures = (median(leads), max(leads), median(works), max(works))
            table.add_row(kind, str(len(of_kind)), *(f"{figure:.1f}" for figure in figures))
    return table
