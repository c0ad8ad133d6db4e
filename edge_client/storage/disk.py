"""The disk budget of a device: how much its state may take. It is checked before a task's files are written."""

import logging
from collections.abc import Callable

from edge_client.storage.features import FeatureFolder
from edge_client.storage.models import DeviceModels
from edge_client.storage.retention import find_least_run, find_retired_runs
from edge_client.storage.vault import Vault, remove_run
from fedvit.blobs import BlobStore
from fedvit.errors import OverBudget
from fedvit.files import folder_bytes
from fedvit.quantities import format_bytes

log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.5
"""Default budget: this share of the space that is free at the start or that the state uses already."""


MAX_RUNS = 256
"""Runs with a folder in the vault: a coordinator chooses their names, and each costs blocks and time that its bytes do
not show."""


class DiskBudget:
    """Keeps blobs, vault, models and features of one device below `limit_bytes`; None: without limit."""

    def __init__(
        self,
        vault: Vault,
        blobs: BlobStore,
        limit_bytes: int | None,
        models: DeviceModels | None = None,
        features: FeatureFolder | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._vault = vault
        self._blobs = blobs
        self._models = models
        self._features = features

    def make_room(self, run: str, count_bytes: Callable[[], int]) -> None:
        """Make sure that a run may write so many bytes more: features are removed for it, then vaults of finished runs,
        the oldest first.

        `count_bytes` looks at many files, and is called only if there is a limit. Raises OverBudget if they do not fit.
        """
        if self.limit_bytes is None or (new_bytes := count_bytes()) <= 0:
            return
        if self._features and self.used_bytes() + new_bytes > self.limit_bytes and self._features.remove_all():
            log.info("features of frozen layers removed", extra={"for_run": run, "limit_bytes": self.limit_bytes})
        finished = [old for old in find_retired_runs(self._vault, 0) if old != run]
        while (used_bytes := self.used_bytes()) + new_bytes > self.limit_bytes:
            if not finished:
                raise OverBudget(
                    "FV1507",
                    f"run {run!r} needs {format_bytes(new_bytes)} more on the device's disk, of whose budget of "
                    f"{format_bytes(self.limit_bytes)} {format_bytes(used_bytes)} are used: raise --disk-budget, or "
                    "remove runs with `edge-client rm RUN`",
                )
            old = finished.pop()
            remove_run(self._vault, old)
            log.info("vault removed", extra={"run": old, "for_run": run, "limit_bytes": self.limit_bytes})

    def make_place(self, run: str) -> None:
        """Make sure that a run may have a folder: if there are too many, the one that costs the least is removed.

        Raises OverBudget if none may be removed.
        """
        folders = self._vault.folders()
        if run in folders or len(folders) < MAX_RUNS:
            return
        if (old := find_least_run(self._vault)) is None:
            raise OverBudget(
                "FV1507",
                f"run {run!r} is new, and the device keeps {len(folders)} others, at most {MAX_RUNS}: remove runs with "
                "`edge-client rm RUN`",
            )
        remove_run(self._vault, old)
        log.info("vault removed", extra={"run": old, "for_run": run, "limit": MAX_RUNS})

    def used_bytes(self) -> int:
        """Return the bytes of everything that the budget is for."""
        models_bytes = folder_bytes(self._models.folder) if self._models else 0
        features_bytes = self._features.used_bytes() if self._features else 0
        return folder_bytes(self._vault.folder) + folder_bytes(self._blobs.folder) + models_bytes + features_bytes

    def find_feature_room(self) -> int | None:
        """Return the bytes that features may take: half of what the rest leaves, since updates need room, too."""
        if self.limit_bytes is None or self._features is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes() + self._features.used_bytes()) // 2
