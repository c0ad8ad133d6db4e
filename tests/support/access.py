"""Topics of a device, and which of them it may publish to and receive: every kind, by name and by wildcards."""

from typing import NamedTuple

from paho.mqtt.client import topic_matches_sub

from fedvit.transport.address import Address
from fedvit.wire.topics import Topics

DIGEST = "blake3:" + "0123456789abcdef" * 4
MAY_PUBLISH = {"from_device", "upload", "device_state", "probe", "renewal"}
MAY_RECEIVE = {"coordinator_state", "broadcast", "to_device", "certificate_for", "chunks_for"}
FOR_ALL = {"coordinator_state", "broadcast"}
WIDEST = ("#", "+/#", "fl1/#", "+/+/+/+/+/+/+", "$SYS/#", "$SYS/broker/clients/total", "$share/all/#")


class Parties(NamedTuple):
    """Three certificates of one deployment: the attacker's, its victim's, and the coordinator's."""

    topics: Topics
    attacker: str
    victim: str
    as_attacker: Address
    as_victim: Address
    as_coordinator: Address


def list_topics(topics: Topics, device: str, token: str = "0123456789abcdef") -> dict[str, str]:
    """List every topic of a device, by the name of the method of `Topics` that makes it."""
    return {
        "coordinator_state": topics.coordinator_state,
        "broadcast": topics.broadcast(DIGEST),
        "to_device": topics.to_device(device),
        "from_device": topics.from_device(device),
        "chunks_for": topics.chunks_for(device, DIGEST),
        "upload": topics.upload(device, DIGEST),
        "device_state": topics.device_state(device),
        "probe": topics.probe(device),
        "renewal": topics.renewal(device),
        "certificate_for": topics.certificate_for(device),
        "enrolment": topics.enrolment(token),
        "enrolment_reply": topics.enrolment_reply(token),
    }


def list_filters(topic: str) -> set[str]:
    """List filters that cover a topic: each level replaced by +, each tail by #."""
    levels = topic.split("/")
    filters = {topic, "/".join("+" for _ in levels)}
    filters |= {"/".join([*levels[:at], "+", *levels[at + 1 :]]) for at in range(len(levels))}
    filters |= {"/".join([*levels[:at], "#"]) for at in range(len(levels))}
    filters |= {"/".join([*("+" for _ in levels[:at]), "#"]) for at in range(1, len(levels))}
    return {each for each in filters if topic_matches_sub(each, topic)}


def list_targets(parties: Parties) -> dict[str, tuple[str, bool]]:
    """List topics to publish to by description, and whether the attacker may publish there."""
    topics, federation = parties.topics, parties.topics.federation
    own, other = list_topics(topics, parties.attacker), list_topics(topics, parties.victim)
    targets = {f"own {name}": (topic, name in MAY_PUBLISH) for name, topic in own.items()}
    targets |= {f"{name} of another": (topic, False) for name, topic in other.items() if topic not in own.values()}
    root, away = topics.coordinator_state.removesuffix("/srv/st"), Topics(f"{federation}-away")
    elsewhere = (root, f"{root}/srv", "other", away.from_device(parties.attacker), "$SYS/broker/x")
    return targets | {f"topic {topic}": (topic, False) for topic in elsewhere}
