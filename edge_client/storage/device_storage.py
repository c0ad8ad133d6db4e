"""The storage of one device as its agent uses it: vault, blobs, images, their checks and their limits."""

import contextlib
import logging
from collections.abc import Collection

from edge_client.storage.best_round import best_task, blobs_of_notes, keep_best
from edge_client.storage.disk import DiskBudget
from edge_client.storage.evaluation import blobs_of_model
from edge_client.storage.features import FeatureFolder
from edge_client.storage.integrity import DamagedBlobs, Integrity
from edge_client.storage.ledger import Ledger
from edge_client.storage.models import DeviceModels
from edge_client.storage.repair import Repair, repair_all
from edge_client.storage.retention import find_retired_runs
from edge_client.storage.sum_store import SumStore
from edge_client.storage.vault import Vault, finish_removals, remove_run
from fedvit.blobs import BlobStore, digest_of
from fedvit.data.folder import DeviceData
from fedvit.data.growing import Growing
from fedvit.errors import BadPayload, FedvitError
from fedvit.program import Program, decode_program
from fedvit.wire.messages import Result, Task

log = logging.getLogger(__name__)


class FixedImages:
    """Images that never change, in place of a folder that is looked through before each task."""

    def __init__(self, data: DeviceData) -> None:
        self.data = data

    def look(self, classes: Collection[str] | None = None) -> bool:
        """Return False: there are no changes."""
        return False

    def log_problems(self) -> None:
        """Do nothing: the caller that opened the images has looked at their problems."""


class DeviceStorage:
    """Vault, blobs and images of one device.

    Several devices of one process may share blobs and `integrity`. `disk_budget_bytes` limits what all of them take
    together. `features`: those of frozen layers, which are made anew in each epoch without.
    """

    def __init__(
        self,
        vault: Vault,
        blobs: BlobStore,
        images: Growing,
        *,
        integrity: Integrity | None = None,
        disk_budget_bytes: int | None = None,
        features: FeatureFolder | None = None,
    ) -> None:
        self.vault = vault
        self.blobs = blobs
        self.images = images
        self.integrity = integrity or Integrity(blobs, vault.files)
        self.models = DeviceModels(vault.folder.parent)
        self.features = features
        self.disk = DiskBudget(vault, blobs, disk_budget_bytes, self.models, features)
        self.ledger = Ledger(vault.folder.parent)
        self.sums = SumStore(vault)
        self._programs: dict[str, Program] = {}

    @property
    def data(self) -> DeviceData:
        """The device's images, as they were when its folder was last looked at."""
        return self.images.data

    def repair(self) -> list[Repair]:
        """Finish interrupted removals, and repair small files of the vault. Raises StorageFailed."""
        finish_removals(self.vault)
        repairs = repair_all(self.vault)
        for repair in repairs:
            self.integrity.report(repair.message)
        return repairs

    def program(self, digest: str) -> Program:
        """Return a Program, which is decoded once. Raises DamagedBlobs, BadPayload."""
        if digest not in self._programs:
            self._programs = {digest: decode_program(self.integrity.read(digest))}
        return self._programs[digest]

    def keep_inline(self, task: Task) -> tuple[set[str], int]:
        """Store the blobs inside the message, which need not be fetched; return their digests and the new bytes.

        Raises BadPayload for one that the task does not describe.
        """
        described = {manifest.digest for manifest in task.blobs} | {step.patch.digest for step in task.recipes}
        inline, new_bytes = set[str](), 0
        for content in task.inline:
            digest = digest_of(content)
            if digest not in described:
                raise BadPayload("FV2303", f"the task contains {len(content)} bytes that it does not describe")
            inline.add(digest)
            if not self.blobs.keeps(digest):  # bytes count even if another device that shares the folder has them
                self.blobs.put(content)
                new_bytes += len(content)
        return inline, new_bytes

    def note_sent(self, result: Result) -> None:
        """Write the ledger's line of a result, unless it has one: its process may have ended before. Raises
        StorageFailed."""
        if not self.ledger.has(result):
            program = None
            with contextlib.suppress(DamagedBlobs, BadPayload):  # the line names its digest then
                program = self.program(result.program)
            self.ledger.note_result(result, program)

    def end_run(self, run: str, best: int | None = None) -> bool:
        """Note in the vault that results of the run will not be acknowledged any more; False if that failed.

        `best`: the run's best round, if the coordinator named it.
        """
        try:
            if best is not None:
                keep_best(self.vault, run, best)
            self.vault.end(run)
            self.sums.remove(run)
        except FedvitError as error:  # the device continues; results of the run still wait
            log.error("end of the run not noted", extra={"run": run, "reason": str(error)})
            return False
        return True

    def free_space(self, run: str, keep_runs: int | None, pinned: set[str]) -> None:
        """Remove the blobs of an ended run, except those of the device's own model and `pinned` ones, and old vaults.

        With `keep_runs` the vaults of finished runs that are older than so many are removed.
        """
        try:
            if run in self.vault.notes.list_runs()[:1] and (note := self.vault.notes.find_newest(run)):
                needed = blobs_of_model(self.program(note.program), note, self.vault)
                needed |= blobs_of_notes([best_task(self.vault, run)], self.vault, self.blobs)
                freed_bytes = self.blobs.prune(keep=needed | pinned)
                log.info("blobs removed", extra={"run": run, "bytes": freed_bytes})
            for old in [] if keep_runs is None else find_retired_runs(self.vault, keep_runs):
                remove_run(self.vault, old)
                log.info("vault removed", extra={"run": old, "kept": keep_runs})
        except (FedvitError, OSError) as error:  # costs disk space only
            log.error("files of the run could not be removed", extra={"run": run, "reason": str(error)})
