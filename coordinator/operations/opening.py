"""Opens what a command works on: folders of this machine, or the service of another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coordinator.operations.runs import LocalRuns
from coordinator.record.opening import open_existing_record

if TYPE_CHECKING:
    from coordinator.operations.auditing import LocalAudit
    from coordinator.operations.devices import LocalDevices
    from coordinator.operations.models import LocalModels, RemoteModels
    from coordinator.operations.remote import RemoteDevices, RemoteRuns
    from coordinator.operations.remote_admin import RemoteAudit
    from fedvit.client import Service

SERVICE = "fedvit.service"
"""Key of a command's context: the service of another machine."""


def find_service() -> "Service | None":
    """Return the service that `--server` names; None: the command works on this machine."""
    context = click.get_current_context(silent=True)
    return context.meta.get(SERVICE) if context else None


@contextmanager
def open_runs(folder: Path, *, writes: bool = False) -> "Iterator[LocalRuns | RemoteRuns]":
    """Open the runs for one command. Raises ConfigError if the folder has no record."""
    if (service := find_service()) is not None:
        yield import_module("coordinator.operations.remote").RemoteRuns(service)
        return
    with open_existing_record(folder, writes=writes) as store:
        yield LocalRuns(store, folder)


@contextmanager
def open_models(folder: Path, *, writes: bool = False) -> "Iterator[LocalModels | RemoteModels]":
    """Open the models for one command. Raises ConfigError if the folder has no record."""
    models = import_module("coordinator.operations.models")
    if (service := find_service()) is not None:
        yield models.RemoteModels(service)
        return
    with open_existing_record(folder, writes=writes) as store:
        yield models.LocalModels(store)


def open_devices(folder: Path, runs: Path | None = None) -> "LocalDevices | RemoteDevices":
    """Open a deployment, and the folder of its runs. Raises ConfigError if there is none."""
    if (service := find_service()) is not None:
        remote: RemoteDevices = import_module("coordinator.operations.remote").RemoteDevices(service)
        return remote
    devices = import_module("coordinator.operations.devices")  # late: cryptography, which runs do not need
    deployment = import_module("coordinator.security.folder").Deployment.open(folder)
    local: LocalDevices = devices.LocalDevices(deployment, runs)
    return local


def open_audit(runs: Path, deployment: Path | None) -> "LocalAudit | RemoteAudit":
    """Open the audit of a deployment, or else of a folder of runs."""
    if (service := find_service()) is not None:
        remote: RemoteAudit = import_module("coordinator.operations.remote_admin").RemoteAudit(service, deployment)
        return remote
    local: LocalAudit = import_module("coordinator.operations.auditing").LocalAudit(runs, deployment)  # late, as above
    return local
