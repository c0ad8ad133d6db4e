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
import numpy as np

from bench.child import with_bytecode
from bench.edge import MemoryWatch, read_memory
from bench.machine import describe_machine
from bench.reporting import MEGA, Progress, Report
from bench.wire_side import WARM_BYTES
from coordinator.config import BlobsConfig
from coordinator.rounds.object_store import ObjectStore
from coordinator.security.broker import start_broker
from coordinator.security.broker.mosquitto import configuration, find_mosquitto
from coordinator.security.broker.process import Broker, BrokerProgram, claim_port
from fedvit.blobs import BlobStore
from fedvit.errors import ConfigError, FedvitError
from fedvit.transport.address import Address
from fedvit.wire.messages import Manifest
from fleet.processes import last_line_of, program
from tests.support.s3_server import KEYS, S3Server

BLOB_BYTES = 64 * 2**20
KILL_BYTES = 250_000_000
JSON_BYTES = 4_000_000
"""Bytes of the numbers as fp32; as JSON they are five times as large, and the slowest transport."""
ONE_MESSAGE = ("pickle", "json")
RECEIVERS = (1, 4)
OTHERS = ("tcp", "grpc", "pickle", "json")
TRANSPORTS = ("ours", *OTHERS)
ECHO_BYTES = 2048
ECHOES = 1000
PATIENCE_S = 120.0


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
        if self._read_line() != "ready":
            raise FedvitError("FV0001", f"the {self._what} did not start")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._read_line())
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

    def _read_line(self) -> str:
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
            raise FedvitError("FV0001", f"the {self._what} ended: {last_line_of(self._errors.read())}")
        return line


@contextlib.contextmanager
def _run_sides() -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        yield sides
    finally:
        for side in sides:
            side.kill()


