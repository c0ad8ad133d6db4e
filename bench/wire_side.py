"""One end of a transfer, in its own process: `python -m bench.wire_side TRANSPORT ROLE OPTIONS`.

It prints `ready` when it is connected, waits for a line on standard input, and prints one JSON object at its end; `at`
is the machine's monotonic clock when the last byte had arrived and was usable.
"""

import io
import json
import pickle
import queue
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from coordinator.config import BlobsConfig
from coordinator.rounds.object_store import ObjectStore
from fedvit.blobs import BlobStore
from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import Manifest
from fleet.datasets.pickles import unpickle
from tests.support.peers import Peer

PIECE_BYTES = 1_000_000
WARM_BYTES = 1000
"""Size of a first blob, so that all connections are open when the clock starts."""
PATIENCE_S = 300.0


def main() -> None:
    transport, role, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    ENDS[transport, role](options)


def print_ready() -> None:
    """Print `ready`, and wait for the line that starts the measurement."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


def print_report(**figures: Any) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


# --- ours ---------------------------------------------------------------------------------------------


def _make_peer(name: str, options: dict[str, Any], places: ObjectStore | None = None) -> Peer:
    """Make a client with fedvit's exchange of blobs, and connect it."""
    transport = MqttTransport(SimpleQueue(), Address.parse(options["broker"]), name)
    peer = Peer("", name, transport, Path(options["folder"]), places)
    peer.receivers = int(options["receivers"])
    peer.exchange.store_origin = options.get("store_origin", "")
    _run_until(peer, lambda: peer.connected)
    return peer


def _run_until(peer: Peer, over: Callable[[], bool]) -> None:
    while not over():
        peer.step(wait_s=0.05)


def _check_finished(peer: Peer, count: int) -> bool:
    """Return whether so many blobs have come. Raises the error of one that failed."""
    for _, error in peer.finished:
        if error:
            raise error
    return len(peer.finished) == count


def send_ours(options: dict[str, Any]) -> None:
    peer = _make_peer("sender", options, _make_object_store(options))
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    _run_until(peer, stopped.is_set)
    print_report(sent_bytes=peer.transport.sent_bytes)


def _make_object_store(options: dict[str, Any]) -> ObjectStore | None:
    if "store" not in options:
        return None
    return ObjectStore(BlobsConfig(**options["store"]), "bench", BlobStore(Path(options["folder"]) / "sender"))


def receive_ours(options: dict[str, Any]) -> None:
    peer = _make_peer(options["name"], options)
    warm, manifest = (Manifest(**given) for given in options["manifests"])
    peer.fetch_from("sender", warm)
    _run_until(peer, lambda: _check_finished(peer, 1))
    print_ready()
    peer.fetch_from("sender", manifest)
    if options.get("report_third"):
        _run_until(peer, lambda: peer.transport.received_bytes > manifest.size / 3)
        print_report(third=True)
    _run_until(peer, lambda: _check_finished(peer, 2))
    print_report(at=time.monotonic(), received_bytes=peer.transport.received_bytes)
    peer.transport.close()


# --- what it is compared with -------------------------------------------------------------------------


def send_tcp(options: dict[str, Any]) -> None:
    content = Path(options["content"]).read_bytes()
    with socket.create_server(("127.0.0.1", options["port"])) as server:
        taken = [server.accept()[0] for _ in range(options["receivers"])]
    print_ready()
    threads = [threading.Thread(target=one.sendall, args=(content,)) for one in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print_report(sent=True)


def receive_tcp(options: dict[str, Any]) -> None:
    buffer = bytearray(options["size"])
    opened = _connect_patiently(lambda: socket.create_connection(("127.0.0.1", options["port"])))
    print_ready()
    view = memoryview(buffer)
    while view:
        view = view[opened.recv_into(view[:PIECE_BYTES]) :]
    print_report(at=time.monotonic())


def receive_get(options: dict[str, Any]) -> None:
    """A plain GET of a signed URL, into memory."""
    buffer = memoryview(bytearray(options["size"]))
    print_ready()
    with urllib.request.urlopen(options["url"], timeout=PATIENCE_S) as answer:
        while buffer:
            buffer = buffer[answer.readinto(buffer[:PIECE_BYTES]) :]
    print_report(at=time.monotonic())


def send_grpc(options: dict[str, Any]) -> None:
    content = Path(options["content"]).read_bytes()

    def pieces(request: bytes, context: Any) -> Iterator[bytes]:
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES]

    server = grpc.server(ThreadPoolExecutor(8))
    method = grpc.unary_stream_rpc_method_handler(pieces)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"Get": method}),))
    server.add_insecure_port(f"127.0.0.1:{options['port']}")
    server.start()
    print_ready()
    sys.stdin.read()
    server.stop(0)
    print_report(sent=True)


