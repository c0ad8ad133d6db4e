"""The outcomes of experiments, as `fleet experiment` writes them."""

from pathlib import Path

import msgspec

from profiles.report.experiment import RESULTS_FILE, ExperimentOutcome

MOST_FILES = 200


class Experiments:
    """The experiments in a folder: each in a folder of its own, or a single one. A file is read when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outcomes: dict[Path, tuple[int, ExperimentOutcome | None]] = {}

    def read_outcomes(self) -> dict[str, ExperimentOutcome]:
        """Read the outcomes by the name of their folder; files that cannot be read are left out."""
        files = sorted([self._folder / RESULTS_FILE, *self._folder.glob(f"*/{RESULTS_FILE}")])[:MOST_FILES]
        outcomes = {file.parent.name: outcome for file in files if (outcome := self._read(file))}
        return dict(sorted(outcomes.items()))

    def _read(self, file: Path) -> ExperimentOutcome | None:
        try:
            written = file.stat().st_mtime_ns
            if file not in self._outcomes or self._outcomes[file][0] != written:
                self._outcomes[file] = written, _decode(file.read_bytes())
        except OSError:
            return None
        return self._outcomes[file][1]


def _decode(content: bytes) -> ExperimentOutcome | None:
    try:
        return msgspec.json.decode(content, type=ExperimentOutcome)
    except msgspec.MsgspecError:
        return None
