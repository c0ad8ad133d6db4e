"""The last prediction on the home's own broker, where Home Assistant shows it."""

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
from edge_client.serving.models import Classification
from fedvit.transport.address import Address


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
