"""The columns of a table of images that the user names."""

from collections.abc import Mapping

from msgspec import Struct

from fedvit.choices import suggest_names
from fedvit.errors import ConfigError


class Columns(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Columns of a Parquet file, a saved data set or a CSV file by purpose; None: the usual name."""

    image: str | None = None  # of a CSV file: the image's path
    label: str | None = None
    coarse_label: str | None = None
    domain: str | None = None
    labels: str | None = None  # of a CSV file: several classes of an image, with ";" between them
    number: str | None = None  # of a CSV file: a number that models learn
    mask: str | None = None  # of a CSV file: the path of an image with a class for each pixel


def make_columns(named: Mapping[str, str]) -> Columns:
    """Make the columns from a mapping. Raises ConfigError for a purpose that columns do not have."""
    purposes = Columns.__struct_fields__
    for purpose in named:
        if purpose not in purposes:
            raise ConfigError("FV2011", f"column {purpose!r}{suggest_names(purpose, purposes, 'purposes are')}")
    return Columns(**named)
