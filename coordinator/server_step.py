"""What a round's results make of the state: screened, put together by the method's server half, and accounted for."""

from collections.abc import Callable, Mapping
from functools import partial

from coordinator.admission import LABELS
from coordinator.course import Course
from coordinator.inbox import Inbox
from coordinator.open_round import OpenRound
from coordinator.privacy import aggregator_of, round_figures
from coordinator.quarantine import Quarantine
from coordinator.screening import Screen
from coordinator.store import ResultRecord
from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, ServerState, Upload
from fedvit.tensors import Array, TensorFile
from fedvit.updates import Decoded


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
        shapes = {name: value.shape for name, value in plan.values.items()}

        def load(digest: str) -> Mapping[str, Array]:
            return Decoded(TensorFile(course.blobs.path(digest)), shapes)

        uploads = [
            Upload(
                result.device,
                result.samples,
                result.upload,
                partial(load, result.upload),
                config.discount(number - result.round),
            )
            for result in results
            if result.upload
        ]
        screened = self._inbox.in_background(lambda: Screen.of(config.protection).apply(uploads))
        for device, reason in screened.outliers:
            self._left_out(device, f"left out: {reason}")
            course.say(f"round {number}: {device} is left out: {reason}")
            self._quarantine.strike(device, number, reason)
        context = RoundContext(
            round=number,
            seed=config.seed,
            lr_scale=plan.method.lr_scale(number, config.rounds),
            vit=plan.vit,
            accelerator=self._accelerator,
            load=load,
            progress=course.set_doing,
            aggregator=aggregator_of(config, number),
        )
        state = self._quarantine.cleansed(course.state(), number)
        moved, figures = self._inbox.in_background(lambda: plan.rule.close(state, screened.uploads, context))
        rows = [len(upload.load()[LABELS]) for upload in uploads if config.privacy.feature_noise]
        # of a draw by an earlier process nothing is known: no amplification is claimed for it
        population, drawn = opened.drawn or (len(results), len(results))
        private = round_figures(self._store, self._run, config, population=population, cohort=drawn, feature_rows=rows)
        return moved, figures | screened.figures | private
