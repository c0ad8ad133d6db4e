"""A federation to attack: mosquitto, a coordinator and one honest device, each in its own process."""

import secrets
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from bench.edge import make_noise_folder
from coordinator.record.record import Record, open_record
from coordinator.record.tables import ResultRecord
from coordinator.security.folder import make_token
from edge_client.link.join import join
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import CoordinatorState, DeviceState, Hello, decode, encode
from fedvit.wire.topics import Topics
from fleet.processes import Fleet, last_line, program
from tests.support.access import Parties
from tests.support.corpus import SETTINGS
from tests.support.deployments import make_deployment, make_device
from tests.support.hostile import Peer
from tests.support.mqtt_client import Client
from tests.support.waiting import WAIT_S, wait_until

RUN = "pentest"
HONEST, ATTACKER, VICTIM = "honest", "attacker", "victim"
CLASSES = ("class-0", "class-1")
DEADLINE_S = 10.0
RUN_SETTINGS: dict[str, Any] = {
    **SETTINGS,
    # uploads have features and labels, and there are personal tensors that must not be uploaded
    "method": "eftvit",
    "options": {"batch_size": 8, "epochs": 1, "lr": 0.05, "local_blocks": 1, "server_epochs": 1, "mask": 0.0},
    "model_options": {"image_size": 8, "patch_size": 8, "width": 4, "depth": 2, "heads": 1},
    "devices": 1,
    "deadline_s": DEADLINE_S,
    "evaluate_every": 100_000,
    "robust": {"strikes": 0},  # no quarantine: the attacker gets another task, whatever it sends
}


class DeployedStage:
    """All files are in `folder`; the processes are in `fleet` and end with it."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.folder = folder
        self.deployment = make_deployment(folder / "deployment")
        self._fleet = fleet
        self.topics = Topics(self.deployment.settings.federation)
        config = folder / "run.toml"
        values = {**RUN_SETTINGS, "broker": {"deployment": str(self.deployment.folder)}}
        config.write_bytes(msgspec.toml.encode(values))
        start = ["start", "--config", str(config), "--runs", str(folder / "runs"), "--run", RUN]
        self._coordinator = fleet.start(
            "coordinator", [*program("coordinator.cli"), *start], log=folder / "coordinator.log"
        )
        identity = folder / HONEST / "identity"
        join(make_token(self.deployment, HONEST, 3600.0), identity, patience_s=WAIT_S)
        data = make_noise_folder(folder / "data", images=16, size=8)
        flags = ["--data", str(data), "--state", str(folder / HONEST), "--threads", "1", "--features", "any"]
        fleet.start(HONEST, [*program("edge_client.cli"), *flags], log=folder / f"{HONEST}.log")
        keys = folder / "keys"
        self.parties = Parties(
            self.topics,
            ATTACKER,
            VICTIM,
            make_device(self.deployment, keys, ATTACKER),
            make_device(self.deployment, keys, VICTIM),
            self.deployment.address,
        )
        self.instance = secrets.token_hex(8)

    @property
    def coordinator_pid(self) -> int:
        return self._coordinator.pid

    def make_attacker(self) -> Peer:
        """Make a client that speaks the protocol as the compromised device."""
        address = self.parties.as_attacker
        return Peer(
            MqttTransport(SimpleQueue(), address, client_id=f"{ATTACKER}-{secrets.token_hex(4)}"),
            self.folder / ATTACKER,
            self.topics.to_device(ATTACKER),
            self.topics.coordinator_state,
            topic=self.topics.from_device(ATTACKER),
            upload_topic=lambda digest: self.topics.upload(ATTACKER, digest),
        )

    def dismiss(self, peer: Peer) -> None:
        """Let the attacker leave, so that rounds do not wait for it."""
        peer.send(encode(DeviceState(self.instance, online=False)), self.topics.device_state(ATTACKER))
        peer.transport.close()

    def store(self) -> Record:
        """Open the coordinator's record; the caller closes it."""
        return open_record(self.folder / "runs")

    def list_results(self, round_number: int | None = None) -> list[ResultRecord]:
        """List accepted results of training."""
        with closing(self.store()) as store:
            return list(store.tasks.read_results(RUN, round_number, "train"))

    def overhear_hello(self) -> Hello:
        """Return the honest device's hello.

        An attacker could not receive it: this uses the coordinator's certificate.
        """
        with Client(self.parties.as_coordinator, "overhears", [self.topics.from_device(HONEST)]) as client:
            # every device sends a hello to a new coordinator
            client.publish(self.topics.coordinator_state, encode(CoordinatorState(secrets.randbits(48), alive=True)))

            def find_hello() -> Hello | None:
                messages = (decode(raw) for _, raw in client.seen)
                return next((message for message in messages if isinstance(message, Hello)), None)

            hello = wait_until(find_hello, "the honest device sent no hello")
            assert hello is not None  # otherwise wait_until fails
            return hello

    def check_service(self) -> None:
        """Check that the honest device finishes a round that begins after this call."""
        with closing(self.store()) as store:
            first = max((record.round for record in store.rounds.read_all(RUN)), default=0) + 1

        def is_in_a_round() -> bool:
            assert self._coordinator.poll() is None, last_line(self.folder / "coordinator.log")
            return any(result.device == HONEST and result.round >= first for result in self.list_results())

        wait_until(is_in_a_round, "the honest device is in no round", pause_s=0.05)
