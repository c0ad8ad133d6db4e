"""A data set that the Hugging Face library wrote with `save_to_disk`: Arrow files, with or without splits.

The library itself is not needed: a folder holds `state.json` and files `*.arrow`, and splits are folders of that kind.
"""

from pathlib import Path

from fedvit.errors import ConfigError, DataError
from fleet.datasets.columns import Columns
from fleet.datasets.samples import Samples
from fleet.datasets.tables import ImageTable, choose_columns, join_tables, make_table

_STATE = "state.json"


def is_saved(path: Path) -> bool:
    """Return True for a folder that `save_to_disk` wrote, with splits or without."""
    return path.is_dir() and bool(_files(path))


def read_saved(path: Path, size: int = 32, columns: Columns | None = None) -> Samples:
    """All rows of all splits together; the split `test` is the official one.

    Images that the files name, but do not hold, are not read. Raises ConfigError without pyarrow; DataError, naming the
    file and its columns, when a column is missing or of another type, a file is damaged, or no row can be used.
    """
    files = _files(path)
    if not files:
        raise DataError("FV2008", f"{path}: no folder with {_STATE} and files *.arrow")
    return join_tables(path, [_read_table(file, columns or Columns()) for file in files], size)


def _files(path: Path) -> list[Path]:
    folders = [path, *sorted(folder for folder in path.iterdir() if folder.is_dir())]
    return [file for folder in folders if (folder / _STATE).is_file() for file in sorted(folder.glob("*.arrow"))]


def _read_table(file: Path, columns: Columns) -> ImageTable:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import ipc
    except ImportError as error:
        raise ConfigError("FV2011", f'{file}: reading it needs pyarrow: pip install "fedvit[server]"') from error
    try:
        table = ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
        table.validate(full=True)  # offsets of a damaged file lead outside of it
        chosen = choose_columns(file, table.schema, columns)
        return make_table(file, table, chosen, is_test=file.parent.name == "test")
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:  # of names that are no text, too
        raise DataError("FV2008", f"{file}: no readable Arrow file: {error}") from error
