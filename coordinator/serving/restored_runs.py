"""The runs of a restored folder: their record is fitted to the new place."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.record.database import ADDRESS_FILE, DATABASE_FILE, use_database
from coordinator.record.record import open_record
from fedvit.errors import ConfigError


def adapt_runs(folder: Path, mirrors: Iterable[str] | None, before: str | None, after: str | None) -> None:
    """Change the recorded runs of a restored folder: mirrors are not written any more, and the deployment may move."""
    with open_record(folder) as record:
        for run in record.runs.read_all():
            if run.id in (mirrors or ()):
                config = {**run.config, "blobs": {**run.config.get("blobs", {}), "mirror": False, "url": None}}
                record.runs.update(run.id, config=config)
            if before and after and run.broker.get("deployment") == before:
                record.runs.update(run.id, broker={**run.broker, "deployment": after})


def move_record(folder: Path, url: str) -> None:
    """Move the record of a folder into an empty database of PostgreSQL. Raises ConfigError if that has runs."""
    with open_record(folder) as record, TemporaryDirectory(prefix="fedvit-") as place:
        use_database(Path(place), url)
        with open_record(Path(place)) as other:
            if other.runs.count():
                raise ConfigError("FV1634", "--record: that database has runs already and is not changed")
            other.database.fill_from(record.database)
        shutil.copyfile(Path(place) / ADDRESS_FILE, folder / ADDRESS_FILE)
        (folder / ADDRESS_FILE).chmod(0o600)
    for file in folder.glob(f"{DATABASE_FILE}*"):
        file.unlink()
