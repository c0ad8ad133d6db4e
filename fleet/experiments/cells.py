"""The grid of an experiment: cells, each one run, and searches for the values of some options.

A search has cells of its own, which train and validate on training images alone. The method's own cells have the
values that the search chose.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from coordinator.config import TrackersConfig
from fedvit.blobs import digest_of
from fedvit.roles import ProductPrecision
from fleet.experiments.settings import Experiment
from fleet.partition import Official
from fleet.request import Engine
from profiles.report.experiment import HeadFusion, Values

SCHEMA = 2
"""Version of an experiment's files; another one makes every cell run again."""


class Deal(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Device folders of a cell; cells with an equal one share them."""

    dataset: str
    image_size: int  # of a text its context
    devices: int
    partition: str
    options: dict[str, Any]  # all of them
    seed: int
    test_share: float | Official
    validation_share: float | None = None  # devices test with this share of their training images
    global_test: float | Official | None = None
    samples: int | None = None  # images of the data set, drawn by the seed; None: all
    classes: int | None = None  # the most frequent ones of the data set; None: all
    columns: dict[str, str] = {}  # of a table of images, by purpose
    parts: str | None = None  # a folder that was dealt out before, in place of the data set
    parts_digest: str | None = None  # of its `partition.json`

    @property
    def digest(self) -> str:
        """Digest of all settings: equal ones write the same folders."""
        return digest_of(msgspec.json.encode(self, order="deterministic"))


class NovelDevices(Struct, frozen=True, kw_only=True):
    """The devices that a cell leaves out of its run, and the run in which they learn their own part after it."""

    devices: int
    run: dict[str, Any] | None  # its configuration without what the first run's end defines; None: of a search


class GridCell(Struct, frozen=True, kw_only=True):
    """One run of the grid, with all settings that its outcome depends on."""

    schema: int
    method: str  # as the file calls it
    partition: str
    seed: int
    deal: Deal
    run: dict[str, Any]  # a run's whole configuration
    engine: Engine = "onnx"
    precision: ProductPrecision = "fp32"
    weights_digest: str | UnsetType = UNSET  # of the file of pretrained weights
    tried: Values | UnsetType = UNSET  # of a search: the values that this cell tries
    novel: NovelDevices | UnsetType = UNSET
    attention: HeadFusion | UnsetType = UNSET  # UNSET: mean
    attacks: int | UnsetType = UNSET  # devices whose features are attacked
    pictures: int | UnsetType = UNSET  # devices of whose models the attention is drawn; embeddings are drawn, too

    @property
    def digest(self) -> str:
        """Digest of all settings: cells with the same one have the same result."""
        return digest_of(msgspec.json.encode(self, order="deterministic"))

    @property
    def path(self) -> str:
        """The cell's folder below `cells`, which is also its name."""
        place = f"{self.method}/{self.partition}"
        if self.tried is not UNSET:
            place = f"{place}/search/{as_text(self.tried)}/rounds-{self.rounds}"
        return f"{place}/seed-{self.seed}"

    @property
    def rounds(self) -> int:
        """Rounds of the training."""
        return int(self.run["rounds"])


class CellOptions(Struct, frozen=True, kw_only=True):
    """Options of running a cell; its outcome does not depend on them, but for rounding."""

    at_once: int  # devices that compute at the same time
    keep: bool = False  # what the devices stored, too; otherwise only the server's tensors and the record
    compiles: bool = False  # steps of the torch engine, in cells of any length
    metrics: TrackersConfig = TrackersConfig()


class SearchPoint(NamedTuple):
    """Values that a search may choose."""

    values: Values
    tries: tuple[tuple[GridCell, ...], ...]  # by rung, a cell for each seed of the search
    cells: tuple[GridCell, ...]  # the method's own, for each seed of the experiment, when these values are chosen


class Rung(NamedTuple):
    """One step of a search: the number of points that are still tried, and rounds of each."""

    points: int
    rounds: int


class Search(NamedTuple):
    """The search for one method's values on one partition."""

    method: str
    partition: str
    points: tuple[SearchPoint, ...]
    rungs: tuple[Rung, ...]
    beyond: int  # values that may be tried beyond each edge of an option
    make_point: Callable[[Values], SearchPoint | None]  # None: the method refuses these values


class Grid(NamedTuple):
    """A checked experiment and its cells, seed by seed, so that whole comparisons are complete early."""

    name: str
    description: str  # the file's leading comment
    experiment: Experiment
    methods: dict[str, dict[str, Any]]  # name -> method and all its options; of one that is tuned, all its values
    partitions: dict[str, dict[str, Any]]  # name -> partition and all its options
    cells: tuple[GridCell, ...]  # of methods that are not tuned
    searches: tuple[Search, ...]


def as_text(values: Values) -> str:
    """
    >>> as_text({"lr": 1e-06, "optimizer": "sgd", "adaptive": True})
    'lr=1e-06,optimizer=sgd,adaptive=true'
    """
    return ",".join(
        f"{option}={str(value).lower() if isinstance(value, bool) else value}" for option, value in values.items()
    )
