"""The table [broker]."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from fedvit.errors import ConfigError
from fedvit.wire.limits import PROFILES, BrokerLimits, Inflight, PayloadBytes, PublishesPerS, TopicsPerSubscribe


class BrokerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The MQTT broker: the table [broker]. It is recorded with a run; a resumed run may use another broker."""

    broker: Annotated[
        str,
        Meta(description="auto, mosquitto, embedded, or a running broker: mqtt(s)://[USER:PASSWORD@]HOST:PORT."),
    ] = "auto"
    listen: Annotated[
        str,
        Meta(
            description="Address, or ADDRESS:PORT, that our own broker listens on; beyond this machine it needs a "
            "password."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of our own broker; 0 takes a free one.")] = 1883
    password: Annotated[
        str | None, Meta(description="Secret of user 'fedvit' at our own broker; or set FEDVIT_BROKER_PASSWORD.")
    ] = None
    ca_file: Annotated[str | None, Meta(description="Certificate authority of an mqtts:// broker.")] = None
    limits: Annotated[
        Literal["none", "aws-iot-core", "azure-event-grid"],
        Meta(description="Limits of a known broker, which the next four keys replace one by one."),
    ] = "none"
    max_payload_bytes: Annotated[
        PayloadBytes | None, Meta(description="Largest payload that the broker takes, in bytes.")
    ] = None
    publishes_per_s: Annotated[
        PublishesPerS | None, Meta(description="Messages that one connection may publish in a second; 0: any number.")
    ] = None
    topics_per_subscribe: Annotated[
        TopicsPerSubscribe | None, Meta(description="Topics that one SUBSCRIBE may name.")
    ] = None
    max_inflight: Annotated[
        Inflight | None, Meta(description="Messages of QoS 1 that one connection may have unacknowledged.")
    ] = None
    deployment: Annotated[
        str | None,
        Meta(description="Folder of `coordinator init`: mosquitto admits only its devices, by their certificates."),
    ] = None

    def broker_limits(self) -> BrokerLimits:
        """The limits that coordinator and devices keep."""
        limits = PROFILES.get(self.limits, BrokerLimits())
        given = {name: getattr(self, name) for name in BrokerLimits.__struct_fields__}
        return msgspec.structs.replace(limits, **{name: value for name, value in given.items() if value is not None})


def with_listen_port(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The table [broker], with `listen` = ADDRESS:PORT split into `listen` and `port`.

    Raises ConfigError if `port` is given as well, and differs.

    >>> with_listen_port({"listen": "127.0.0.1:18831"}, "flags")
    {'listen': '127.0.0.1', 'port': 18831}
    """
    listen = values.get("listen")
    found = re.fullmatch(r"(?:([^:\[\]]+)|\[(.+)\]):(\d+)", listen) if isinstance(listen, str) else None
    if found is None:
        return values
    port = int(found[3])
    if values.get("port", port) != port:
        raise ConfigError(
            "FV1010",
            f"{where}: listen = {listen!r} says port {port}, and port = {values['port']!r}: give the port once",
        )
    return {**values, "listen": found[1] or found[2], "port": port}
