"""Fetches the blobs that a task needs and the device does not have, and starts the task's work then."""

from collections.abc import Callable

from edge_client.link.device_link import DeviceLink
from edge_client.storage.best_round import blobs_beside
from edge_client.storage.delta_chains import delta_chains
from edge_client.storage.device_storage import DeviceStorage
from edge_client.storage.integrity import DamagedBlobs
from edge_client.trust.policy import check_policy
from edge_client.work.task_executor import TaskExecution, TaskExecutor
from fedvit.errors import BadPayload, FedvitError, StorageFailed
from fedvit.logs import log_fields
from fedvit.policy import Policy
from fedvit.program import MAX_PROGRAM_BYTES
from fedvit.task_names import TaskName
from fedvit.wire.messages import Manifest

REPEATED_FETCHES = 2
"""Number of times that a task fetches a blob again after this device's disk damaged it."""

Manifests = dict[str, Manifest]


class BlobFetcher:
    """Fetches the blobs of tasks. `fail` is called with a task whose blobs cannot be fetched, and the reason."""

    def __init__(
        self,
        link: DeviceLink,
        storage: DeviceStorage,
        worker: TaskExecutor,
        policy: Policy,
        fail: Callable[[TaskExecution, Exception], None],
    ) -> None:
        self._link = link
        self._storage = storage
        self._worker = worker
        self._policy = policy
        self._fail = fail

    def fetch_missing(self, execution: TaskExecution) -> None:
        """Fetch the blobs that the task needs and this device does not have."""
        task, blobs = execution.task, self._storage.blobs
        manifests = {manifest.digest: manifest for manifest in task.blobs}
        try:
            manifest = manifests.get(task.program)
            size_bytes = max(blobs.bytes_here(task.program), manifest.size if manifest else 0)
            if size_bytes > MAX_PROGRAM_BYTES:  # it is read whole
                raise BadPayload(
                    "FV2307", f"a program of {size_bytes} bytes exceeds the limit of {MAX_PROGRAM_BYTES} bytes"
                )
            self._storage.vault.reopen(task.run)
            inline, new_bytes = self._storage.keep_inline(task)
            execution.fetched_bytes += new_bytes
            described = manifests | {step.patch.digest: step.patch for step in task.recipes}
            # before `prune`, which notes that this device keeps them; another one that shares the folder may have some
            execution.lacking = {one.digest: one.size for one in described.values() if not blobs.keeps(one.digest)}
            recipes = task.recipes if self._worker.accepts_delta_chains else ()
            execution.delta_chains = delta_chains(dict.fromkeys(task.groups.values()), recipes, manifests, blobs.keeps)
            bases = {chain.base for chain in execution.delta_chains if chain.base}
            patches = [step.patch.digest for chain in execution.delta_chains for step in chain.steps]
            # inline blobs stay even if unused: they come again with the next task, and count once
            beside = blobs_beside(task, self._storage.vault, blobs)
            blobs.prune(keep={*manifests, *self._link.list_served(), *bases, *patches, *inline, *beside})
            rebuilt = {chain.target.digest for chain in execution.delta_chains}
            whole = [digest for digest in task.groups.values() if digest not in rebuilt]
            self._fetch(execution, [task.program, *patches, *whole], described)
        except (FedvitError, OSError) as error:
            self._fail(execution, error)

    def fetch_again(self, execution: TaskExecution, damaged: DamagedBlobs) -> None:
        """Fetch damaged blobs again, unless this disk damages them each time."""
        execution.working = False
        execution.fetched_anew.update(damaged.digests)
        again = [digest for digest in damaged.digests if execution.fetched_anew[digest] > REPEATED_FETCHES]
        if again:
            reason = f"blob {again[0]} was fetched {REPEATED_FETCHES} times more and is damaged again: replace the disk"
            self._fail(execution, StorageFailed("FV2303", f"{reason} that holds {self._storage.blobs.folder}"))
        else:
            self.fetch_missing(execution)

    def _fetch(self, execution: TaskExecution, digests: list[str], manifests: Manifests) -> None:
        """Fetch blobs, then those that the Program names, then start the work. Raises FedvitError."""
        blobs = self._storage.blobs
        if unknown := [digest for digest in digests if digest not in manifests]:
            raise BadPayload("FV2303", f"the task names blob {unknown[0]} but does not describe it")
        rebuilt = [chain.target.digest for chain in execution.delta_chains]
        self._storage.disk.make_room(
            execution.task.run,
            lambda: sum(manifests[digest].size - blobs.bytes_here(digest) for digest in {*digests, *rebuilt}),
        )
        of_task = TaskName.of(execution.task, self._link.identity.device)
        execution.missing = set(digests)
        self._count(execution, digests)

        def finish(manifest: Manifest, error: Exception | None) -> None:
            if execution.stop.is_set():
                return
            with log_fields(of_task.fields):  # devices of one process share transfers: it may be another one's turn
                if error:
                    self._fail(execution, error)
                    return
                execution.missing.discard(manifest.digest)
                if not execution.missing:
                    self._continue(execution, manifests)

        for digest in sorted(execution.missing):
            if not execution.stop.is_set():
                self._link.fetch(manifests[digest], finish)

    def _continue(self, execution: TaskExecution, manifests: Manifests) -> None:
        """Fetch the blobs that the Program names, or start the work if they are here."""
        if execution.working:
            return
        try:
            program = self._storage.program(execution.task.program)
            images = len(self._storage.data.train)
            check_policy(self._policy, program, execution.task, ledger=self._storage.ledger, images=images)
            digests = [graph.digest for graph in program.graphs.values()]
            digests += [group.initial for group in program.groups.values() if group.initial]
            self._count(execution, digests)
            if missing := [digest for digest in digests if not self._storage.blobs.has(digest)]:
                self._fetch(execution, missing, manifests)
            else:
                self._worker.start(execution, program)
        except DamagedBlobs as error:
            self.fetch_again(execution, error)
        except (FedvitError, OSError) as error:
            self._fail(execution, error)

    @staticmethod
    def _count(execution: TaskExecution, digests: list[str]) -> None:
        """Add the bytes of blobs that the device lacked, each once, also those in a shared folder."""
        execution.fetched_bytes += sum(execution.lacking.pop(digest, 0) for digest in digests)
