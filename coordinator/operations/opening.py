"""Opens what a command works on: folders of this machine, or the service of another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.operations.devices import LocalDevices
from coordinator.operations.documents import Submitted
from coordinator.operations.runs import LocalRuns
from coordinator.operations.submitting import Submission, submit
from coordinator.record.opening import open_existing_record
from coordinator.security.folder import Deployment


@contextmanager
def open_runs(folder: Path, *, writes: bool = False) -> Iterator[LocalRuns]:
    """Open the runs for one command. Raises ConfigError if the folder has no record."""
    store = open_existing_record(folder, writes=writes)
    try:
        yield LocalRuns(store, folder)
    finally:
        store.close()


def submit_run(folder: Path, asked: Submission) -> Submitted:
    """Put a run into the queue of a service. Raises ConfigError."""
    return submit(folder, asked)


def open_devices(folder: Path, runs: Path | None = None) -> LocalDevices:
    """Open a deployment, and the folder of its runs. Raises ConfigError if there is none."""
    return LocalDevices(Deployment.open(folder), runs)
