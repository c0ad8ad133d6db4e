"""The last prediction on the home's own broker, where Home Assistant shows it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge_client.health.home import HomePublisher
from edge_client.health.home_entities import (
    LONGEST_STATE,
    SERVING_ENTITIES,
    UNSURE,
    HomeTopics,
    describe_entity,
)
from edge_client.link.device_link import DeviceIdentity
from edge_client.link.endpoint import endpoint_of
from edge_client.serving.models import Classification
from edge_client.settings import DeviceSettings
from edge_client.storage.state import read_device_id
from fedvit.errors import ConfigError, FedvitError
from fedvit.transport.address import Address
from profiles.probes.host import device_profile


class PredictionEntry:
    """The entries of the process that serves on the home's broker."""

    def __init__(self, address: Address, identity: DeviceIdentity) -> None:
        topics = HomeTopics(identity.federation, identity.device)
        configs = [(topics.config(entity), describe_entity(entity, topics, identity)) for entity in SERVING_ENTITIES]
        self._publisher = HomePublisher(address, configs, availability=topics.serving, state=topics.prediction)

    def start(self) -> None:
        """Begin to connect, again after each loss."""
        self._publisher.start()

    def show(self, prediction: Classification, source: str, *, has_drifted: bool) -> None:
        """Publish a prediction next; returns at once."""
        self._publisher.show(describe(prediction, source, has_drifted=has_drifted))

    def close(self) -> None:
        """Publish the end, and end the connection."""
        self._publisher.close()


def describe(prediction: Classification, source: str, *, has_drifted: bool) -> dict[str, Any]:
    """Return the values of the entities."""
    return {
        "prediction": UNSURE if prediction.is_unsure else prediction.label[:LONGEST_STATE],
        "confidence": round(100 * prediction.confidence, 1),
        "model": prediction.model[:LONGEST_STATE],
        "drift": "on" if has_drifted else "off",
        "source": source[:LONGEST_STATE],
    }


def open_home(settings: DeviceSettings, state: Path) -> PredictionEntry:
    """Return the entries on the home's broker. Raises ConfigError for a device without a name."""
    assert settings.home is not None
    endpoint = endpoint_of(settings)
    device = endpoint.device
    if device is None:
        try:
            device = read_device_id(state / "device-id")
        except (OSError, FedvitError) as error:
            raise ConfigError("FV1412", f"no device has run with the state {state}: name it with --id") from error
    profile = device_profile(settings.threads, state)
    identity = DeviceIdentity(
        device=device, federation=endpoint.federation, software=version("fedvit"), profile=profile
    )
    return PredictionEntry(settings.home, identity)
