"""Images in the columns of Parquet files, as the Hugging Face hub keeps data sets; see `tables`."""

from pathlib import Path

from fedvit.errors import ConfigError, DataError
from fleet.datasets.columns import Columns
from fleet.datasets.samples import Samples
from fleet.datasets.tables import ImageTable, choose_columns, join_tables, make_table


def is_parquet(path: Path) -> bool:
    """Return True for a .parquet file, and for a folder that has one, also one level below."""
    return bool(_files(path))


def read_parquet(path: Path, size: int = 32, columns: Columns | None = None) -> Samples:
    """All rows of all files together; files and folders whose name begins with "test" are the official test split.

    Encoded images are held in memory, and decoded when asked for. Raises ConfigError without pyarrow (a server's, not
    a device's); DataError, naming the file and its columns, when a column is missing or of another type, or no row can
    be used.
    """
    tables = [_read_table(file, path, columns or Columns()) for file in _files(path)]
    if not tables:
        raise DataError("FV2011", f"{path}: no .parquet file")
    return join_tables(path, tables, size)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted([*path.glob("*.parquet"), *path.glob("*/*.parquet")])


def _read_table(file: Path, path: Path, columns: Columns) -> ImageTable:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("FV2011", f'{file}: reading Parquet needs pyarrow: pip install "fedvit[server]"') from error
    try:
        chosen = choose_columns(file, parquet.read_schema(file), columns)
        table = parquet.read_table(file, columns=[*dict.fromkeys(chosen.values())])
        is_test = any(part.startswith("test") for part in file.relative_to(path).parts)
        return make_table(file, table, chosen, is_test=is_test)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:  # of names that are no text, too
        raise DataError("FV2011", f"{file}: no readable Parquet file: {error}") from error
