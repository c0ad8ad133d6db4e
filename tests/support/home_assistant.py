"""A stand-in for Home Assistant at the home's broker: it takes discoveries by its documented rules, and follows states.

The rules are those of the pages integrations/mqtt, sensor.mqtt and binary_sensor.mqtt of its documentation.
"""

import json
import re
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from fedvit.transport.address import Address
from tests.support.waiting import wait_until

TOPIC = re.compile(r"homeassistant/(?P<component>\w+)/(?:(?P<node>[a-zA-Z0-9_-]+)/)?(?P<object>[a-zA-Z0-9_-]+)/config")
MARK = "fedvit/mark"
TEXT = {
    "name", "unique_id", "state_topic", "value_template", "availability_topic", "payload_available",
    "payload_not_available", "device_class", "icon", "entity_category",
}  # fmt: skip
KEYS = {
    "sensor": TEXT | {"unit_of_measurement", "state_class", "expire_after", "device", "origin"},
    "binary_sensor": TEXT | {"payload_on", "payload_off", "expire_after", "device", "origin"},
}
UNITS = {"temperature": {"°C", "°F", "K"}, "battery": {"%"}}
CLASSES = {"sensor": {"temperature", "battery", "enum"}, "binary_sensor": {"connectivity", "running", "problem"}}
DEVICE = {"identifiers", "connections", "manufacturer", "model", "model_id", "name", "sw_version", "hw_version"}


def check_discovery(topic: str, payload: bytes) -> dict[str, Any]:
    """Check a message of discovery by the documented rules; return its settings."""
    match = TOPIC.fullmatch(topic)
    assert match, f"{topic} is no topic of discovery"
    settings: dict[str, Any] = json.loads(payload)
    assert isinstance(settings, dict)
    component = match["component"]
    assert settings.keys() <= KEYS[component], settings.keys() - KEYS[component]
    assert {"unique_id", "state_topic", "name", "device", "origin"} <= settings.keys()
    assert settings["unique_id"] == match["object"], "best practice: the object is named by unique_id"
    for key in settings.keys() & (TEXT | {"unit_of_measurement", "payload_on", "payload_off"}):
        assert isinstance(settings[key], str), key
        assert settings[key], key
    for key in {"state_topic", "availability_topic"} & settings.keys():
        assert not re.search(r"[+#\0]", settings[key]), "no wildcards"
        assert len(settings[key].encode()) < 65536
    kind = settings.get("device_class")
    assert kind is None or kind in CLASSES[component]
    assert kind not in UNITS or settings["unit_of_measurement"] in UNITS[kind]
    assert settings.get("state_class", "measurement") in {"measurement", "total", "total_increasing"}
    assert settings.get("entity_category", "diagnostic") == "diagnostic", "a sensor cannot be of category config"
    assert re.fullmatch(r"mdi:[a-z-]+", settings.get("icon", "mdi:x"))
    device = settings["device"]
    assert device.keys() <= DEVICE
    assert device.get("identifiers") or device.get("connections"), "a device needs one of them"
    assert isinstance(device["identifiers"], list)
    assert all(isinstance(value, str) for key, value in device.items() if key != "identifiers")
    assert isinstance(settings["origin"]["name"], str)
    return settings


class HomeAssistant:
    """Entities by their unique id, with states, as `{{ value_json.KEY }}` gives them."""

    def __init__(self, address: Address, name: str = "home-assistant") -> None:
        self.entities: dict[str, dict[str, Any]] = {}
        self.faults: list[str] = []
        self.states: dict[str, bytes] = {}  # by topic
        self._values: list[dict[str, Any]] = []  # all that came
        self._by_topic: dict[str, str] = {}
        self._client = client = paho.Client(CallbackAPIVersion.VERSION2, name)
        if address.user is not None:
            client.username_pw_set(address.user, address.password)
        client.reconnect_delay_set(1, 1)
        client.on_connect = lambda link, *_: link.subscribe([("homeassistant/+/+/config", 1), ("fedvit/#", 1)])
        client.on_message = self._receive
        subscribed: list[bool] = []
        client.on_subscribe = lambda *_: subscribed.append(True)
        client.connect_async(address.host, address.port)
        client.loop_start()
        wait_until(lambda: subscribed, "no subscription")

    def _receive(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        topic, payload = message.topic, bytes(message.payload)
        if not topic.startswith("homeassistant/"):
            self.states[topic] = payload
            if topic.endswith("/state") and payload:
                self._values.append(json.loads(payload))
        elif payload:
            try:
                settings = check_discovery(topic, payload)
            except (AssertionError, KeyError, ValueError) as fault:
                self.faults.append(f"{topic}: {fault!r}")
            else:
                self.entities[settings["unique_id"]] = settings
                self._by_topic[topic] = settings["unique_id"]
        else:
            self.entities.pop(self._by_topic.pop(topic, ""), None)

    def state(self, key: str) -> str | None:
        """Return the state of the entity whose id ends with `key`; None: unknown, or no entity; "unavailable": away."""
        found = [entity for name, entity in list(self.entities.items()) if name.endswith(f"_{key}")]
        if not found:
            return None
        settings = found[0]
        payload = self.states.get(settings["state_topic"], b"").decode()
        if "availability_topic" in settings and self.states.get(settings["availability_topic"]) != b"online":
            return "unavailable"
        value: Any = payload
        if "value_template" in settings:
            match = re.fullmatch(r"\{\{ value_json\.(\w+) \}\}", settings["value_template"])
            assert match
            value = json.loads(payload)[match[1]] if payload else None
        if "payload_on" in settings:
            return {settings["payload_on"]: "on", settings["payload_off"]: "off"}.get(value)
        assert value is None or len(str(value)) <= 255, "Home Assistant takes no longer state"
        return None if value is None else str(value)

    def list_states(self, key: str) -> list[str]:
        """Return all states that a sensor had so far, without unknown ones."""
        return [str(values[key]) for values in self._values if values[key] is not None]

    def list_keys(self) -> set[str]:
        """Return the last words of the ids of all entities."""
        return {name.rpartition("_")[2] for name in list(self.entities)}

    def mark(self) -> None:
        """Wait for a message of its own, before which it receives all that the broker keeps."""
        self._client.publish(MARK, b"here")
        wait_until(lambda: MARK in self.states)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()
