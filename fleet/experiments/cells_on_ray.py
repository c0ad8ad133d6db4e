"""Cells of an experiment as tasks of a Ray cluster."""

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from coordinator.rounds.display import Display
from fedvit.errors import ConfigError, FedvitError
from fleet.clusters.cluster import Cluster, NodeLost, Reports
from fleet.clusters.programs import ProgramJob, pack, unpack
from fleet.clusters.resources import RayTable, Resources
from fleet.experiments.cells import CellOptions
from fleet.experiments.folder import LOG_FILE, PROGRESS_FILE, CellFolder

MAX_RESTARTS = 3
"""Times that a cell is restarted on another node after the loss of its node."""
NODE_BACK_S = 60.0
"""Longest wait for a node with enough resources for a cell."""


class CellsOnRay:
    """Starts cells on the nodes of a cluster, as `launch` of `run_cells`."""

    def __init__(self, cluster: Cluster, table: RayTable, display: Display, options: CellOptions) -> None:
        self.cluster = cluster
        self._table = table
        self._display = display
        self._options = options  # but for `at_once`, which the node's cores decide
        self._parts: dict[Path, Any] = {}

    def resources(self, folder: CellFolder) -> Resources:
        return self._table.resources(folder.cell.method, folder.cell.partition)

    def check(self, cells: Sequence[CellFolder]) -> None:
        """Raises ConfigError for a cell that does not fit on any node."""
        for folder in cells:
            if why := self.cluster.lack_of(self.resources(folder)):
                raise ConfigError(
                    "FV2119", f"[ray], for {folder.cell.path}: {why}; change the table, or add such a node"
                )

    def __call__(self, folder: CellFolder) -> "CellOnRay":
        if folder.parts not in self._parts:
            self._parts[folder.parts] = self.cluster.ray.put(pack(folder.parts))
        needs = self.resources(folder)
        options = msgspec.structs.replace(self._options, at_once=max(1, int(needs.num_cpus)))
        job = ProgramJob(
            name=folder.cell.path,
            module="fleet.experiments.cell",
            arguments=("work", "parts", msgspec.json.encode(options).decode()),
            progress=PROGRESS_FILE,
            software=version("fedvit"),
        )
        return CellOnRay(self.cluster, folder, job, self._parts[folder.parts], needs, self._display)


class CellOnRay:
    """A cell on a node; after the loss of the node on another one, from the last files that were copied back."""

    def __init__(
        self, cluster: Cluster, folder: CellFolder, job: ProgramJob, parts: Any, needs: Resources, display: Display
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._order = job
        self._parts = parts
        self._needs = needs
        self._display = display
        self._left = MAX_RESTARTS
        self._code: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._task = self._cluster.run(self._order, self._parts, pack(self._folder.folder), self._needs)
        self._reports = Reports(self._cluster.ray, self._task)
        self._node: str | None = None
        self._nowhere_since: float | None = None

    def code(self) -> int | None:
        """Exit code; None while it runs, or waits for a node."""
        if self._code is None:
            try:
                self._look()
            except FedvitError as error:
                self._fail(str(error))
            except NodeLost as error:
                self._restart(str(error))
        return self._code

    def _look(self) -> None:
        for report in self._reports:
            self._node = report.node
            folder = self._folder.folder
            if report.files is not None:
                unpack(report.files, folder)
            if report.progress is not None:
                (folder / PROGRESS_FILE).write_bytes(report.progress)
            if report.log or report.code is not None:
                (folder / LOG_FILE).write_bytes(report.log)
            if report.code is not None:
                self._code = report.code
                return
        if self._node is None:
            self._check_somewhere()

    def _check_somewhere(self) -> None:
        why = self._cluster.lack_of(self._needs)
        if why is None:
            self._nowhere_since = None
            return
        self._nowhere_since = self._nowhere_since or time.monotonic()
        if time.monotonic() - self._nowhere_since >= NODE_BACK_S:
            raise FedvitError("FV2120", f"{why}, for {NODE_BACK_S:.0f} s")

    def _restart(self, reason: str) -> None:
        if not self._left:
            self._fail(f"its node was lost {MAX_RESTARTS + 1} times, the last time: {reason}")
            return
        self._left -= 1
        self._display.line(f"{self._folder.cell.path}: {self._node or 'its node'} is lost; restarting on another node")
        self._begin()

    def _fail(self, reason: str) -> None:
        (self._folder.folder / LOG_FILE).write_text(reason + "\n")
        self.stop()
        self._code = 1

    def stop(self) -> None:
        """End it if it runs; the files that were copied back stay."""
        if self._code is None:
            self._cluster.ray.cancel(self._task, force=True)
