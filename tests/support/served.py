"""Models for a device that serves: a small network of handwritten digits, in bundles as a run leaves them."""

import io
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from edge_client.serving.drift import Charts, Observation
from edge_client.storage.models import DeviceModel, DeviceModels, ModelState
from export.bundle.assemble import Precision
from export.bundle.card import Origin
from export.bundle.read import Bundle, read_reference
from export.bundle.reference import PictureReference
from export.bundle.write import Bench, TrainedModel, write_bundle
from fedvit.data.folder import Files, Split
from fedvit.data.images import Pixels, normalise, unfold
from fedvit.program import Batch
from tests.support.dashboards import environment
from tests.support.waiting import wait_until

SIDE, PATCH = 16, 8
KNOWN = 8
"""Digits 0 to 7 are classes of the model, 8 and 9 are new."""
BATCH = Batch(image_size=SIDE, patch_size=PATCH, batch_size=4, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
COMMAND = [str(Path(sys.executable).with_name("edge-client")), "serve"]


class Digits(NamedTuple):
    """Pictures (n, 16, 16, 3) and their digits."""

    pixels: Pixels
    labels: np.ndarray

    def of(self, chosen: np.ndarray) -> "Digits":
        return Digits(self.pixels[chosen], self.labels[chosen])


class InMemory(Files):
    """Images that are not in files."""

    def __init__(self, pixels: Pixels) -> None:
        super().__init__([Path(str(number)) for number in range(len(pixels))])
        self.pixels = pixels

    def load(self, rows: np.ndarray, size: int) -> tuple[Pixels, np.ndarray]:
        assert size == SIDE
        return self.pixels[rows], np.ones(len(rows), np.bool_)


@cache
def digits() -> Digits:
    """Real handwriting of 8 x 8 pixels, twice as large."""
    loaded = load_digits()
    gray = (loaded.images * 255 / 16).round().astype(np.uint8).repeat(2, axis=1).repeat(2, axis=2)
    return Digits(np.repeat(gray[..., None], 3, axis=3), loaded.target)


class Parts(NamedTuple):
    """Pictures for training, for testing, and for the stream; and of new classes."""

    training: Digits
    test: Digits
    stream: Digits
    unknown: Digits


def split_digits(seed: int) -> Parts:
    """Deal out the digits anew."""
    every = digits()
    order = np.random.default_rng(seed).permutation(len(every.labels))
    known = order[every.labels[order] < KNOWN]
    parts = [every.of(rows) for rows in np.split(known, [700, 900])]
    return Parts(*parts, every.of(order[every.labels[order] >= KNOWN]))


@cache
def train(seed: int, *, shuffled: bool = False) -> TrainedModel:
    """Train a network of one hidden layer; with `shuffled` labels it is poisoned."""
    training = split_digits(seed).training
    labels = np.random.default_rng(seed).permutation(training.labels) if shuffled else training.labels
    network = MLPClassifier((32,), random_state=seed, max_iter=60, tol=1e-3)
    flat = unfold(normalise(training.pixels, BATCH), PATCH).reshape(len(labels), -1)
    network.fit(flat, labels)
    (first, second), (bias, last) = network.coefs_, network.intercepts_
    values = {"tensor/first": first, "tensor/bias": bias, "tensor/second": second, "tensor/last": last}
    return TrainedModel(
        graph=make_graph(*(len(value) for value in (bias, last))),
        values={name: value.astype(np.float32) for name, value in values.items()},
        batch=BATCH,
        classes=tuple(f"digit {number}" for number in range(KNOWN)),
        origin=Origin(run="digits", method="fedavg", model="made", round=1, device="desk", made_by="test 1"),
    )


def make_graph(hidden: int, classes: int) -> bytes:
    """Make the predict graph of the network."""
    count, width = BATCH.batch_size, 3 * SIDE * SIDE
    patches, values = width // (3 * PATCH * PATCH), 3 * PATCH * PATCH
    shapes = {
        "batch/patches": [count, patches, values], "tensor/first": [width, hidden], "tensor/bias": [hidden],
        "tensor/second": [hidden, classes], "tensor/last": [classes], "logits": [count, classes],
        "flat": [count, width], "product": [count, hidden], "sum": [count, hidden], "hidden": [count, hidden],
        "scores": [count, classes],
    }  # fmt: skip
    info = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Reshape", ["batch/patches", "shape"], ["flat"]),
        helper.make_node("MatMul", ["flat", "tensor/first"], ["product"]),
        helper.make_node("Add", ["product", "tensor/bias"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "tensor/second"], ["scores"]),
        helper.make_node("Add", ["scores", "tensor/last"], ["logits"]),
    ]
    inputs = [name for name in info if name.startswith(("batch/", "tensor/"))]
    inner = [info[name] for name in info if name not in (*inputs, "logits")]
    shape = numpy_helper.from_array(np.array([count, width], np.int64), "shape")
    graph = helper.make_graph(
        nodes, "digits", [info[name] for name in inputs], [info["logits"]], [shape], value_info=inner
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def write_digits(out: Path, seed: int, *, shuffled: bool = False) -> Path:
    """Write a bundle, measured on test images."""
    parts = split_digits(seed)
    splits = [Split(part.labels, InMemory(part.pixels)) for part in (parts.test, parts.training)]
    bench = Bench(images=splits[0], described="test images", threads=1, machine="test", cores=1, training=splits[1])
    write_bundle(out, train(seed, shuffled=shuffled), bench, precisions=[Precision.FP32])
    return out


@dataclass(frozen=True)
class Scene:
    """A model, its reference, and its observations of pictures."""

    bundle: Bundle
    reference: PictureReference

    @property
    def temperature(self) -> float:
        assert self.bundle.card.calibration
        return self.bundle.card.calibration.temperature

    def see(self, pixels: Pixels) -> Observation:
        run = self.bundle.run(pixels)
        probabilities = self.bundle.calibrate(run.logits[0])
        best = int(probabilities.argmax())
        return Observation(pixels, run.logits[0], run.features[0], best, float(probabilities[best]), False)

    def measure(self, pictures: Pixels) -> list[dict[str, float]]:
        charts = Charts(self.reference)
        return [charts.measure(self.see(pixels), self.temperature) for pixels in pictures]


def make_scene(folder: Path, seed: int) -> Scene:
    """Write a bundle of digits, and open it."""
    bundle = write_digits(folder, seed)
    reference = read_reference(bundle)
    assert reference
    return Scene(Bundle.open(bundle, None, 1), reference)


def add_model(state: Path, bundle: Path, round_number: int, kind: ModelState = "trained") -> str:
    """List a copy of a bundle as the model of a round."""
    models = DeviceModels(state)
    folder = models.new_folder()
    shutil.copytree(bundle, folder)
    model = DeviceModel(run="digits", round=round_number, method="fedavg", state=kind, changed_s=time.time())
    return models.add(model, folder).name


def encode_picture(pixels: Pixels, form: str = "JPEG") -> bytes:
    """Encode a picture, as a camera does."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form, quality=95)
    return stream.getvalue()


class Serving(NamedTuple):
    """A running `edge-client serve`."""

    process: subprocess.Popen[bytes]
    port: int

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Send a request; return status and document."""
        return request(self.port, method, path, body, headers)

    def predict(self, picture: bytes, top: int = 1) -> dict[str, Any]:
        status, answer = self.ask("POST", f"/predict?top={top}", picture)
        assert status == 200, answer
        return answer

    def health(self) -> dict[str, Any]:
        return self.ask("GET", "/health")[1]


def request(
    port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def start_serving(
    state: Path, log: Path, *options: str, port: int = 0, command: Sequence[str] = COMMAND, **variables: str
) -> Serving:
    """Start the program, and wait until it serves."""
    with log.open("ab") as file:
        begins_at = file.tell()
        line = [*command, "--state", str(state), "--threads", "1", "--listen", str(port), *options]
        process = subprocess.Popen(line, stderr=file, stdout=subprocess.PIPE, env={**environment(), **variables})

    def find_port() -> int:
        text = log.read_bytes()[begins_at:].decode()
        assert process.poll() is None, text
        return int(text.partition("serving  address=http://127.0.0.1:")[2].partition(" ")[0] or 0)

    return Serving(process, wait_until(find_port, lambda: log.read_text()))


@contextmanager
def serving(state: Path, log: Path, *options: str, command: Sequence[str] = COMMAND) -> Iterator[Serving]:
    """Serve until the context ends."""
    running = start_serving(state, log, *options, command=command)
    try:
        yield running
    finally:
        running.process.terminate()
        running.process.communicate(timeout=60)


class Supervisor:
    """Starts the program again when it has ended, as systemd does."""

    def __init__(self, state: Path, log: Path) -> None:
        self._state, self._log = state, log
        self.running = start_serving(state, log)
        self.port = self.running.port
        self.restarts_s: list[float] = []
        self.killed_at_s: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self.killed_at_s.append(time.monotonic())
        self.running.process.kill()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.running.process.kill()
        self.running.process.communicate()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            if self.running.process.poll() is not None:
                began_at = time.monotonic()
                self.running.process.communicate()
                self.running = start_serving(self._state, self._log, port=self.port)
                self.restarts_s.append(time.monotonic() - began_at)


class StreamAnswer(NamedTuple):
    """The answer to one picture of a stream."""

    at_s: float  # monotonic
    at: datetime  # UTC
    model: str


class PictureStream:
    """Asks a device that serves for five pictures a second, also while it does not answer."""

    EVERY_S = 0.2

    def __init__(self, supervisor: Supervisor, pictures: Sequence[bytes]) -> None:
        self.answers: list[StreamAnswer] = []
        self._supervisor, self._pictures = supervisor, itertools.cycle(pictures)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def find_gaps(self, *, killed: bool) -> list[float]:
        """Return the times between two answers, sorted: those in which the program itself was killed, or the others."""
        kills = self._supervisor.killed_at_s
        pairs = [(before.at_s, after.at_s) for before, after in itertools.pairwise(self.answers)]
        return sorted(after - before for before, after in pairs if any(before <= at <= after for at in kills) is killed)

    def _ask(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + self.EVERY_S, time.monotonic())
            with suppress(OSError, HTTPException, ValueError):
                status, answer = request(self._supervisor.port, "POST", "/predict", next(self._pictures))
                if status == 200:
                    self.answers.append(StreamAnswer(time.monotonic(), datetime.now(UTC), answer["model"]))
