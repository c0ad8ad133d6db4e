"""The journal of a simulation on torch: rounds are kept with the next checkpoint, which a resume continues from."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from coordinator.record.record import Record
from coordinator.record.rounds import RoundWork
from coordinator.record.tables import Asked, RefusalRecord, ResultRecord, SavedState, TaskRecord, now
from coordinator.rounds.history import RecordHistory
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.ports import Journal, RoundResult
from coordinator.rounds.round_line import round_line
from fedvit.blobs import BlobStore
from fedvit.files import atomic_write
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors, compute_packed_bytes, pack, unpack
from fedvit.wire.messages import Result, TaskKind
from fleet.engines.devices import DeviceEvaluation, DeviceResult
from fleet.engines.server import TorchServer
from fleet.engines.trainer import TorchTrainer

CHECKPOINT_EVERY_S = 5.0
CHECKPOINT_SHARE = 0.05
"""Largest share of the time for checkpoints: large states are written less often."""


class CheckpointHistory(RecordHistory):
    """Rounds are stored together with their evaluations, so that no stored one is unfinished."""

    def first_round(self) -> int:
        return self.open_round()


class CheckpointJournal(Journal):
    """The newest checkpoint is on disk: after `kill -9` the run resumes from it, with the same results."""

    def __init__(
        self, run: str, store: Record, home: Path, blobs: BlobStore, trainer: TorchTrainer, server: TorchServer
    ) -> None:
        self._run, self._store, self._home, self._blobs = run, store, home, blobs
        self._trainer = trainer
        self._server = server
        self._selected: dict[str, Asked] = {}  # how often each device was in a cohort, and when last
        self._answers: dict[str, ResultRecord] = {}  # the newest result of each device
        self._opened_at = ""
        self._closed: tuple[RoundResult, str] | None = None  # the round that is not finished, and when it closed
        self._evaluations: list[DeviceEvaluation] | None = None
        self._rows: list[Callable[[], None]] = []  # what the record gets with the next checkpoint
        self._best = 0
        self._checkpoint_s, self._saved_at = 0.0, time.monotonic()

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        newest = self._store.rounds.read_newest_closed(self._run)
        if newest is None or newest.state is None:
            return
        self._selected = self._store.devices.read_asked(self._run)
        self._answers = self._store.tasks.read_newest_used(self._run, newest.round + 1)
        self._trainer.devices.restore(unpack(self._own_file(newest.round).read_bytes()))
        self._server.restore(newest.state)

    def count_asked(self) -> Mapping[str, Asked]:
        return self._selected

    def newest_answers(self, number: int) -> Mapping[str, ResultRecord]:
        return self._answers

    def open(self, number: int, cohort: list[str], needed: int) -> None:
        self._opened_at = now()

    def results(self, opened: OpenRound) -> list[ResultRecord]:
        return [
            ResultRecord(
                self._run, opened.number, one.device, "train", one.samples,
                {} if one.loss is None else {"loss": one.loss}, ResourceUse(flops=one.flops), None, opened.number,
            )
            for one in self._trainer.trained
            if not one.failure
        ]  # fmt: skip

    def close(self, result: RoundResult) -> None:
        self._closed, self._evaluations = (result, now()), None
        for one in self._trainer.trained:
            times = self._selected[one.device].times + 1 if one.device in self._selected else 1
            self._selected[one.device] = Asked(result.number, times)
        self._answers |= {answer.device: answer for answer in result.updates}

    def keep_evaluation(self, number: int) -> float | None:
        self._evaluations = self._trainer.tested
        shares = [one.metrics["correct"] / one.images for one in self._evaluations if one.images]
        return fmean(shares) if shares else None

    def keep_best(self, number: int) -> None:
        """A checkpoint holds the state of each best round."""
        self._best = number

    def read_best(self) -> SavedState | None:
        """Return the state of the best round that is kept; None if there is none."""
        best = self._store.rounds.read(self._run, self._best) if self._best else None
        return best.state if best else None

    def finish(self, number: int, *, is_last: bool = False) -> None:
        assert self._closed is not None
        result, closed_at = self._closed
        saved = self._save(number) if is_last or number == self._best or self._is_checkpoint() else None
        # without the uploads, which are not kept until the next checkpoint
        trained = [(one._replace(upload={}), _count_bytes(one.upload)) for one in self._trainer.trained]
        times = self._opened_at, closed_at
        self._rows.append(partial(self._write_round, result, times, trained, self._evaluations, saved))
        self._trainer.trained = []  # frees the uploads
        if saved:
            self._checkpoint(number, saved)

    def devices_seen(self) -> list[str]:
        """Devices that were in a cohort."""
        return sorted(self._selected)

    # --- checkpoints ------------------------------------------------------------------------------------

    def _is_checkpoint(self) -> bool:
        privacy = self._trainer.config.privacy
        if self._trainer.config.robust.reject_scale or privacy.noise_multiplier or privacy.feature_noise:
            return True  # spent privacy and strikes are read from the record in the next round
        pause_s = max(CHECKPOINT_EVERY_S, self._checkpoint_s / CHECKPOINT_SHARE)
        return time.monotonic() - self._saved_at >= pause_s

    def _save(self, number: int) -> SavedState:
        """Save everything that a resume needs; the record names it afterwards."""
        began = time.monotonic()
        atomic_write(self._own_file(number), pack(self._trainer.devices.kept()))
        saved = self._server.save()
        self._checkpoint_s = time.monotonic() - began
        return saved

    def _own_file(self, number: int) -> Path:
        return self._home / "state" / f"devices-{number}.safetensors"

    def _checkpoint(self, number: int, saved: SavedState) -> None:
        with self._store.database.together():
            for write in self._rows:
                write()
        self._rows = []
        self._saved_at = time.monotonic()
        self._trainer.report(round_line(self._store, self._run, number, self._trainer.config.rounds))
        needed = {*saved.groups.values(), *saved.uploads.values(), *([saved.memory] if saved.memory else [])}
        if (best := self.read_best()) is not None:
            needed |= {*best.groups.values(), *([best.memory] if best.memory else [])}
        needed |= {digest for reference in saved.references.values() for digest in reference.blobs()}
        self._blobs.prune(needed)
        for file in self._own_file(number).parent.glob("devices-*.safetensors"):
            if file not in (self._own_file(number), self._own_file(self._best)):
                file.unlink()

    # --- the record -------------------------------------------------------------------------------------

    def _write_round(
        self,
        closed: RoundResult,
        times: tuple[str, str],  # when it was opened and closed
        trained: list[tuple[DeviceResult, int]],  # with the bytes of each upload
        evaluations: list[DeviceEvaluation] | None,
        saved: SavedState | None,
    ) -> None:
        store, run, number, chosen = self._store, self._run, closed.number, [one.device for one, _ in trained]
        store.rounds.open(run, number, chosen, len(chosen), times[0])
        store.tasks.add(run, [TaskRecord(number, name, self._trainer.devices.program, {}) for name in chosen])
        failed = {one.device: one.failure for one, _ in trained if one.failure}
        for name, reason in failed.items():
            store.devices.add_refusal(run, RefusalRecord(number, name, "train", reason))
        store.tasks.end(run, [(number, name) for name in failed], "failed")
        results: list[tuple[str, Result, None]] = []
        for one, sent_bytes in trained:
            if one.device not in failed:
                use = ResourceUse(
                    steps=one.steps,
                    flops=one.flops,
                    upload_bytes=sent_bytes,
                    sent_bytes=sent_bytes,
                    received_bytes=one.received_bytes,
                )
                metrics = {} if one.loss is None else {"loss": one.loss}
                results.append((one.device, self._result(number, "train", one.samples, metrics, use), None))
        accepted = store.tasks.add_results(results)
        store.rounds.close(run, number, saved, closed.figures, RoundWork(chosen, accepted), times[1])
        if evaluations is not None:
            answers = store.tasks.add_results([self._answer(number, one) for one in evaluations])
            store.rounds.close_evaluation(run, number, answers)

    def _answer(self, number: int, one: DeviceEvaluation) -> tuple[str, Result, None]:
        result = self._result(number, "evaluate", one.images, one.metrics, ResourceUse(flops=one.flops))
        return one.device, replace(result, by_class=one.by_class), None

    def _result(self, number: int, kind: TaskKind, samples: int, metrics: dict[str, float], use: ResourceUse) -> Result:
        return Result(run=self._run, round=number, kind=kind, samples=samples, metrics=metrics, use=use)


def _count_bytes(tensors: Tensors) -> int:
    return (
        compute_packed_bytes({name: (value.shape, str(value.dtype)) for name, value in tensors.items()})
        if tensors
        else 0
    )