def receive_grpc(options: dict[str, Any]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{options['port']}") as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        print_ready()
        buffer, filled = bytearray(options["size"]), 0
        for piece in channel.unary_stream("/bench/Get")(b""):
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        assert filled == options["size"]
        print_report(at=time.monotonic())


def _start_client(options: dict[str, Any], name: str) -> Any:
    """paho's own client, for one huge message."""
    client = Client(CallbackAPIVersion.VERSION2, name)
    address = Address.parse(options["broker"])
    client.connect(address.host, address.port)
    client.loop_start()
    return client


def send_message(options: dict[str, Any]) -> None:
    model = {"weights": np.frombuffer(Path(options["content"]).read_bytes(), np.float32)}
    client = _start_client(options, "message-sender")
    print_ready()
    raw = _serialize(options["transport"], model)
    client.publish("model", raw, qos=2).wait_for_publish(PATIENCE_S)
    print_report(sent_bytes=len(raw))
    client.disconnect()


def receive_message(options: dict[str, Any]) -> None:
    received: queue.Queue[bytes] = queue.Queue()
    subscribed = threading.Event()
    client = _start_client(options, options["name"])
    client.on_message = lambda client, userdata, message: received.put(message.payload)
    client.on_subscribe = lambda *_: subscribed.set()
    client.subscribe("model", 2)
    subscribed.wait(30)
    print_ready()
    model = _deserialize(options["transport"], received.get(timeout=PATIENCE_S))
    at = time.monotonic()
    assert model["weights"].nbytes == options["size"]
    print_report(at=at)
    client.disconnect()


def _serialize(transport: str, model: dict[str, Any]) -> bytes:
    if transport == "pickle":
        return pickle.dumps(model)
    return json.dumps({name: values.tolist() for name, values in model.items()}).encode()


def _deserialize(transport: str, raw: bytes) -> dict[str, Any]:
    if transport == "pickle":
        return unpickle(io.BytesIO(raw))  # safe, unlike pickle.loads, which other frameworks use
    return {name: np.array(values, np.float32) for name, values in json.loads(raw).items()}


# --- small messages -----------------------------------------------------------------------------------


def send_echo(options: dict[str, Any]) -> None:
    """Send questions, and measure the time until each answer."""
    transport = _connect(options, "asker", "answer")
    payload = bytes(options["size"])
    print_ready()
    waits = []
    for _ in range(options["count"] + 20):
        began = time.perf_counter()
        transport.publish("question", payload)
        _receive(transport)
        waits.append(time.perf_counter() - began)
    print_report(ms=sorted(1000 * wait for wait in waits[20:]))
    transport.close()


def receive_echo(options: dict[str, Any]) -> None:
    transport = _connect(options, "answerer", "question")
    print_ready()
    for _ in range(options["count"] + 20):
        transport.publish("answer", _receive(transport))
    time.sleep(0.2)  # for the last answer
    print_report(at=time.monotonic())
    transport.close()


def _connect(options: dict[str, Any], name: str, topic: str) -> MqttTransport:
    transport = MqttTransport(SimpleQueue(), Address.parse(options["broker"]), name)
    transport.subscribe(topic, 1)
    transport.open()
    while not isinstance(transport.inbox.get(timeout=30), Connected):
        pass
    return transport


def _receive(transport: MqttTransport) -> bytes:
    while not isinstance(event := transport.inbox.get(timeout=30), Received):
        pass
    return event.payload


def _connect_patiently(connect: Callable[[], socket.socket]) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return connect()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


ENDS: dict[tuple[str, str], Callable[[dict[str, Any]], None]] = {
    ("ours", "sender"): send_ours,
    ("ours", "receiver"): receive_ours,
    ("get", "receiver"): receive_get,
    ("tcp", "sender"): send_tcp,
    ("tcp", "receiver"): receive_tcp,
    ("grpc", "sender"): send_grpc,
    ("grpc", "receiver"): receive_grpc,
    ("pickle", "sender"): send_message,
    ("pickle", "receiver"): receive_message,
    ("json", "sender"): send_message,
    ("json", "receiver"): receive_message,
    ("echo", "sender"): send_echo,
    ("echo", "receiver"): receive_echo,
}

if __name__ == "__main__":
    main()
