"""The configuration of a service: `coordinator serve`."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from coordinator.config.broker import BrokerConfig
from coordinator.config.reading import convert_broker, convert_table
from fedvit.wire.topics import check_name


class ServiceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One service. Raises ConfigError on construction."""

    federation: Annotated[str, Meta(description="Name under which devices and service meet at the broker.")] = "home"
    side_by_side: Annotated[
        int, Meta(ge=1, description="Most runs that are served at the same time; each device belongs to one of them.")
    ] = 1
    gc_every_h: Annotated[
        float,
        Meta(
            ge=0,
            description="Hours between clean-ups like those of `coordinator gc`, the first at the start; 0: none.",
        ),
    ] = 24.0
    backup: Annotated[
        str | None,
        Meta(description="Folder for backups of runs and deployment, like those of `coordinator backup DIR`."),
    ] = None
    backup_every_h: Annotated[float, Meta(gt=0, description="Hours between backups, the first at the start.")] = 24.0
    keep_backups: Annotated[int, Meta(ge=1, description="Newest backups that are kept.")] = 7
    drift_run: Annotated[
        str | None,
        Meta(description="Configuration of a run that begins by itself when the pictures of devices have drifted."),
    ] = None
    drift_devices: Annotated[int, Meta(ge=1, description="Fewest devices whose pictures have drifted.")] = 1
    drift_every_h: Annotated[float, Meta(gt=0, description="Least hours between two such runs.")] = 24.0

    def __post_init__(self) -> None:
        check_name(self.federation, "federation")


def make_service_config(values: dict[str, Any], where: str) -> tuple[ServiceConfig, BrokerConfig]:
    """Validate the merged values of a file and flags. Raises ConfigError, naming the key and the allowed values."""
    values = dict(values)
    broker = convert_broker(values.pop("broker", {}), where)
    return convert_table(values, ServiceConfig, where), broker
