"""A device as Home Assistant's MQTT discovery shows it: entities, their topics, and the values of a moment.

The process that serves has entities and topics of its own, beside those of the agent.

Source: Home Assistant's documentation, integrations/mqtt (discovery of single components), sensor.mqtt and
binary_sensor.mqtt.
"""

import hashlib
import math
from typing import Any, NamedTuple

import msgspec

from edge_client.health.history import AgentState
from edge_client.link.device_link import DeviceIdentity
from profiles.probes.battery import battery
from profiles.probes.meter import Sensors

PREFIX = "homeassistant"
"""First level of the topics of discovery, by Home Assistant's default."""
ONLINE, OFFLINE = b"online", b"offline"
LONGEST_STATE = 255
"""Letters of a state, of which Home Assistant takes no more."""


class Entity(NamedTuple):
    """One entity: its key in the values, and its part of the discovery."""

    key: str
    component: str  # "sensor" or "binary_sensor"
    settings: dict[str, Any]


ENTITIES = (
    Entity(
        "online",
        "binary_sensor",
        {"name": "Online", "device_class": "connectivity", "entity_category": "diagnostic"},
    ),
    Entity("activity", "sensor", {"name": "Activity", "icon": "mdi:school"}),
    Entity("run", "sensor", {"name": "Run", "icon": "mdi:identifier", "entity_category": "diagnostic"}),
    Entity("round", "sensor", {"name": "Round", "icon": "mdi:counter"}),
    Entity(
        "accuracy",
        "sensor",
        {"name": "Accuracy", "icon": "mdi:bullseye-arrow", "unit_of_measurement": "%", "state_class": "measurement"},
    ),
    Entity(
        "temperature",
        "sensor",
        {
            "name": "Temperature",
            "device_class": "temperature",
            "unit_of_measurement": "°C",
            "state_class": "measurement",
            "entity_category": "diagnostic",
        },
    ),
    Entity(
        "battery",
        "sensor",
        {
            "name": "Battery",
            "device_class": "battery",
            "unit_of_measurement": "%",
            "state_class": "measurement",
            "entity_category": "diagnostic",
        },
    ),
)
"""All entities of the agent; those of sensors only where there is one."""

SERVING_ENTITIES = (
    Entity("prediction", "sensor", {"name": "Prediction", "icon": "mdi:eye"}),
    Entity(
        "confidence",
        "sensor",
        {"name": "Confidence", "icon": "mdi:gauge", "unit_of_measurement": "%", "state_class": "measurement"},
    ),
    Entity("model", "sensor", {"name": "Model", "icon": "mdi:brain", "entity_category": "diagnostic"}),
    Entity("drift", "binary_sensor", {"name": "Drift", "device_class": "problem", "entity_category": "diagnostic"}),
)
"""The entities of the process that serves."""
UNSURE = "unsure"
"""The prediction for a picture that may be of no class."""


class HomeTopics:
    """The topics of one device, which is unique by its federation and its name."""

    def __init__(self, federation: str, device: str) -> None:
        digest = hashlib.blake2b(f"{federation}/{device}".encode(), digest_size=4).hexdigest()
        self.node = f"fedvit_{device}_{digest}"
        self.availability = f"fedvit/{self.node}/availability"
        self.state = f"fedvit/{self.node}/state"
        self.serving = f"fedvit/{self.node}/serving"
        self.prediction = f"fedvit/{self.node}/prediction"

    def config(self, entity: Entity) -> str:
        """Return the topic of an entity's discovery."""
        return f"{PREFIX}/{entity.component}/{self.node}_{entity.key}/config"

    def list_all(self) -> list[str]:
        """List the topics of everything that this device may have published."""
        configs = [self.config(entity) for entity in (*ENTITIES, *SERVING_ENTITIES)]
        return [*configs, self.state, self.availability, self.prediction, self.serving]


def list_entities(sensors: Sensors) -> list[Entity]:
    """List the entities of this device: without sensors that it does not have."""
    missing = set()
    if sensors.thermometer.celsius() is None:
        missing.add("temperature")
    if battery(sensors.root) is None:
        missing.add("battery")
    return [entity for entity in ENTITIES if entity.key not in missing]


def describe_entity(entity: Entity, topics: HomeTopics, identity: DeviceIdentity) -> bytes:
    """Return the message of an entity's discovery."""
    is_of_serving = entity in SERVING_ENTITIES
    settings = {
        **entity.settings,
        "unique_id": f"{topics.node}_{entity.key}",
        "state_topic": topics.prediction if is_of_serving else topics.state,
        "value_template": f"{{{{ value_json.{entity.key} }}}}",
        "device": {
            "identifiers": [topics.node],
            "name": f"fedvit {identity.device}",
            "manufacturer": "fedvit",
            "model": identity.profile.board or identity.profile.machine,
            "sw_version": identity.software,
        },
        "origin": {"name": "fedvit", "sw_version": identity.software},
    }
    if is_of_serving:
        settings["availability_topic"] = topics.serving
        if entity.component == "binary_sensor":
            settings |= {"payload_on": "on", "payload_off": "off"}
    elif entity.component == "binary_sensor":  # without availability: a device that is away is off, not unknown
        settings |= {"state_topic": topics.availability, "payload_on": "online", "payload_off": "offline"}
        del settings["value_template"]
    else:
        settings["availability_topic"] = topics.availability
    return msgspec.json.encode(settings)


class HomeValues:
    """The values of the entities, which remember the newest evaluation."""

    def __init__(self, sensors: Sensors, entities: list[Entity]) -> None:
        self._sensors = sensors
        self._keys = {entity.key for entity in entities}
        self._accuracy: float | None = None

    def read(self, state: AgentState) -> dict[str, Any]:
        """Return the values of a moment, by key. None: not known yet."""
        last, task = state.last_task, state.task
        if last and last.kind == "evaluate" and last.samples and "correct" in last.metrics:
            accuracy = 100 * last.metrics["correct"] / last.samples
            self._accuracy = round(accuracy, 1) if math.isfinite(accuracy) else None
        celsius = self._sensors.thermometer.celsius()
        charge = battery(self._sensors.root) if "battery" in self._keys else None
        values = {
            "activity": state.activity[:LONGEST_STATE],
            "run": task.run if task else last.run if last else None,
            "round": task.round if task else last.round if last else None,
            "accuracy": self._accuracy,
            "temperature": None if celsius is None else round(celsius),
            "battery": charge.percent if charge else None,
        }
        return {key: value for key, value in values.items() if key in self._keys}
