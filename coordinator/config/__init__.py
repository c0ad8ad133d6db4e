"""The configuration of a run: a TOML file; every key is also a flag.

Every table is a module here, and a row of `run.TABLES`.
"""

from coordinator.config.alerts import AlertsConfig
from coordinator.config.blobs import BlobsConfig, check_blobs
from coordinator.config.broker import BrokerConfig, with_listen_port
from coordinator.config.budget import BudgetConfig
from coordinator.config.images import ImageConfig
from coordinator.config.labels import why_not_asked
from coordinator.config.privacy import PrivacyConfig
from coordinator.config.promote import PromoteConfig
from coordinator.config.reading import (
    StartConfig,
    check_settings,
    find_errors,
    make_config,
    merge_flags,
    merge_tables,
    read_toml,
)
from coordinator.config.regions import CENTRE, REGION, check_kind, is_region, why_no_regions
from coordinator.config.resuming import FREE_TABLES, resume_config
from coordinator.config.robust import RobustConfig
from coordinator.config.run import SECTIONS, TABLES, RunConfig
from coordinator.config.selection import load_selector
from coordinator.config.service import ServiceConfig, make_service_config
from coordinator.config.trackers import TrackersConfig
from coordinator.config.updates import UpdatesConfig
from coordinator.config.versions import why_too_old

__all__ = [
    "CENTRE",
    "FREE_TABLES",
    "REGION",
    "SECTIONS",
    "TABLES",
    "AlertsConfig",
    "BlobsConfig",
    "BrokerConfig",
    "BudgetConfig",
    "ImageConfig",
    "PrivacyConfig",
    "PromoteConfig",
    "RobustConfig",
    "RunConfig",
    "ServiceConfig",
    "StartConfig",
    "TrackersConfig",
    "UpdatesConfig",
    "check_blobs",
    "check_kind",
    "check_settings",
    "find_errors",
    "is_region",
    "load_selector",
    "make_config",
    "make_service_config",
    "merge_flags",
    "merge_tables",
    "read_toml",
    "resume_config",
    "why_no_regions",
    "why_not_asked",
    "why_too_old",
    "with_listen_port",
]
