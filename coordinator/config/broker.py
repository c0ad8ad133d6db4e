"""The table [broker]."""

from typing import Annotated

from msgspec import Meta, Struct


class BrokerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where messages meet: the table [broker]. Not part of a run; a resumed run may use another."""

    broker: Annotated[
        str,
        Meta(description="auto, mosquitto, embedded, or a broker that is there: mqtt(s)://[USER:PASSWORD@]HOST:PORT."),
    ] = "auto"
    listen: Annotated[
        str, Meta(description="Address that our own broker listens on; beyond this machine it needs a password.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of our own broker; 0 takes a free one.")] = 1883
    password: Annotated[
        str | None, Meta(description="Secret of user 'fedvit' at our own broker; or set FEDVIT_BROKER_PASSWORD.")
    ] = None
    ca_file: Annotated[str | None, Meta(description="Certificate authority of an mqtts:// broker.")] = None
    deployment: Annotated[
        str | None,
        Meta(description="Folder of `coordinator init`: mosquitto lets in its devices alone, by their certificates."),
    ] = None
