"""What a round's results make of the state: screened, put together by the method's server half, and accounted for."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from coordinator.admission import LABELS
from coordinator.course import Course
from coordinator.inbox import Inbox
from coordinator.open_round import OpenRound
from coordinator.privacy import aggregator_of, round_figures
from coordinator.quarantine import Quarantine
from coordinator.screening import Screen
from coordinator.tables import ResultRecord
from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, ServerState, Upload
from fedvit.tensors import Array, TensorFile
from fedvit.updates import Decoded

DAMAGED_HERE = "is damaged on the coordinator's disk"


class ServerStep:
    """One run's. `left_out(device, reason)` hears of updates that are far out of scale."""

    def __init__(
        self,
        *,
        course: Course,
        inbox: Inbox,
        quarantine: Quarantine,
        accelerator: str,
        left_out: Callable[[str, str], None],
    ) -> None:
        self._run, self._config, self._store = course.run, course.config, course.store
        self._course = course
        self._inbox = inbox
        self._quarantine = quarantine
        self._accelerator = accelerator
        self._left_out = left_out

    def take(self, opened: OpenRound, results: list[ResultRecord]) -> tuple[ServerState, dict[str, float]]:
        """The next state, and what the round's record is to say of it; devices stay served meanwhile.

        Raises EmptyCohort when there is nothing to make it of.
        """
        course, config, number = self._course, self._config, opened.number
        if not results:
            raise EmptyCohort(f"none of the devices that were asked brought a result for round {number}")
        plan = course.plan
        course.doing = f"round {number}/{config.rounds}: server step"
        uploads = self._uploads(number, results)
        screened = self._inbox.in_background(lambda: Screen.of(config.protection).apply(uploads))
        for device, reason in screened.outliers:
            self._left_out(device, f"left out: {reason}")
            course.say(f"round {number}: {device} is left out: {reason}")
            self._quarantine.strike(device, number, reason)
        begin = self._with_kept_uploads(self._quarantine.cleansed(course.state(), number), results)
        context = self._context(number)
        moved, figures = self._inbox.in_background(lambda: plan.rule.close(begin, screened.uploads, context))
        rows = [len(upload.load()[LABELS]) for upload in uploads if config.privacy.feature_noise]
        # of a draw by an earlier process nothing is known: no amplification is claimed for it
        population, drawn = opened.drawn or (len(results), len(results))
        private = round_figures(self._store, self._run, config, population=population, cohort=drawn, feature_rows=rows)
        return moved, figures | screened.figures | private

    def again(self, number: int, results: list[ResultRecord], state: ServerState) -> ServerState:
        """What the step of a round that is closed made of `state`; devices were judged then. Raises EmptyCohort."""
        uploads, config, rule = self._uploads(number, results), self._config, self._course.plan.rule
        begin, context = self._quarantine.cleansed(state, number), self._context(number)

        def close() -> ServerState:
            return rule.close(begin, Screen.of(config.protection).apply(uploads).uploads, context)[0]

        return self._inbox.in_background(close)

    def _uploads(self, number: int, results: list[ResultRecord]) -> list[Upload]:
        discount = self._config.discount
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
        shapes = {name: value.shape for name, value in self._course.plan.values.items()}
        return Decoded(TensorFile(self._course.blobs.path(digest)), shapes)

    def _with_kept_uploads(self, state: ServerState, results: list[ResultRecord]) -> ServerState:
        """The state with those uploads of earlier rounds alone that are whole; what is replaced now need not be."""
        fresh = {result.device for result in results if result.upload}
        blobs = self._course.blobs
        kept = {device: digest for device, digest in state.uploads.items() if device not in fresh}
        if not kept:
            return state
        damaged = self._inbox.in_background(lambda: [device for device in kept if not blobs.is_sound(kept[device])])
        for device in damaged:
            self._left_out(device, f"its upload of an earlier round {DAMAGED_HERE}: {blobs.path(kept[device])}")
            self._course.say(f"{device}: its upload of an earlier round {DAMAGED_HERE}, and is used no more")
        uploads = {device: digest for device, digest in state.uploads.items() if device not in damaged}
        return replace(state, uploads=uploads) if damaged else state

    def _context(self, number: int) -> RoundContext:
        plan, config = self._course.plan, self._config
        return RoundContext(
            round=number,
            seed=config.seed,
            lr_scale=plan.method.lr_scale(number, config.rounds),
            vit=plan.vit,
            accelerator=self._accelerator,
            load=self._load,
            progress=self._course.set_doing,
            aggregator=aggregator_of(config, number),
        )
