"""`python -m bench failover`: takeovers of services with one record in PostgreSQL.

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
from typing import Any, Literal

import msgspec
import paho.mqtt.client as paho
from msgspec import Struct
from paho.mqtt.enums import CallbackAPIVersion

from bench.reporting import Progress, Report
from coordinator.config import make_config
from coordinator.record.database import Database
from coordinator.record.record import Record
from coordinator.rounds.status import read_status
from coordinator.security.broker import start_broker
from fedvit.errors import FedvitError, NoRoom
from fedvit.wire.messages import CoordinatorState, Task, decode, term_of
from fleet.processes import Fleet, last_line, log_text, program
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.federation import SCENARIO, count_duplicates, deal_digits
from tests.support.postgresql import Postgresql
from tests.support.proxy import Links

Kind = Literal["kill", "stop", "cut", "silence"]
KINDS: tuple[Kind, ...] = ("kill", "stop", "cut", "silence")
"""Kill -9; SIGSTOP, and SIGCONT after the takeover; connections to the database reset, or without any more data."""
DEVICES = ("device-0", "device-1", "device-2")
PATIENCE_S = 300.0
POLL_S = 0.02
LATEST_S = 4.0
"""A fault happens up to this time after a task was sent: rounds take about as long."""
LOST = "this service led in term"


class FailoverSettings(Struct, frozen=True, kw_only=True):
    faults: int = 20
    seed: int = 0  # kinds and times of faults follow from it
    standbys: int = 2
    rounds: int = 6  # of each run
    kinds: tuple[Kind, ...] = KINDS


def is_intact(report: Report) -> bool:
    """Tell whether the runs are those of a single service."""
    return report["runs_equal"] == report["runs"] and not report["results_lost"] and not report["results_twice"]


class _Watch:
    """Listens at the broker: when each term was announced first, and when its first and its newest task were sent."""

    def __init__(self, port: int) -> None:
        self.announced: dict[int, float] = {}
        self.first_task: dict[int, float] = {}
        self.tasks = 0
        self._lock = threading.Lock()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id="failover")
        self._client.on_connect = lambda client, *_: client.subscribe("#", 0)
        self._client.on_message = lambda _client, _data, message: self._receive(bytes(message.payload))
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def _receive(self, payload: bytes) -> None:
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

    def find_first_after(self, times: dict[int, float], term: int) -> float | None:
        """Find when a later term did it first."""
        with self._lock:
            return min((at for later, at in times.items() if later > term), default=None)

    def find_newest_term(self) -> int:
        with self._lock:
            return max(self.announced, default=0)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class _Scene:
    """Processes: services, devices, broker and database."""

    def __init__(self, home: Path, stack: ExitStack, settings: FailoverSettings, progress: Progress) -> None:
        self._home = home
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
        values = {**SCENARIO, "rounds": settings.rounds}
        self._config = {**values, "devices": len(DEVICES)}
        self._rounds = settings.rounds
        progress("a calm run, for comparison")
        calm = simulate(RunRequest(folders, values, out=home / "calm", run="calm"))
        self._calm = (calm.folder / "model.safetensors").read_bytes()
        for folder in folders:
            flags = {"--broker": f"127.0.0.1:{self._broker.address.port}", "--data": str(folder), "--threads": "1"}
            flags |= {"--state": str(home / "state" / folder.name), "--id": folder.name}
            command = [*program("edge_client.cli"), *(word for flag in flags.items() for word in flag)]
            self._fleet.start(folder.name, command, home / f"{folder.name}.log")
        self._submitted: list[str] = []
        self.services: dict[str, Any] = {}
        self._starts = 0
        self._look_at = 0.0
        for number in range(settings.standbys + 1):
            name = f"service-{number}"
            self.start(name)
            self.wait(partial(self.is_ready, name), f"{name} to be ready")

    def start(self, name: str) -> None:
        self._starts += 1
        log = self._home / f"{name}-{self._starts}.log"
        command = [*program("coordinator.cli"), "serve", "--runs", str(self.runs), "--standby"]
        command += ["--broker", f"mqtt://{self._broker.address}"]
        environment = {"FEDVIT_RECORD": self._url, "PGPORT": str(self.links.port(name))}
        self.services[name] = self._fleet.start(f"{name}-{self._starts}", command, log, environment=environment), log

    def is_ready(self, name: str) -> bool:
        """Tell whether a service leads or stands by."""
        process, log = self.services[name]
        if process.poll() is not None:
            raise FedvitError("FV0001", f"{name} ended: {last_line(log)}")
        return any(line in log_text(log) for line in ("standing by for", "serving the runs"))

    def find_leader(self) -> str | None:
        for name, (process, log) in self.services.items():
            if process.poll() is None and "serving the runs" in log_text(log) and LOST not in log_text(log):
                return name
        return None

    def wait(self, holds: Callable[[], Any], what: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (value := holds()):
            if time.monotonic() > until:
                lines = "; ".join(f"{name}: {last_line(log)}" for name, (_, log) in self.services.items())
                raise FedvitError("FV0001", f"waited {PATIENCE_S:.0f} s for {what}. Last lines: {lines}")
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

    def read_doing(self) -> str:
        """Read what the run that is being served waits for; empty between two runs."""
        served = (record.id for record in self.store.runs.read_submitted() if record.status == "running")
        with suppress(FedvitError):
            return next((read_status(self.runs / run).doing for run in served), "")
        return ""

    # --- one fault --------------------------------------------------------------------------------------

    def inject(self, kind: Kind, after_s: float) -> Report:
        """Wait for a task, then for `after_s`, and let the leader fail; returns when all services are there again."""
        tasks = self.watch.tasks
        self.wait(lambda: self.watch.tasks > tasks, "a task")
        name = self.wait(self.find_leader, "a leader")
        time.sleep(after_s)
        doing, term = self.read_doing(), self.watch.find_newest_term()
        process, log = self.services[name]
        began = time.monotonic()
        if kind in ("kill", "stop"):
            process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        else:
            (self.links.cut if kind == "cut" else self.links.silence)(name)
        leads = self.wait(lambda: self.watch.find_first_after(self.watch.announced, term), "another leader") - began
        works = self.wait(lambda: self.watch.find_first_after(self.watch.first_task, term), "its first task") - began
        ended = None
        if kind != "kill":
            back = time.monotonic()
            process.send_signal(signal.SIGCONT)
            self.links.mend(name)
            self.wait(lambda: process.poll() is not None, f"{name} to end")
            ended = time.monotonic() - back
            if LOST not in last_line(log):
                raise FedvitError("FV0001", f"{name} did not say why it ended: {last_line(log)}")
        process.wait(PATIENCE_S)
        self.start(name)
        self.wait(lambda: self.is_ready(name), f"{name} to stand by")
        return {
            "kind": kind,
            "after_s": round(after_s, 2),  # a task was sent
            "doing": doing,  # what the leader did, as `coordinator status` says it
            "leads_s": round(leads, 2),  # until another service announced itself to devices
            "works_s": round(works, 2),  # until that one sent a task
            "ended_s": None if ended is None else round(ended, 2),  # from its return until the former leader ended
        }

    def finish(self) -> Report:
        """Let the runs that have begun end, and compare them with a calm one."""
        begun = [record.id for record in self.store.runs.read_all() if record.status != "queued"]

        def are_over() -> bool:
            return all(record.status == "finished" for record in self.store.runs.read_all() if record.id in begun)

        self.wait(are_over, "the runs to finish")
        equal = results = lost = twice = 0
        for run in begun:
            equal += (self.runs / run / "model.safetensors").read_bytes() == self._calm
            accepted = len(self.store.tasks.read_results(run, kind="train"))
            counted = sum(record.totals.rounds for record in self.store.devices.read_all(run))
            asked = self._rounds * len(DEVICES)
            results, lost = results + accepted, lost + max(0, asked - accepted)
            twice += max(0, counted - asked) + count_duplicates(self.runs / run / "coordinator.log")
        return {
            "runs": len(begun),
            "runs_equal": equal,  # with the tensors of the calm run
            "results": results,  # of training, accepted
            "results_lost": lost,  # a device asked in a round without one
            "results_twice": twice,
        }


def run_failover(settings: FailoverSettings, progress: Progress = lambda line: None) -> Report:
    """Inject faults of the leader, drawn from the seed. Raises FedvitError if a service does not recover."""
    draw = random.Random(settings.seed)
    schedule = [(draw.choice(settings.kinds), draw.uniform(0.0, LATEST_S)) for _ in range(settings.faults)]
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder, ExitStack() as stack:
        scene = _Scene(Path(folder), stack, settings, progress)
        faults: list[Report] = []
        for kind, after_s in schedule:
            fault = scene.inject(kind, after_s)
            faults.append(fault)
            progress(
                f"{len(faults)}/{settings.faults} {kind}: leads after {fault['leads_s']:.2f} s, "
                f"works after {fault['works_s']:.2f} s ({fault['doing']})"
            )
        return {"seed": settings.seed, "standbys": settings.standbys, "faults": faults, **scene.finish()}