class _Bench:
    """Measurements at one broker, with the files that all transports need."""

    def __init__(self, kind: str, folder: Path, blob_bytes: int) -> None:
        self.folder = folder
        self.blob_bytes = blob_bytes
        self.broker = start_broker(kind, folder / "broker", port=0)
        self.big = self.broker if kind == "embedded" else _start_unlimited_mosquitto(folder / "big")
        self.contents = {"": folder / "content", "json": folder / "numbers"}
        self.contents[""].write_bytes(secrets.token_bytes(blob_bytes))
        # numbers like those of weights; random bits would contain NaN
        numbers = 0.02 * np.random.default_rng(0).standard_normal(JSON_BYTES // 4)
        self.contents["json"].write_bytes(numbers.astype(np.float32).tobytes())

    def stop(self) -> None:
        for broker in {self.broker, self.big}:
            broker.stop()

    def measure_rate(self, transport: str, receivers: int) -> tuple[float, dict[str, int]]:
        """Measure MB/s of each receiver and, for "ours", memory and sent bytes."""
        if transport == "ours":
            return self._measure_ours(receivers, {})
        content = self.contents.get(transport, self.contents[""])
        size = content.stat().st_size
        options = {
            "content": str(content),
            "size": size,
            "receivers": receivers,
            "port": claim_port(),
            "broker": _format_url(self.big),
        }
        with _run_sides() as sides:
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

    def measure_store(self, server: S3Server) -> dict[str, float]:
        """Put content into the store, and measure MB/s of a plain GET of it and of our transfer."""
        config = server.config()
        s3, _ = self._measure_ours(1, {"store": msgspec.structs.asdict(config), "store_origin": config.origin})
        store = ObjectStore(config, "bench", BlobStore(self.folder / "put"))
        manifest = store.blobs.put(self.contents[""].read_bytes())
        options = {"url": _put(store, manifest), "size": manifest.size}
        with _run_sides() as sides:
            sides.append(Side("get", "receiver", **options))
            sides[0].await_ready()
            began = time.monotonic()
            sides[0].go()
            ended = sides[0].answer()["at"]
        return {"s3": s3, "get": manifest.size / MEGA / (ended - began)}

    def _measure_ours(self, receivers: int, more: dict[str, Any]) -> tuple[float, dict[str, int]]:
        """Measure our transfer; with the options of a store in `more`, the blob comes from it."""
        with self._make_blobs("sender", more=more) as (folder, manifests, sender), _run_sides() as sides:
            if more:
                store = ObjectStore(BlobsConfig(**more["store"]), "bench", BlobStore(folder / "sender"))
                for manifest in manifests:
                    _put(store, manifest)
            sides.append(sender(receivers))
            fields = [msgspec.structs.asdict(manifest) for manifest in manifests]
            options = {
                "folder": str(folder),
                "broker": _format_url(self.broker),
                "receivers": receivers,
                "manifests": fields,
            }
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
        kinds = ["VmRSS", *("RssAnon" for _ in sides)]
        above = [
            max(0, watch.peaks.get(kind, 0) - memory.get(kind, 0))
            for watch, memory, kind in zip(watches, before, kinds, strict=True)
        ]
        seen = {"broker": above[0], "sender": above[1], "receiver": max(above[2:]), "sent": sent}
        return manifests[1].size / MEGA / (ended - began), seen

    @contextlib.contextmanager
    def _make_blobs(
        self, name: str, size: int | None = None, more: dict[str, Any] | None = None
    ) -> Iterator[tuple[Path, list[Manifest], Callable[[int], Side]]]:
        """Yield (folder of stores, manifests of a small first blob and of the blob, starter of the sender)."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            store = BlobStore(Path(folder) / name)
            content = self.contents[""].read_bytes() if size is None else secrets.token_bytes(size)
            manifests = [store.put(secrets.token_bytes(WARM_BYTES)), store.put(content)]
            del content
            options = {"folder": folder, "broker": _format_url(self.broker), **(more or {})}
            yield Path(folder), manifests, lambda receivers: Side("ours", "sender", receivers=receivers, **options)

    def measure_kill(self, size: int) -> Report:
        with self._make_blobs("sender", size) as (folder, manifests, sender), _run_sides() as sides:
            sides.append(sender(1))
            fields = [msgspec.structs.asdict(manifest) for manifest in manifests]
            options = {"folder": str(folder), "broker": _format_url(self.broker), "manifests": fields, "receivers": 1}
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
        return {"size": size, "completed": True, "digest_right": right, "sent_over_size": sent / size,
                "took_s": at - began}  # fmt: skip

    def measure_echo(self) -> Report:
        options = {"broker": _format_url(self.broker), "size": ECHO_BYTES, "count": ECHOES}
        with _run_sides() as sides:
            sides += [Side("echo", "receiver", **options), Side("echo", "sender", **options)]
            for side in sides:
                side.await_ready()
            for side in sides:
                side.go()
            waits = sides[1].answer()["ms"]
        p50, p99 = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
        return {"bytes": ECHO_BYTES, "p50_ms": p50, "p99_ms": p99}


def run_wire_bench(
    brokers: Sequence[str] = ("mosquitto", "embedded"),
    *,
    rounds: int = 5,
    blob_bytes: int = BLOB_BYTES,
    kill_bytes: int = KILL_BYTES,
    progress: Progress = lambda line: None,
) -> Report:
    """Send blobs by each transport in turn, `rounds` times.

    Raises ConfigError when gRPC is not installed, FedvitError when a process fails.
    """
    if find_spec("grpc") is None:
        raise ConfigError("FV0002", "bench wire needs grpcio, which is not installed: pip install 'grpcio>=1.60'")
    home = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    reports = {}
    for kind in brokers:
        with tempfile.TemporaryDirectory(prefix="fleet-bench-", dir=home) as folder:
            bench = _Bench(kind, Path(folder), blob_bytes)
            try:
                k1, k4 = (_measure_broker(bench, count, rounds, progress) for count in RECEIVERS)
                progress(f"{kind}: small messages, and a killed broker")
                echo, kill = bench.measure_echo(), bench.measure_kill(kill_bytes)
                reports[kind] = {"kind": bench.broker.kind, "k1": k1, "k4": k4, "kill": kill, "echo": echo}
            finally:
                bench.stop()
    with tempfile.TemporaryDirectory(prefix="fleet-bench-", dir=home) as folder:
        store = _measure_store(Path(folder), blob_bytes, rounds, progress)
    return {
        "machine": describe_machine(), "blob_bytes": blob_bytes, "rounds": rounds, "stores_in": str(home),
        "brokers": reports, "store": store,
    }  # fmt: skip


def _measure_store(folder: Path, blob_bytes: int, rounds: int, progress: Progress) -> Report:
    """Measure blobs through an S3 server; control goes over mosquitto."""
    os.environ.update(KEYS)
    server, runs = S3Server(folder), {"s3": list[float](), "get": list[float]()}
    bench = _Bench("mosquitto", folder, blob_bytes)
    try:
        server.start()
        for number in range(rounds):
            rates = bench.measure_store(server)
            for name, rate in rates.items():
                runs[name].append(rate)
            figures = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
            progress(f"object store, round {number + 1}/{rounds}: {figures} MB/s")
    finally:
        bench.stop()
        server.kill()
    s3, get = median(runs["s3"]), median(runs["get"])
    return {"s3_mb_s": s3, "get_mb_s": get, "s3_over_get": s3 / get, "runs": runs}


def _put(store: ObjectStore, manifest: Manifest) -> str:
    """Put a blob into the store; returns a URL of it. Raises FedvitError if that takes long."""
    located: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    store.locate("receiver", manifest, located.put, failed=False)
    url = located.get(timeout=PATIENCE_S)
    if url is None:
        raise FedvitError("FV0001", f"the S3 server takes no blob: {store.take_lines()}")
    return url


def _measure_broker(bench: _Bench, receivers: int, rounds: int, progress: Progress) -> Report:
    runs: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    seen: list[dict[str, int]] = []
    failed: set[str] = set()
    for number in range(rounds):
        for name in [name for name in TRANSPORTS if name not in failed]:
            try:
                rate, memory = bench.measure_rate(name, receivers)
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

    def find_peak(name: str) -> int:
        return max(one[name] for one in seen)

    speeds = {f"{name}_mb_s": middle.get(name) for name in TRANSPORTS}
    ratios = {f"ours_over_{name}": middle["ours"] / middle[name] if name in middle else None for name in OTHERS}
    return {
        "receivers": receivers, **speeds, **ratios,
        "broker_peak_bytes": find_peak("broker"),  # resident, above the idle broker, during ours
        "sender_peak_bytes": find_peak("sender"),  # private memory above that before the transfer
        "receiver_peak_bytes": find_peak("receiver"),
        "sent_over_size": find_peak("sent") / bench.blob_bytes,  # payload bytes that the sender sent
        "runs": runs,
    }  # fmt: skip


def _start_unlimited_mosquitto(folder: Path) -> Broker:
    """Start mosquitto without limits on the size of messages, for a model in one message."""
    program_path = find_mosquitto()
    if program_path is None:
        raise FedvitError("FV0001", "mosquitto was not found on this machine")
    folder.mkdir(parents=True)
    address = Address("127.0.0.1", claim_port())
    lines = configuration("127.0.0.1", address, folder / "none").splitlines()
    limits = ("max_packet_size", "max_queued_bytes", "max_qos")
    config = folder / "mosquitto.conf"
    config.write_text("\n".join(line for line in lines if not line.startswith(limits)) + "\n")
    program = BrokerProgram([str(program_path), "-c", str(config)], os.environ, folder / "log")
    return Broker("mosquitto", address, program)


def _format_url(broker: Broker) -> str:
    return f"mqtt://{broker.address}"
