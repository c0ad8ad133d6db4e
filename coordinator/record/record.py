"""The record: runs, rounds and results in SQL, written before anything that depends on them is sent.

SQLite by default (write-ahead log, synced at commit), or PostgreSQL, whose address then stands in a file of the folder
of runs. Tensors are blobs; the record holds their digests. The time of a round's queries depends on the number of its
devices and not on that of earlier rounds: totals of rounds and devices are computed when a round is closed and
evaluated.
"""

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.record.audit import RecordedAudit
from coordinator.record.copies import has_lost
from coordinator.record.database import DATABASE_FILE, Database, address_in
from coordinator.record.devices import RecordedDevices
from coordinator.record.models import RecordedModels
from coordinator.record.rounds import RecordedRounds
from coordinator.record.runs import RecordedRuns
from coordinator.record.strikes import RecordedStrikes
from coordinator.record.tasks import RecordedTasks
from fedvit.errors import ConfigError
from fedvit.files import name_failure


class Record(AbstractContextManager["Record"]):
    """Seven repositories over one database, which is closed at the end of a `with`.

    Raises Damaged if the database is a file that has lost all its runs.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.runs = RecordedRuns(database)
        self.rounds = RecordedRounds(database)
        self.tasks = RecordedTasks(database)
        self.devices = RecordedDevices(database)
        self.strikes = RecordedStrikes(database)
        self.models = RecordedModels(database)
        self.audit = RecordedAudit(database)
        # SQLite does not notice a lost journal
        if database.file and not self.runs.count() and has_lost(database.file):
            raise database.make_damaged_error("it holds no run")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.database.close()


def open_record(folder: Path, *, check: bool = True, reads_only: bool = False) -> Record:
    """Open the record of a folder of runs; it is made if there is none. For the flags see `Database`.

    Raises ConfigError if the folder cannot be made, and the errors of `Database`.
    """
    if address := address_in(folder):
        return Record(Database(address, folder=folder, check=check, reads_only=reads_only))
    with name_failure(f"run folder {folder} cannot be made", ConfigError, "FV1701"):
        folder.mkdir(parents=True, exist_ok=True)
    return Record(Database(f"sqlite:///{folder / DATABASE_FILE}", check=check, reads_only=reads_only))


def open_copy(folder: Path) -> Record:
    """Open a temporary copy of the record of a folder that this user cannot write: SQLite writes beside the database.

    Raises StorageFailed if the record cannot be read.
    """
    copied = TemporaryDirectory(prefix="fedvit-")
    with name_failure(f"cannot read {folder / DATABASE_FILE}"):
        for file in (folder / DATABASE_FILE, folder / f"{DATABASE_FILE}-wal"):
            if file.exists():
                shutil.copyfile(file, Path(copied.name) / file.name)
    record = open_record(Path(copied.name), check=False)
    record.database.folder, record.database.copied = folder, copied
    return record
