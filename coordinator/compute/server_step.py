"""The server step: screens a round's results, combines them by the method's server rule, and accounts for privacy."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from coordinator.compute.checkpoint import find_needed_blobs
from coordinator.compute.closing import Closing, Placement, StoredUploads
from coordinator.compute.integrity import VerifiedBlobs
from coordinator.compute.messages import Folded, NextState, Outlier
from coordinator.compute.planning.planner import Plan
from coordinator.compute.planning.server_data import read_server_images
from coordinator.compute.ranks import Ranks
from coordinator.compute.screening import Screen, Screened
from coordinator.config import RunConfig
from coordinator.record.privacy import PrivacyStep, compute_cohort_size, round_figures
from coordinator.record.record import Record
from coordinator.record.tables import SUM, ResultRecord, SavedState
from fedvit.data.server_images import ServerImages
from fedvit.errors import EmptyCohort
from fedvit.methods.aggregators import Aggregator, Mean, make_aggregator
from fedvit.methods.base import Upload
from fedvit.methods.private_mean import PrivateMean
from fedvit.methods.rules.weighted_mean import weight_deltas
from fedvit.program import LABELS, Role
from fedvit.tensors import pack


@dataclass
class ServerStep:
    """The server steps of one run. Results and quarantines are read from the record."""

    run: str
    config: RunConfig
    store: Record
    blobs: VerifiedBlobs
    plan: Plan
    accelerator: str  # torch device
    ranks: Ranks | None  # the processes that close rounds; None: this one
    progress: Callable[[str], None]
    _newest: tuple[list[ResultRecord], Screened] | None = None  # results that were screened last

    def outliers(self, number: int) -> list[Outlier]:
        """Results of a round that are far out of scale."""
        return self._screen_uploads(number, self.results(number)).outliers

    def take(self, number: int, saved: SavedState, drawn: tuple[int, int] | None) -> NextState:
        """Compute the next state, and the figures for the round's record.

        Raises EmptyCohort if no usable result is left.
        """
        config, results = self.config, self.results(number)
        if not results:
            raise EmptyCohort("FV1501", f"none of the asked devices returned a result for round {number}")
        screened = self._screen_uploads(number, results)
        kept = self._without_quarantined(saved.uploads, number)
        damaged = self._find_damaged_uploads(kept, results)
        kept = {device: digest for device, digest in kept.items() if device not in damaged}
        updated, figures = self._close(number, saved, kept, screened.uploads)
        uploads = self._uploads(number, results) if config.privacy.feature_noise else []
        rows = [len(upload.load()[LABELS]) for upload in uploads]
        # a draw by an earlier process is unknown: no amplification is claimed for it
        population, cohort = drawn or (len(results), len(results))
        added = find_added(results)
        noise = added.get("noise_multiplier") or config.privacy.noise_multiplier
        private = round_figures(self.store, self.run, config, PrivacyStep(noise, population, cohort), rows)
        needed = find_needed_blobs(self.plan, updated)
        self.blobs.forget_all_but(needed)
        return NextState(
            saved=updated,
            figures=figures | screened.figures | private | name_figures(added),
            damaged=damaged,
            needed=needed,
        )

    def fold(self, number: int, saved: SavedState) -> Folded:
        """One update with the mean of a round's updates: tensors that no device trained have not changed.

        Raises EmptyCohort if no usable result is left.
        """
        screened = self._screen_uploads(number, self.results(number))
        program, first = self.plan.variant("", number).program, self.plan.values
        names = [name for group in program.with_role(Role.SHARED) for name in program.names(group)]
        mean = Mean().combine(weight_deltas(screened.uploads, number), names)
        deltas = {
            name: mean[name].astype(first[name].dtype) if name in mean else np.zeros_like(first[name]) for name in names
        }
        needed = find_needed_blobs(self.plan, saved)
        self.blobs.forget_all_but(needed)
        return Folded(
            update=self.blobs.put(pack(deltas)).digest,
            samples=sum(upload.samples for upload in screened.uploads),
            figures=screened.figures | name_figures(find_added(self.results(number))),
            needed=needed,
        )

    def again(self, number: int, results: list[ResultRecord], saved: SavedState) -> SavedState:
        """Repeat the step of a closed round from `saved`; outliers are known already. Raises EmptyCohort."""
        uploads = self._screen.apply(self._uploads(number, results)).uploads
        return self._close(number, saved, self._without_quarantined(saved.uploads, number), uploads)[0]

    def results(self, number: int) -> list[ResultRecord]:
        """The results that count in the server step of a round."""
        return self.store.tasks.read_used_in(self.run, number)

    @cached_property
    def _images(self) -> ServerImages | None:
        return read_server_images(self.config, self.plan.method, self.plan.vit)

    @cached_property
    def _screen(self) -> Screen:
        return Screen.of(self.config.robust)

    def _screen_uploads(self, number: int, results: list[ResultRecord]) -> Screened:
        if self._newest is None or self._newest[0] != results:
            self._newest = results, self._screen.apply(self._uploads(number, results))
        return self._newest[1]

    def _uploads(self, number: int, results: list[ResultRecord]) -> list[Upload]:
        discount = self.config.discount
        return [
            Upload(
                result.device,
                result.samples,
                result.upload,
                partial(self._store, result.upload),
                discount(number - result.round),
                result.use.steps or None,
                self.plan.method_for(result.device, result.round).lr,
            )
            for result in results
            if result.upload
        ]

    @cached_property
    def _store(self) -> StoredUploads:
        return StoredUploads(self.blobs.folder, {name: value.shape for name, value in self.plan.values.items()})

    def _without_quarantined(self, uploads: dict[str, str], number: int) -> dict[str, str]:
        """Uploads of earlier rounds without those of devices in quarantine."""
        quarantined = (
            self.store.strikes.read_current_quarantines(self.run, number) if self.config.robust.strikes else {}
        )
        return {device: digest for device, digest in uploads.items() if device not in quarantined}

    def _find_damaged_uploads(self, uploads: dict[str, str], results: list[ResultRecord]) -> dict[str, str]:
        """By device, damaged uploads of earlier rounds, except those that are replaced in this round."""
        fresh = {result.device for result in results if result.upload}
        kept = {device: digest for device, digest in uploads.items() if device not in fresh}
        return {device: digest for device, digest in kept.items() if not self.blobs.is_intact(digest)}

    def _close(
        self, number: int, before: SavedState, kept: dict[str, str], uploads: list[Upload]
    ) -> tuple[SavedState, dict[str, float]]:
        plan, config = self.plan, self.config
        closing = Closing(
            round=number,
            rounds=config.rounds,
            seed=config.seed,
            method=plan.method,
            before=before,
            kept=kept,
            uploads=uploads,
            stored=self._store,
            names=list(plan.values),
            groups=plan.groups,
            updates=config.updates,
            aggregator=aggregator_of(config, number),
            precision=config.server_precision,
            images=self._images,
        )
        if self.ranks is not None:
            return self.ranks.close_round(closing)
        return closing.run(plan.rule, plan.vit, self.blobs, Placement(self.accelerator), self.progress)


def find_added(results: list[ResultRecord]) -> dict[str, float]:
    """Find the figures of a round's secure sum; empty without one."""
    return next((result.metrics for result in results if result.device == SUM), {})


def name_figures(added: Mapping[str, float]) -> dict[str, float]:
    """Name the figures of a secure sum for the record of its round."""
    return {f"sum_{name}": value for name, value in added.items() if name != "loss"}


def aggregator_of(config: RunConfig, round_number: int) -> Aggregator:
    """The aggregator of a round; with noise if the run asks for privacy, and devices have not added it."""
    privacy = config.privacy
    if not privacy.noise_multiplier or config.secure:
        return make_aggregator(config.robust.aggregator, config.robust.malicious_share)
    assert privacy.clip is not None  # PrivacyConfig requires both
    draw = np.random.default_rng([config.seed, round_number] if privacy.deterministic_noise else secrets.randbits(256))
    return PrivateMean(privacy.clip, privacy.noise_multiplier, compute_cohort_size(config), draw)
