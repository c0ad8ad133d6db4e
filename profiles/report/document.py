"""The data of a report, from which its tables, page and JSON are made.

A field is never renamed or given another meaning; new fields have defaults. `schema` counts the changes that an old
reader would misunderstand. A missing measurement is None.
"""

from typing import Literal

import msgspec
from msgspec import Struct

from fedvit.resources import Budget
from profiles.prediction import FLOP_CONVENTION, Prediction, ProgramCost

SCHEMA = 1


class Comparison(Struct, frozen=True, kw_only=True):
    """A predicted and a measured figure."""

    figure: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def relative_error(self) -> float | None:
        """(predicted - measured) / measured; above 0: predicted too much.

        >>> Comparison(figure="step", unit="s", predicted=3.0, measured=2.0).relative_error
        0.5
        """
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


class PublishedFigure(Struct, frozen=True):
    """A figure of a paper beside ours."""

    figure: str
    unit: str
    published: float
    reproduced: float | None  # by the paper's own way of counting
    ours: float | None  # of the Program and its graphs
    convention: str  # how the paper counted
    source: str


class ProfiledVariant(Struct, frozen=True, kw_only=True):
    """One Program; `label` tells it from the others, such as "mask 0.75, M=2"."""

    label: str
    cost: ProgramCost


class ProfiledDevice(Struct, frozen=True, kw_only=True):
    """The predicted cost of every variant on one device."""

    id: str
    name: str
    source: Literal["measured", "catalogue"]
    mode: str | None
    budget: Budget
    predictions: list[Prediction]  # in the order of the variants
    warnings: list[str] = []


class CrossCheck(Struct, frozen=True, kw_only=True):
    """Another counter's figure for one image's answer, beside ours; multiply-adds."""

    tool: str
    convention: str
    macs: int  # all that the tool counts
    product_macs: int  # of these matrix products
    ours_macs: int  # matrix products of the graph that answers on a device
    not_counted: list[str]  # operators that the tool does not know


class ProfileDocument(Struct, frozen=True, kw_only=True, tag_field="kind", tag="profile"):
    """Variants of a method on devices."""

    title: str
    created_at: str  # ISO 8601, UTC
    software: str  # name and version
    images: int  # training images of one device
    test_images: int | None
    variants: list[ProfiledVariant]
    devices: list[ProfiledDevice]
    published: list[PublishedFigure] = []
    measured: list[Comparison] = []
    crosscheck: CrossCheck | None = None
    warnings: list[str] = []
    convention: str = FLOP_CONVENTION
    schema: int = SCHEMA

    @property
    def fitting(self) -> int:
        """Pairs of a variant and a device that break no budget."""
        return sum(not prediction.over for device in self.devices for prediction in device.predictions)


def encode(document: ProfileDocument) -> bytes:
    """JSON for a file or a pipe, indented."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
