"""What a round's results make of the state: screened, put together by the method's server half, and accounted for."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from coordinator.compute.checkpoint import load_state, needed_blobs, save_state
from coordinator.compute.messages import Outlier, Stepped
from coordinator.compute.screening import Screen, Screened
from coordinator.config import RunConfig
from coordinator.planning.planner import Plan
from coordinator.record.integrity import SoundBlobs
from coordinator.record.privacy import expected_cohort, round_figures
from coordinator.record.store import Store
from coordinator.record.tables import ResultRecord, SavedState
from fedvit.errors import EmptyCohort
from fedvit.methods.aggregators import Aggregator, make_aggregator
from fedvit.methods.base import RoundContext, ServerState, Upload
from fedvit.methods.private_mean import PrivateMean
from fedvit.program import LABELS
from fedvit.tensors import Array, TensorFile
from fedvit.updates import Decoded


@dataclass
class ServerStep:
    """One run's. Results, and devices in quarantine, are those of the record."""

    run: str
    config: RunConfig
    store: Store
    blobs: SoundBlobs
    plan: Plan
    accelerator: str
    progress: Callable[[str], None]
    _newest: tuple[list[ResultRecord], Screened] | None = None  # what was screened last

    def outliers(self, number: int) -> list[Outlier]:
        """Results of a round that are far out of scale."""
        return self._screened(number, self.results(number)).outliers

    def take(self, number: int, saved: SavedState, drawn: tuple[int, int] | None) -> Stepped:
        """The next state, and what the round's record is to say of it.

        Raises EmptyCohort when there is nothing to make it of.
        """
        config, results = self.config, self.results(number)
        if not results:
            raise EmptyCohort(f"none of the devices that were asked brought a result for round {number}")
        screened = self._screened(number, results)
        state = self._cleansed(load_state(saved, self.blobs, self.plan.values), number)
        damaged = self._damaged_uploads(state, results)
        begin = replace(state, uploads={who: kept for who, kept in state.uploads.items() if who not in damaged})
        moved, figures = self.plan.rule.close(begin, screened.uploads, self._context(number))
        uploads = self._uploads(number, results) if config.privacy.feature_noise else []
        rows = [len(upload.load()[LABELS]) for upload in uploads]
        # of a draw by an earlier process nothing is known: no amplification is claimed for it
        population, cohort = drawn or (len(results), len(results))
        private = round_figures(self.store, self.run, config, population=population, cohort=cohort, feature_rows=rows)
        self.progress(f"round {number}/{config.rounds}: keeping the new state")
        kept = save_state(moved, self.plan.groups, self.blobs, config.updates, saved)
        needed = needed_blobs(self.plan, kept)
        self.blobs.forget_all_but(needed)
        return Stepped(saved=kept, figures=figures | screened.figures | private, damaged=damaged, needed=needed)

    def again(self, number: int, results: list[ResultRecord], state: ServerState) -> ServerState:
        """What the step of a round that is closed made of `state`; devices were judged then. Raises EmptyCohort."""
        uploads = self._screen.apply(self._uploads(number, results)).uploads
        return self.plan.rule.close(self._cleansed(state, number), uploads, self._context(number))[0]

    def results(self, number: int) -> list[ResultRecord]:
        """Those that count in the server step of a round."""
        return self.store.used_in(self.run, number)

    @cached_property
    def _screen(self) -> Screen:
        return Screen.of(self.config.robust)

    def _screened(self, number: int, results: list[ResultRecord]) -> Screened:
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
                partial(self._load, result.upload),
                discount(number - result.round),
            )
            for result in results
            if result.upload
        ]

    def _load(self, digest: str) -> Mapping[str, Array]:
        shapes = {name: value.shape for name, value in self.plan.values.items()}
        return Decoded(TensorFile(self.blobs.path(digest)), shapes)

    def _cleansed(self, state: ServerState, number: int) -> ServerState:
        """The state without what devices in quarantine had uploaded earlier."""
        kept_out = self.store.quarantined(self.run, number) if self.config.robust.strikes else {}
        uploads = {device: digest for device, digest in state.uploads.items() if device not in kept_out}
        return replace(state, uploads=uploads)

    def _damaged_uploads(self, state: ServerState, results: list[ResultRecord]) -> dict[str, str]:
        """By device, uploads of earlier rounds that are not whole; those that are replaced now need not be."""
        fresh = {result.device for result in results if result.upload}
        kept = {device: digest for device, digest in state.uploads.items() if device not in fresh}
        return {device: digest for device, digest in kept.items() if not self.blobs.is_sound(digest)}

    def _context(self, number: int) -> RoundContext:
        plan, config = self.plan, self.config
        return RoundContext(
            round=number,
            seed=config.seed,
            lr_scale=plan.method.lr_scale(number, config.rounds),
            vit=plan.vit,
            accelerator=self.accelerator,
            load=self._load,
            progress=self.progress,
            aggregator=aggregator_of(config, number),
        )


def aggregator_of(config: RunConfig, round_number: int) -> Aggregator:
    """How a round's updates become one; private where the run says so."""
    privacy = config.privacy
    if not privacy.noise_multiplier:
        return make_aggregator(config.robust.aggregator, config.robust.malicious_share)
    assert privacy.clip is not None  # PrivacyConfig wants both
    draw = np.random.default_rng([config.seed, round_number] if privacy.rehearsal else secrets.randbits(256))
    return PrivateMean(privacy.clip, privacy.noise_multiplier, expected_cohort(config), draw)
