"""`python -m bench wire`: speed of blob transfers, compared with TCP, gRPC, and one message over the same broker."""

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.bytecode import with_bytecode
from bench.edge import MemoryWatch, read_memory
from bench.machine import Machine, this_machine
from bench.s3_server import KEYS, S3Server
from bench.wire_side import WARM_BYTES
from coordinator.config import BlobsConfig
from coordinator.rounds.object_store import ObjectStore
from coordinator.security.broker import start_broker
from coordinator.security.broker.mosquitto import configuration, find_mosquitto
from coordinator.security.broker.process import Broker, claim_port
from fedvit.blobs import BlobStore
from fedvit.errors import ConfigError, FedvitError
from fedvit.transport.address import Address
from fedvit.wire.messages import Manifest
from fleet.processes import last_line_of, program

BLOB_BYTES = 64 * 2**20
KILL_BYTES = 250_000_000
JSON_BYTES = 4_000_000
"""Bytes of the numbers as fp32; as JSON they are five times as large, and the slowest transport."""
ONE_MESSAGE = ("pickle", "json")
RECEIVERS = (1, 4)
TRANSPORTS = ("tcp", "ours", "grpc", "pickle", "json")
ECHO_BYTES = 2048
ECHOES = 1000
PATIENCE_S = 120.0
MEGA = 1e6


class Speeds(Struct, frozen=True, kw_only=True):
    """Medians of MB/s of each receiver of one blob, by the time of the last receiver. None: not measured."""

    receivers: int
    ours_mb_s: float
    tcp_mb_s: float
    grpc_mb_s: float
    pickle_mb_s: float | None
    json_mb_s: float | None  # of the numbers as fp32
    ours_over_tcp: float
    ours_over_grpc: float
    ours_over_pickle: float | None
    ours_over_json: float | None
    broker_peak_bytes: int  # resident, above the idle broker, during ours
    sender_peak_bytes: int  # private memory above that before the transfer
    receiver_peak_bytes: int
    sent_over_size: float  # payload bytes that the sender sent / size of the blob
    runs: dict[str, tuple[float, ...]]


class Echo(Struct, frozen=True, kw_only=True):
    bytes: int
    p50_ms: float
    p99_ms: float


class Kill(Struct, frozen=True, kw_only=True):
    """The broker is killed (kill -9) after a third of a blob, and restarted."""

    size: int
    completed: bool
    digest_right: bool
    sent_over_size: float
    took_s: float


class BrokerReport(Struct, frozen=True, kw_only=True):
    kind: str
    k1: Speeds
    k4: Speeds
    kill: Kill | None
    echo: Echo | None


class StoreSpeeds(Struct, frozen=True, kw_only=True):
    """MB/s of one receiver of a blob that is in an S3 server on this machine; medians."""

    s3_mb_s: float  # ours, by a signed URL
    get_mb_s: float  # a plain GET of such a URL, into memory
    s3_over_get: float
    runs: dict[str, tuple[float, ...]]


class WireReport(Struct, frozen=True, kw_only=True):
    machine: Machine
    blob_bytes: int
    rounds: int
    stores_in: str  # where blobs are read from and written to
    brokers: dict[str, BrokerReport]  # mosquitto, embedded
    store: StoreSpeeds


