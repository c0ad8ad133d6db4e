"""A broker's limits for one connection. Devices learn them from the coordinator's welcome."""

from typing import Annotated

from msgspec import Meta, Struct

LEAST_PAYLOAD_BYTES = 64 * 1024
"""A broker that takes less cannot be used: a control message has up to this size."""
LARGEST_PAYLOAD_BYTES = 1 << 20

PayloadBytes = Annotated[int, Meta(ge=LEAST_PAYLOAD_BYTES, le=LARGEST_PAYLOAD_BYTES)]
PublishesPerS = Annotated[int, Meta(ge=0, le=1_000_000)]
TopicsPerSubscribe = Annotated[int, Meta(ge=1, le=1000)]
Inflight = Annotated[int, Meta(ge=1, le=65_535)]


class BrokerLimits(Struct, frozen=True, array_like=True):
    """Limits of one connection. `publishes_per_s` 0: any number."""

    max_payload_bytes: PayloadBytes = LARGEST_PAYLOAD_BYTES
    publishes_per_s: PublishesPerS = 0
    topics_per_subscribe: TopicsPerSubscribe = 8
    max_inflight: Inflight = 32  # messages of QoS 1 that the broker has not acknowledged

    def non_default(self) -> "BrokerLimits | None":
        """Return the limits that a welcome names: None for the usual ones."""
        return None if self == BrokerLimits() else self


PROFILES = {
    "aws-iot-core": BrokerLimits(
        max_payload_bytes=128 * 1024, publishes_per_s=100, topics_per_subscribe=8, max_inflight=100
    ),
    "azure-event-grid": BrokerLimits(
        max_payload_bytes=64 * 1024, publishes_per_s=15, topics_per_subscribe=8, max_inflight=1
    ),
}
"""Limits of known brokers; nothing was tried at the real ones.

AWS IoT Core (docs.aws.amazon.com/general/latest/gr/iot-core.html, "message broker and protocol limits and quotas"): a
payload of 128 KB, 100 publishes a second and connection, of which more are discarded, 8 topics in a SUBSCRIBE, 50
subscriptions, 100 unacknowledged messages, 7 slashes in a topic, no QoS 2. More than 512 KiB a second and connection is
delayed, not refused, so that no limit here stands for it.

Azure Event Grid (learn.microsoft.com/azure/event-grid/quotas-limits, "MQTT limits"): 1 MB a second and session, which
is 15 messages of 64 KiB, and 64 KB in flight, which is one of them; a message may have 512 KB, a topic 8 levels. It
does not keep the order of messages: chunks that overtake each other are sent again.
"""
