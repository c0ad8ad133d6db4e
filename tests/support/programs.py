"""Real processes, a real broker, real files: a small federation on digits that every test starts.

All runs have the same configuration and seed, and the same devices answer; so whatever happens to them on
the way, the final tensors must be those of the undisturbed run, bit for bit.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import paho.mqtt.client as paho
import psutil

from coordinator.security.broker.process import claim_port
from fedvit.errors import FedvitError
from fedvit.wire.messages import AnyMessage, decode
from fleet.processes import program as program
from tests.support.children import run_child
from tests.support.forked import Forked
from tests.support.waiting import WAIT_S, wait_until

DEVICES = ("device-0", "device-1", "device-2")
ROUNDS = 3
CONFIG: dict[str, Any] = {
    "method": "eftvit",
    "rounds": ROUNDS,
    "seed": 5,
    "options": {"epochs": 4, "batch_size": 8, "lr": 1e-3, "mask": 0.5, "local_blocks": 1},
    # it trains for so long that what a test does to it meanwhile does happen meanwhile
    "variants": {"device-1": {"epochs": 90}},
    "model_options": {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2},
    "deadline_s": 120.0,
    "rejoin_grace_s": 60.0,
}
SUMMED: dict[str, Any] = {
    **CONFIG,
    "method": "fedavg",
    "options": {"epochs": 2, "batch_size": 8, "lr": 1e-3},
    "variants": {},
    "rounds": 2,
    "rejoin_grace_s": 120.0,  # devices that are stopped for long may lose their link
    "sums": {"step_s": 600.0},
}
"""A run whose updates can be added up in secret."""
DEEP_LEARNING = ("torch", "libc10", "onnx/", "timm")
"""Parts of the names of files that a device never maps into its memory."""
USUAL_UMASK = 0o022
"""What programs start with: without a word of ours others can read their files."""


def wait_for(holds: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """The first true value of `holds()`; fails, saying what was waited for, when there is none in time."""
    return wait_until(holds, f"waited for {what}", wait_s=timeout_s, pause_s=0.05)


def open_to_others(folder: Path) -> list[str]:
    """Files and folders below, and the folder itself, of which anybody but their owner has any right."""
    kept = [folder, *folder.rglob("*")]
    assert len(kept) > 20
    return [str(path) for path in kept if path.stat().st_mode & 0o077]


class Observer:
    """An independent MQTT client that receives all messages at the broker."""

    def __init__(self, port: int) -> None:
        self.seen: list[tuple[str, bytes]] = []
        self._messages: list[tuple[str, AnyMessage]] = []
        self._arrived: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id="observer")
        self._client.on_connect = lambda client, *_: client.subscribe("#", 0)
        self._client.on_disconnect = lambda *_: self._subscribed.clear()
        self._subscribed = threading.Event()
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.reconnect_delay_set(1, 1)  # by default its tries are ever longer apart, up to two minutes
        self._client.on_message = lambda _client, _data, message: self._arrived.put((message.topic, message.payload))
        self._client.connect_async("127.0.0.1", port)
        self._client.loop_start()
        self.wait()

    def wait(self) -> None:
        """Wait until it is subscribed, also after the broker was restarted."""
        if not self._subscribed.wait(WAIT_S):
            raise AssertionError(f"waited {WAIT_S:.0f} s for a broker to observe")

    def drain(self) -> list[tuple[str, bytes]]:
        """Every payload that went by so far, with its topic."""
        while not self._arrived.empty():
            topic, payload = self._arrived.get()
            self.seen.append((topic, payload))
            if topic.endswith("/ctl"):
                with suppress(FedvitError):
                    self._messages.append((topic, decode(payload)))
        return self.seen

    def messages(self) -> list[AnyMessage]:
        """Every control message that went by so far."""
        self.drain()
        return [message for _, message in self._messages]

    def find(self, kind: type[AnyMessage], /, *, since_start: bool = False, **wanted: Any) -> Callable[[], Any]:
        """A condition for `wait_for`: a message of this type, with these fields, goes by (`device` is in the topic).

        `since_start`: it may also have gone by before.
        """
        self.drain()
        device = wanted.pop("device", None)
        looked = 0 if since_start else len(self._messages)

        def look() -> AnyMessage | None:
            nonlocal looked
            self.drain()
            while looked < len(self._messages):
                topic, message = self._messages[looked]
                looked += 1
                same = isinstance(message, kind) and (device is None or f"/{device}/" in topic)
                if same and all(getattr(message, name) == value for name, value in wanted.items()):
                    return message
            return None

        return look

    def publish(self, topic: str, payload: bytes) -> None:
        self._client.publish(topic, payload, qos=1).wait_for_publish(10)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class Stage:
    """One federation: starts programs, keeps their output, and leaves nothing running."""

    def __init__(self, folder: Path, parts: Path, cache: Path) -> None:
        self.folder = folder
        self.parts = parts
        self.out = folder / "runs"
        self.port = claim_port()
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_WAIT_POLICY": "PASSIVE"}
        self._processes: list[subprocess.Popen[bytes] | Forked] = []
        self._observer: Observer | None = None

    def start(
        self, name: str, command: list[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program; `environment` is added to that of the stage."""
        variables = {**self.environment, **(environment or {})}
        with open(self.log_path(name), "ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=variables, umask=USUAL_UMASK
            )
        self._processes.append(process)
        return process

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_path(name).read_text()

    def coordinator(
        self, *arguments: str, broker: str = "embedded", resume: bool = False, values: dict[str, Any] | None = None
    ) -> Forked:
        """Start the run `run`, with `values` in its configuration if it is another than usual; or resume it."""
        given = ["start", "--runs", str(self.out), "--broker", broker]
        given += ["--broker.port", str(self.port)] if "://" not in broker else []
        if resume:
            given.append("--resume")
        else:
            config = self.folder / "run.toml"
            config.write_text(toml(values or {**CONFIG, "devices": len(DEVICES)}))
            given += ["--config", str(config), "--run", "run"]
        return self.fork("coordinator", *given, *arguments)

    def fork(self, log: str, *arguments: str) -> Forked:
        """Start a command of the coordinator that has torch at once; its output is in the log of this name."""
        return self.keep(Forked("coordinator.cli", list(arguments), self.log_path(log), self.environment))

    def keep(self, process: Forked) -> Forked:
        """A program that ends with the stage."""
        self._processes.append(process)
        return process

    def command(self, *arguments: str) -> Any:
        """What a command of the coordinator that succeeds prints as JSON."""
        name = f"command-{len(self._processes)}"
        process = self.fork(name, *arguments, "--json")
        assert self.finish(process, name) == 0, self.log(name)
        output = self.log(name)
        return json.loads(output[output.index("{") :])

    def submit(self, run: str, **more: Any) -> Any:
        """Put a run into the queue, by default of one round."""
        file = self.folder / f"{run}.toml"
        file.write_text(toml({**CONFIG, "variants": {}, "rounds": 1, **more}))
        return self.command("submit", str(file), "--run", run, "--runs", str(self.out))

    def device(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*program("edge_client.cli"), "--broker", f"127.0.0.1:{self.port}", "--data", str(self.parts / name)]
        command += ["--state", str(self.folder / "state" / name), "--id", name, "--threads", "1", "--once"]
        return self.start(name, [*command, *arguments])

    def observer(self) -> Observer:
        """Hears everything from here on; waits for the broker where it is not there yet."""
        if self._observer is None:
            self._observer = Observer(self.port)
        return self._observer

    def finish(self, process: subprocess.Popen[bytes] | Forked, name: str) -> int:
        try:
            return process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} is still running; its log:\n{self.log(name)}") from None

    def finish_run(
        self, coordinator: subprocess.Popen[bytes] | Forked, devices: Mapping[str, subprocess.Popen[bytes]]
    ) -> None:
        """Wait until the coordinator and its devices have ended without an error."""
        assert self.finish(coordinator, "coordinator") == 0, self.log("coordinator")
        for name, process in devices.items():
            assert self.finish(process, name) == 0, self.log(name)

    def model(self) -> bytes:
        return (self.out / "run" / "model.safetensors").read_bytes()

    def show(self) -> dict[str, Any]:
        return dict(self.command("show", "run", "--runs", str(self.out)))

    def report(self) -> dict[str, Any]:
        return dict(self.command("report", "run", "--runs", str(self.out)))

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return query_record(self.out, sql)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._observer:
            self._observer.close()


def find_worker(run: Path) -> int | None:
    """Find the pid of the worker process of a run's coordinator in its log; None before the log names one."""
    pids: list[str] = re.findall(r"worker process  pid=(\d+)", (run / "coordinator.log").read_text())
    return int(pids[-1]) if pids else None


def query_record(runs: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Read a record while it is written; no rows before it exists."""
    try:
        with closing(sqlite3.connect(f"file:{runs / 'fedvit.db'}?mode=ro", uri=True, timeout=5)) as database:
            return database.execute(sql, values).fetchall()
    except sqlite3.OperationalError:
        return []


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def toml(values: dict[str, Any]) -> str:
    return msgspec.toml.encode(values).decode()


def said(stage: Stage, module: str, *arguments: str) -> str:
    """Standard output of a command that succeeds."""
    done = run_child([*program(module), *arguments], env=stage.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
