"""The processes of the loop's demo: a service with a broker; for each device one that trains and one that answers."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from coordinator.api import open_existing_record
from coordinator.model_view import ModelView, list_models, read_model
from coordinator.security.broker.process import claim_port
from edge_client.commands.options import BROKER_VARIABLE
from edge_client.storage.serving import read_serving
from fedvit.data.images import Indices
from fedvit.errors import FedvitError
from fleet.loop.labels import give_labels
from fleet.loop.pictures import EVERY_S, ArrivingPictures, PicturePlan
from fleet.processes import Fleet, last_line, program

SITES = {"garden": "berlin", "gate": "munich"}
"""Site of each device, by its name."""
LABELS = 20
"""Pictures to which each owner gives a label."""
STEP_S = 240.0
"""Longest wait for a step; only one that fails takes so long."""
LOOK_EVERY_S = 0.2


class LoopDevice(NamedTuple):
    """One device: its pictures, and the files of its two processes."""

    name: str
    pictures: ArrivingPictures
    plan: PicturePlan
    state: Path
    answers: Path

    def read_answers(self) -> list[dict[str, Any]]:
        """Return the lines that are whole."""
        if not self.answers.is_file():
            return []
        return [msgspec.json.decode(line) for line in self.answers.read_bytes().split(b"\n")[:-1]]

    def read_drift(self) -> list[str]:
        """Return the measures that have drifted."""
        serving = read_serving(self.state)
        return sorted(serving.drift) if serving else []

    def is_served_by(self, model: str) -> bool:
        """Return whether a model answers."""
        serving = read_serving(self.state)
        return serving is not None and serving.name == model


class LoopFleet:
    """The processes of the demo, and the waits for what they do."""

    def __init__(self, home: Path, devices: Sequence[LoopDevice], fleet: Fleet, test_share: float) -> None:
        self.home, self.devices, self.runs = home, devices, home / "runs"
        self._test_share = test_share
        self._fleet = fleet
        self._port = claim_port()
        self._environment = {BROKER_VARIABLE: f"mqtt://127.0.0.1:{self._port}"}

    def start(self) -> None:
        """Start the service, and the processes that train."""
        serve = ["serve", "--runs", str(self.runs), "--broker", "embedded", "--broker.port", str(self._port)]
        self._start("service", "coordinator.cli", serve)
        for device in self.devices:
            own = ["--id", device.name, "--label", f"site={SITES[device.name]}", "--test-share", str(self._test_share)]
            self._start(device.name, "edge_client.cli", [*self._folders(device), *own])
        self.wait(lambda: (self.runs / "fedvit.db").is_file(), "the service has no record")

    def start_dashboard(self) -> str | None:
        """Start the dashboard; return its address, None if its packages are not installed."""
        if find_spec("nicegui") is None:
            return None
        self._start("dashboard", "coordinator.cli", ["dashboard", "--runs", str(self.runs), "--port", "0"])
        found = self.wait(lambda: list(self.runs.glob("dashboard-*.url")), "the dashboard does not open")
        address: str = found[0].read_text().strip()
        return address

    def start_serving(self, device: LoopDevice) -> None:
        """Start the process that answers pictures without a label."""
        watch = ["--listen", str(claim_port()), "--watch", str(device.pictures.unlabelled)]
        results = ["--results", str(device.answers)]
        self._start(f"{device.name}-serve", "edge_client.cli", ["serve", *self._folders(device), *watch, *results])
        self.wait(lambda: read_serving(device.state), f"{device.name} does not serve")

    def train(self, run: str, values: dict[str, Any]) -> ModelView:
        """Submit a run, and wait for the model that its devices have compared. Raises FedvitError if it fails."""
        file = self.home / f"{run}.toml"
        file.write_bytes(msgspec.toml.encode(values))
        self._start(f"submit-{run}", "coordinator.cli", ["submit", str(file), "--run", run, "--runs", str(self.runs)])
        if not self._fleet.wait([f"submit-{run}"], STEP_S) or self._fleet.exit_codes()[f"submit-{run}"]:
            raise self._make_error(f"run {run} was not submitted: {self._last_line(f'submit-{run}')}")

        def look() -> ModelView | None:
            with open_existing_record(self.runs) as store:
                found = [model for model in list_models(store) if model.run == run]
                if not found and (record := store.runs.read(run)).status in ("failed", "cancelled"):
                    raise self._make_error(f"run {run} is {record.status}: {record.reason}")
            return found[0] if found else None

        model: ModelView = self.wait(look, f"run {run} makes no model")
        if model.stage == "challenger":
            raise self._make_error(f"model {model.model} stays a challenger: {model.reason}")
        return model

    def wait_for_champion(self, model: str) -> None:
        """Wait until a model is promoted on all devices."""

        def look() -> bool:
            with open_existing_record(self.runs) as store:
                found = read_model(store, model)
            return found.stage == "champion" and found.states.get("champion") == len(self.devices)

        self.wait(look, f"model {model} is not promoted")

    def wait_for_answers(self, model: str) -> None:
        """Wait until all devices answer with a model."""
        self.wait(lambda: all(each.is_served_by(model) for each in self.devices), f"{model} does not answer")

    def wait_for_drift(self, devices: int) -> None:
        """Wait until the coordinator knows of drift on so many devices."""

        def look() -> bool:
            with open_existing_record(self.runs) as store:
                return store.models.count_drifted() >= devices

        self.wait(look, "the coordinator does not hear of drift")

    def label(self, device: LoopDevice, classes: Sequence[str]) -> Counter[str]:
        """Give labels to the pictures of which the device is least sure."""
        command = [*program("edge_client.cli"), "label", *self._folders(device), "--least-sure"]
        return give_labels(command, self._environment, classes, device.pictures.find_class, LABELS)

    def show(self, rows_of: Callable[[LoopDevice], Indices], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Let pictures arrive at all devices, and wait until they are answered."""
        stop, wanted = threading.Event(), {device.name: len(device.read_answers()) for device in self.devices}
        cameras = []
        for device in self.devices:
            rows = rows_of(device).tolist()
            wanted[device.name] += len(rows)
            cameras.append(threading.Thread(target=device.pictures.receive, args=(rows, EVERY_S, stop), daemon=True))
            cameras[-1].start()

        def look() -> bool:
            meanwhile()
            return all(len(device.read_answers()) >= wanted[device.name] for device in self.devices)

        try:
            self.wait(look, "pictures are not answered")
        finally:
            stop.set()
            for camera in cameras:
                camera.join()

    def wait(self, look: Callable[[], Any], fault: str) -> Any:
        """Return the first true value of `look()`. Raises FedvitError if none comes, or a process has ended."""
        until = time.monotonic() + STEP_S
        while not (value := look()):
            ended = [name for name in self._fleet.exit_codes() if not name.startswith("submit-")]
            if ended:
                raise self._make_error(f"{ended[0]} has ended: {self._last_line(ended[0])}")
            if time.monotonic() > until:
                raise self._make_error(f"{fault} within {STEP_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
        return value

    def _folders(self, device: LoopDevice) -> list[str]:
        return ["--data", str(device.pictures.folder), "--state", str(device.state), "--threads", "1"]

    def _start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        self._fleet.start(name, [*program(module), *arguments], self._log(name), environment=self._environment)

    def _log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    def _last_line(self, name: str) -> str:
        return last_line(self._log(name))

    def _make_error(self, what: str) -> FedvitError:
        return FedvitError("FV2128", f"{what}; logs: {self.home / 'logs'}")