class Side:
    """One end of a transfer in its own process."""

    def __init__(self, transport: str, role: str, **options: Any) -> None:
        self._what = f"{role} of {transport}"
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        arguments = [transport, role, json.dumps({"transport": transport, **options})]
        self.process = subprocess.Popen(
            with_bytecode([*program("bench.wire_side"), *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def await_ready(self) -> None:
        if self._line() != "ready":
            raise FedvitError(f"the {self._what} did not start")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr] # both are pipes

    def _line(self) -> str:
        """The next line of its output. Raises FedvitError, with the last line of its errors, when it has ended."""
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            line = self.process.stdout.readline().strip()
        finally:
            timer.cancel()
        if not line:
            self.process.wait()
            self._errors.seek(0)
            raise FedvitError(f"the {self._what} ended: {last_line_of(self._errors.read())}")
        return line


@contextlib.contextmanager
def _sides() -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        yield sides
    finally:
        for side in sides:
            side.kill()


class _Bench:
    """One broker, and the files that all transports need."""

    def __init__(self, kind: str, folder: Path, blob_bytes: int) -> None:
        self.folder = folder
        self.blob_bytes = blob_bytes
        self.broker = start_broker(kind, folder / "broker", port=0)
        self.big = self.broker if kind == "embedded" else _mosquitto_for_big_messages(folder / "big")
        self.contents = {"": folder / "content", "json": folder / "numbers"}
        self.contents[""].write_bytes(secrets.token_bytes(blob_bytes))
        # numbers like those of weights; random bits would contain NaN
        import numpy as np

        numbers = 0.02 * np.random.default_rng(0).standard_normal(JSON_BYTES // 4)
        self.contents["json"].write_bytes(numbers.astype(np.float32).tobytes())

    def stop(self) -> None:
        for broker in {self.broker, self.big}:
            broker.stop()

    def rate(self, transport: str, receivers: int) -> tuple[float, dict[str, int]]:
        """MB/s of each receiver and, for "ours", memory and sent bytes."""
        if transport == "ours":
            return self._ours(receivers, {})
        content = self.contents.get(transport, self.contents[""])
        size = content.stat().st_size
        options = {
            "content": str(content),
            "size": size,
            "receivers": receivers,
            "port": claim_port(),
            "broker": _url(self.big),
        }
        with _sides() as sides:
            if transport == "tcp":  # the server accepts all receivers before it is ready
                sides.append(Side(transport, "sender", **options))
            sides += [Side(transport, "receiver", name=f"r{number}", **options) for number in range(receivers)]
            if transport != "tcp":
                sides.insert(0, Side(transport, "sender", **options))
            for side in sides:
                side.await_ready()
            began = time.monotonic()
            for side in reversed(sides):
                side.go()
            ended = max(side.answer()["at"] for side in sides[1:])
        return size / MEGA / (ended - began), {}

    def store_rates(self, server: S3Server) -> dict[str, float]:
        """MB/s of a plain GET, and of ours, of the same content; it is put into the store before."""
        config = server.config()
        store = {"store": msgspec.structs.asdict(config), "store_origin": config.origin}
        s3, _ = self._ours(1, store)
        found = ObjectStore(config, "bench", BlobStore(self.folder / "put"))
        manifest = found.blobs.put(self.contents[""].read_bytes())
        options = {"url": _put(found, manifest), "size": manifest.size}
        with _sides() as sides:
            sides.append(Side("get", "receiver", **options))
            sides[0].await_ready()
            began = time.monotonic()
            sides[0].go()
            ended = sides[0].answer()["at"]
        return {"s3": s3, "get": manifest.size / MEGA / (ended - began)}

    def _ours(self, receivers: int, more: dict[str, Any]) -> tuple[float, dict[str, int]]:
        """With the options of a store in `more`, the blob comes from it."""
        with self._blobs("sender", more=more) as (folder, manifests, sender), _sides() as sides:
            if more:
                store = ObjectStore(BlobsConfig(**more["store"]), "bench", BlobStore(folder / "sender"))
                for manifest in manifests:
                    _put(store, manifest)
            sides.append(sender(receivers))
            given = [msgspec.structs.asdict(manifest) for manifest in manifests]
            options = {"folder": str(folder), "broker": _url(self.broker), "receivers": receivers, "manifests": given}
            options |= more
            names = [f"r{number}" for number in range(receivers)]
            sides[0].await_ready()
            sides += [Side("ours", "receiver", name=name, **options) for name in names]
            for side in sides[1:]:
                side.await_ready()
            pids = [self.broker.pid, *(side.process.pid for side in sides)]
            before = [read_memory(pid) for pid in pids]
            with contextlib.ExitStack() as watching:
                watches = [watching.enter_context(MemoryWatch(pid, "VmRSS", "RssAnon")) for pid in pids]
                began = time.monotonic()
                for side in sides[1:]:
                    side.go()
                ended = max(side.answer()["at"] for side in sides[1:])
            sides[0].end_input()
            sent = sides[0].answer()["sent_bytes"]
        fields = ["VmRSS", *("RssAnon" for _ in sides)]
        above = [
            max(0, watch.peaks.get(field, 0) - memory.get(field, 0))
            for watch, memory, field in zip(watches, before, fields, strict=True)
        ]
        seen = {"broker": above[0], "sender": above[1], "receiver": max(above[2:]), "sent": sent}
        return manifests[1].size / MEGA / (ended - began), seen

    @contextlib.contextmanager
    def _blobs(
        self, name: str, size: int | None = None, more: dict[str, Any] | None = None
    ) -> Iterator[tuple[Path, list[Manifest], Callable[[int], Side]]]:
        """(folder of blob stores, manifests of a small first blob and of the blob, function that starts the sender)."""
        with tempfile.TemporaryDirectory(dir=self.folder) as made:
            store = BlobStore(Path(made) / name)
            content = self.contents[""].read_bytes() if size is None else secrets.token_bytes(size)
            manifests = [store.put(secrets.token_bytes(WARM_BYTES)), store.put(content)]
            del content
            options = {"folder": made, "broker": _url(self.broker), **(more or {})}
            yield Path(made), manifests, lambda receivers: Side("ours", "sender", receivers=receivers, **options)

    def kill(self, size: int) -> Kill:
        with self._blobs("sender", size) as (folder, manifests, sender), _sides() as sides:
            sides.append(sender(1))
            given = [msgspec.structs.asdict(manifest) for manifest in manifests]
            options = {"folder": str(folder), "broker": _url(self.broker), "manifests": given, "receivers": 1}
            sides[0].await_ready()
            sides.append(Side("ours", "receiver", name="r0", report_third=True, **options))
            sides[1].await_ready()
            began = time.monotonic()
            sides[1].go()
            assert sides[1].answer()["third"]
            os.kill(self.broker.pid, signal.SIGKILL)
            while not self.broker.tend():
                time.sleep(0.01)
            at = sides[1].answer()["at"]
            sides[0].end_input()
            sent = sides[0].answer()["sent_bytes"]
            # a store verifies the digest before it names a blob; the content is compared all the same
            right = BlobStore(folder / "r0").get(manifests[1].digest) == BlobStore(folder / "sender").get(
                manifests[1].digest
            )
        return Kill(size=size, completed=True, digest_right=right, sent_over_size=sent / size, took_s=at - began)

    def echo(self) -> Echo:
        options = {"broker": _url(self.broker), "size": ECHO_BYTES, "count": ECHOES}
        with _sides() as sides:
            sides += [Side("echo", "receiver", **options), Side("echo", "sender", **options)]
            for side in sides:
                side.await_ready()
            for side in sides:
                side.go()
            waits = sides[1].answer()["ms"]
        return Echo(bytes=ECHO_BYTES, p50_ms=waits[len(waits) // 2], p99_ms=waits[int(len(waits) * 0.99)])


def run_wire_bench(
    brokers: Sequence[str] = ("mosquitto", "embedded"),
    *,
    rounds: int = 5,
    blob_bytes: int = BLOB_BYTES,
    kill_bytes: int = KILL_BYTES,
    progress: Callable[[str], None] = lambda line: None,
) -> WireReport:
    """Send blobs by each transport in turn, `rounds` times.

    Raises ConfigError when gRPC is not installed, FedvitError when a process fails.
    """
    if find_spec("grpc") is None:
        raise ConfigError("bench wire needs grpcio, which is not installed: pip install 'grpcio>=1.60'")
    home = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    reports = {}
    for kind in brokers:
        with tempfile.TemporaryDirectory(prefix="fleet-bench-", dir=home) as made:
            bench = _Bench(kind, Path(made), blob_bytes)
            try:
                k1, k4 = (_speeds(bench, count, rounds, progress) for count in RECEIVERS)
                progress(f"{kind}: small messages, and a killed broker")
                echo, kill = bench.echo(), bench.kill(kill_bytes)
                reports[kind] = BrokerReport(kind=bench.broker.kind, k1=k1, k4=k4, kill=kill, echo=echo)
            finally:
                bench.stop()
    with tempfile.TemporaryDirectory(prefix="fleet-bench-", dir=home) as made:
        store = _store_speeds(Path(made), blob_bytes, rounds, progress)
    return WireReport(
        machine=this_machine(), blob_bytes=blob_bytes, rounds=rounds, stores_in=str(home), brokers=reports, store=store
    )


def _store_speeds(folder: Path, blob_bytes: int, rounds: int, progress: Callable[[str], None]) -> StoreSpeeds:
    """Blobs through an S3 server; control goes over mosquitto."""
    os.environ.update(KEYS)
    server, runs = S3Server(folder), {"s3": list[float](), "get": list[float]()}
    bench = _Bench("mosquitto", folder, blob_bytes)
    try:
        server.start()
        for number in range(rounds):
            rates = bench.store_rates(server)
            for name, rate in rates.items():
                runs[name].append(rate)
            figures = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
            progress(f"object store, round {number + 1}/{rounds}: {figures} MB/s")
    finally:
        bench.stop()
        server.kill()
    s3, get = median(runs["s3"]), median(runs["get"])
    single = {name: tuple(rates) for name, rates in runs.items()}
    return StoreSpeeds(s3_mb_s=s3, get_mb_s=get, s3_over_get=s3 / get, runs=single)


def _put(store: ObjectStore, manifest: Manifest) -> str:
    """Put a blob into the store; returns a URL of it. Raises FedvitError if that takes long."""
    located: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    store.locate("receiver", manifest, located.put, failed=False)
    url = located.get(timeout=PATIENCE_S)
    if url is None:
        raise FedvitError(f"the S3 server takes no blob: {store.take_lines()}")
    return url


def _speeds(bench: _Bench, receivers: int, rounds: int, progress: Callable[[str], None]) -> Speeds:
    runs: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    seen: list[dict[str, int]] = []
    failed: set[str] = set()
    for number in range(rounds):
        for name in [name for name in TRANSPORTS if name not in failed]:
            try:
                rate, memory = bench.rate(name, receivers)
            except FedvitError as error:
                if name not in ONE_MESSAGE:
                    raise
                failed.add(name)  # some brokers refuse a message of 64 MB
                progress(f"{bench.broker.kind}, {receivers} receivers: {error}")
                continue
            runs[name].append(rate)
            seen += [memory] if memory else []
        figures = ", ".join(f"{name} {rates[-1]:.1f}" for name, rates in runs.items() if rates)
        progress(f"{bench.broker.kind}, {receivers} receivers, round {number + 1}/{rounds}: {figures} MB/s")
    middle = {name: median(rates) for name, rates in runs.items() if rates and name not in failed}

    def peak(name: str) -> int:
        return max(one[name] for one in seen)

    return Speeds(
        receivers=receivers,
        ours_mb_s=middle["ours"],
        tcp_mb_s=middle["tcp"],
        grpc_mb_s=middle["grpc"],
        pickle_mb_s=middle.get("pickle"),
        json_mb_s=middle.get("json"),
        ours_over_tcp=middle["ours"] / middle["tcp"],
        ours_over_grpc=middle["ours"] / middle["grpc"],
        ours_over_pickle=middle["ours"] / middle["pickle"] if "pickle" in middle else None,
        ours_over_json=middle["ours"] / middle["json"] if "json" in middle else None,
        broker_peak_bytes=peak("broker"),
        sender_peak_bytes=peak("sender"),
        receiver_peak_bytes=peak("receiver"),
        sent_over_size=peak("sent") / bench.blob_bytes,
        runs={name: tuple(rates) for name, rates in runs.items()},
    )


def _mosquitto_for_big_messages(folder: Path) -> Broker:
    """The same mosquitto without limits on the size of messages, for a model in one message."""
    program_path = find_mosquitto()
    if program_path is None:
        raise FedvitError("mosquitto was not found on this machine")
    folder.mkdir(parents=True)
    address = Address("127.0.0.1", claim_port())
    lines = configuration("127.0.0.1", address, folder / "none").splitlines()
    limits = ("max_packet_size", "max_queued_bytes", "max_qos")
    config = folder / "mosquitto.conf"
    config.write_text("\n".join(line for line in lines if not line.startswith(limits)) + "\n")
    return Broker("mosquitto", address, [str(program_path), "-c", str(config)], os.environ, folder / "log")


def _url(broker: Broker) -> str:
    return f"mqtt://{broker.address}"


# --- for a terminal -----------------------------------------------------------------------------------


def wire_table(report: WireReport) -> RenderableType:
    parts: list[RenderableType] = []
    for broker in report.brokers.values():
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
        for heading in ("receivers", *(f"{name} MB/s" for name in ("ours", "tcp", "grpc", "pickle", "json"))):
            table.add_column(heading, justify="right")
        for heading in ("/ tcp", "/ grpc", "/ pickle", "/ json", "broker MB", "sender MB", "receiver MB", "sent"):
            table.add_column(heading, justify="right")
        for one in (broker.k1, broker.k4):
            rates = (one.ours_mb_s, one.tcp_mb_s, one.grpc_mb_s, one.pickle_mb_s, one.json_mb_s)
            ratios = (one.ours_over_tcp, one.ours_over_grpc, one.ours_over_pickle, one.ours_over_json)
            sizes = (one.broker_peak_bytes, one.sender_peak_bytes, one.receiver_peak_bytes)
            table.add_row(
                str(one.receivers),
                *("" if rate is None else f"{rate:.1f}" if rate < 10 else f"{rate:.0f}" for rate in rates),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                *(f"{size / MEGA:.1f}" for size in sizes),
                f"{one.sent_over_size:.3f}",
            )
        parts += [Text(broker.kind, style="bold"), table]
        if broker.echo:
            parts.append(Text(f"2 kB there and back: p50 {broker.echo.p50_ms:.2f} ms, p99 {broker.echo.p99_ms:.2f} ms"))
        if broker.kill:
            kill = broker.kill
            done = "completed" if kill.completed and kill.digest_right else "NOT completed"
            parts.append(Text(f"broker killed in {kill.size / MEGA:.0f} MB: {done}, sent {kill.sent_over_size:.3f} x"))
        parts.append(Text())
    store = report.store
    rates_text = f"ours {store.s3_mb_s:.0f} MB/s, a plain GET {store.get_mb_s:.0f} MB/s, ratio {store.s3_over_get:.2f}"
    return Group(*parts, Text("object store (S3)", style="bold"), Text(rates_text))
