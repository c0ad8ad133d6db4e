"""A federation without devices: torch computes each cohort in batches, on a processor or a GPU.

There are no messages, no broker and no uploaded files. The Programs' phases, the methods' steps and server rules, the
cohorts, the random draws and the record are those of a run on devices. The newest checkpoint is on disk: after
`kill -9` the run resumes from it, with the same results.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from coordinator.compute.checkpoint import load_state, save_state, start_state, write_models
from coordinator.compute.planning.planner import make_plan
from coordinator.compute.references import references
from coordinator.compute.screening import Screen
from coordinator.compute.server_step import aggregator_of
from coordinator.config import RunConfig
from coordinator.record.privacy import cohort_seed, round_figures
from coordinator.record.record import Record
from coordinator.record.rows import now
from coordinator.record.tables import Asked, Reference, SavedState, TaskRecord
from coordinator.rounds.cohort import cohort_size, select_fair, select_uniform
from coordinator.rounds.display import Display, View
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.round_line import round_line
from coordinator.rounds.selector import EVALUATION_DRAW
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, EmptyCohort, FedvitError
from fedvit.files import atomic_write
from fedvit.methods.base import RoundContext, Upload
from fedvit.program import LABELS
from fedvit.resources import ResourceUse
from fedvit.roles import ProductPrecision
from fedvit.tensors import Array, Tensors, compute_packed_bytes, map_tensors, pack, unpack
from fedvit.updates import Decoded
from fedvit.wire.messages import Result, TaskKind
from fleet.engines.devices import DeviceEvaluation, DeviceResult, Devices

CHECKPOINT_EVERY_S = 5.0
CHECKPOINT_SHARE = 0.05
"""Largest share of the time for checkpoints: large states are written less often."""


PROGRAM = "torch"
"""Stands for the Program's digest in the record of a run of this engine, so that no other engine resumes it."""


def check_engine_config(config: RunConfig) -> None:
    """Raises ConfigError for settings of late, lost or limited devices, which this engine does not simulate."""
    network = {
        "mode": config.mode != "rounds",
        "over_select": config.over_select > 0,
        "late": config.late != "refuse",
        "budget": any(value is not None for value in msgspec.to_builtins(config.budget).values()),
    }
    for key, used in network.items():
        if used:
            value = msgspec.to_builtins(getattr(config, key))
            raise ConfigError(f"{key} = {value!r} needs devices that answer at different times: use engine = 'onnx'")


class TorchSimulation:
    """One run.

    `folders` gives the devices' names and folders of images; `config` is one that `check_engine_config` takes. Raises
    DataError for folders that cannot be used.
    """

    def __init__(
        self,
        *,
        run: str,
        config: RunConfig,
        store: Record,
        home: Path,
        folders: Mapping[str, Path],
        accelerator: str,
        display: Display,
        precision: ProductPrecision = "fp32",
        fused: bool | None = None,
        graph_cache: Path | None = None,
    ) -> None:
        self._run, self._config, self._store, self._home = run, config, store, home
        self._display = display
        self._accelerator = torch.device(accelerator)
        self._blobs = BlobStore(home / "blobs")
        opened = {folder: DeviceData.open(folder) for folder in dict.fromkeys(folders.values())}
        classes = config.classes or tuple(sorted({name for data in opened.values() for name in data.classes}))
        if len(classes) < 2:
            raise ConfigError(f"a run needs at least two classes, the devices have {list(classes)}")
        if left_out := sorted({name for data in opened.values() for name in data.empty} - set(classes)):
            display.line(f"class folders without an image on any device, not of this run: {', '.join(left_out)}")
        start = start_state(config.start_from, store, home.parent) if config.start_from is not None else None
        plan = make_plan(config, classes, self._blobs, start=start, cache=graph_cache, progress=self._doing)
        self._plan = plan
        self._devices = Devices(
            config, plan, self._blobs, folders, opened, self._accelerator, display, precision=precision, fused=fused
        )
        self._quarantine = Quarantine(run, store, config.robust)
        self._screen = Screen.of(config.robust)
        self._state = plan.state
        self._sent: dict[str, Reference] = {}
        self._uploads: dict[str, Tensors] = {}  # those that the server's rule keeps for later rounds, by digest
        self._unsaved: set[str] = set()  # names of those that no checkpoint holds, in accelerator of digests
        self._rows: list[Callable[[], None]] = []  # what the record gets with the next checkpoint
        self._selected: dict[str, Asked] = {}  # how often each device was in a cohort, and when last
        self._checkpoint_s, self._saved_at = 0.0, time.monotonic()
        store.runs.update(run, classes=list(classes), status="running", program=PROGRAM, protocol=plan.protocol)

    # --- rounds ---------------------------------------------------------------------------------------

    def run_rounds(self) -> None:
        """Run all rounds that are not finished. Raises FedvitError when the run fails."""
        rounds = self._config.rounds
        try:
            for number in range(self._resume() + 1, rounds + 1):
                self._round(number)
            write_models(self._home, self._state, self._plan.rule, sorted(self._selected), self._config.seed)
            self._store.runs.update(self._run, status="finished")
        except KeyboardInterrupt:
            self._store.runs.update(self._run, status="interrupted")
            raise
        except (FedvitError, OSError) as error:
            with suppress(FedvitError):
                self._store.runs.update(self._run, status="failed", reason=str(error))
            raise

    def _round(self, number: int) -> None:
        config, began, opened_at = self._config, time.monotonic(), now()
        here = self._quarantine.admitted(self._devices.names(), number)
        chosen = self._chosen(here, number)
        self._doing(f"round {number}/{config.rounds}: {len(chosen)} devices train")
        results = self._devices.train(number, chosen)
        trained_s = time.monotonic() - began
        self._doing(f"round {number}/{config.rounds}: server step")
        figures = self._server_step(number, results, (len(here), len(chosen)))
        figures |= {
            "cohort": float(len(chosen)), "accepted": float(sum(one.failure is None for one in results)),
            "devices_s": trained_s, "server_s": time.monotonic() - began - trained_s, "declined": 0.0, "late": 0.0,
        }  # fmt: skip
        for name in chosen:
            self._selected[name] = Asked(number, self._selected[name].times + 1 if name in self._selected else 1)
        times = opened_at, now()
        due = number % config.evaluate_every == 0 or number == config.rounds
        evaluations = self._tested(number) if due else None
        saved = self._save(number) if self._is_checkpoint(number) else None
        # without the uploads, which are not kept until the next checkpoint
        trained = [(one._replace(upload={}), _packed_bytes(one.upload)) for one in results]
        self._rows.append(partial(self._write_round, number, times, trained, figures, evaluations, saved))
        if saved:
            self._checkpoint(number, saved)

    def _chosen(self, here: list[str], number: int) -> list[str]:
        config, wanted = self._config, cohort_size(self._config.cohort, len(here))
        if config.selection == "fair":
            return select_fair(here, wanted, config.seed, number, self._selected)
        return select_uniform(here, wanted, cohort_seed(config), number)

    def _tested(self, number: int) -> list[DeviceEvaluation]:
        config = self._config
        here = self._quarantine.admitted(self._devices.names(), number)
        wanted = cohort_size(config.evaluation_cohort, len(here))
        chosen = select_uniform(here, wanted, config.seed, number, EVALUATION_DRAW)
        self._doing(f"round {number}/{config.rounds}: {len(chosen)} devices test")
        return self._devices.test(number, chosen)

    # --- the server -----------------------------------------------------------------------------------

    def _server_step(self, number: int, results: Sequence[DeviceResult], drawn: tuple[int, int]) -> dict[str, float]:
        """Update the state; the round's figures. Raises EmptyCohort when no device has a result."""
        config, plan = self._config, self._plan
        if all(one.failure for one in results):
            raise EmptyCohort(f"round {number}: no device returned a result; {results[0].device}: {results[0].failure}")
        uploads = []
        for one in results:
            if one.upload:
                name = f"{one.device}/{number}"
                self._uploads[name] = one.upload
                self._unsaved.add(name)
                uploads.append(Upload(one.device, one.samples, name, partial(self._load, name)))
        screened = self._screen.apply(uploads)
        for device, reason in screened.outliers:
            self._store.devices.add_refusal(self._run, number, device, "train", f"left out: {reason}")
            if self._quarantine.strike(device, number, reason):
                self._display.line(f"{device} is in quarantine: {reason}")
        kept_out = self._store.devices.read_current_quarantines(self._run, number) if screened.outliers else {}
        older = {device: kept for device, kept in self._state.uploads.items() if device not in kept_out}
        context = RoundContext(
            round=number,
            seed=config.seed,
            lr_scale=plan.method.lr_scale(number, config.rounds),
            vit=plan.vit,
            accelerator=str(self._accelerator),
            load=self._load,
            progress=self._doing,
            aggregator=aggregator_of(config, number),
            precision=config.server_precision,
        )
        self._state, figures = plan.rule.close(replace(self._state, uploads=older), screened.uploads, context)
        self._uploads = {name: self._uploads[name] for name in self._state.uploads.values()}
        if config.updates.codes_down:
            members = {
                group: {name: self._state.tensors[name] for name in names} for group, names in plan.groups.items()
            }
            self._sent = references(members, self._sent, config.updates, self._blobs)
        self._devices.get(self._state, self._sent)
        rows = [len(one.upload[LABELS]) for one in results if LABELS in one.upload]
        population, cohort = drawn
        private = round_figures(self._store, self._run, config, population=population, cohort=cohort, feature_rows=rows)
        return figures | screened.figures | private

    def _load(self, name: str) -> Mapping[str, Array]:
        return Decoded(self._uploads[name], {name: value.shape for name, value in self._plan.values.items()})

    # --- the record -----------------------------------------------------------------------------------

    def _is_checkpoint(self, number: int) -> bool:
        privacy, is_last = self._config.privacy, number == self._config.rounds
        if is_last or self._config.robust.reject_scale or privacy.noise_multiplier or privacy.feature_noise:
            return True  # spent privacy and strikes are read from the record in the next round
        pause_s = max(CHECKPOINT_EVERY_S, self._checkpoint_s / CHECKPOINT_SHARE)
        return time.monotonic() - self._saved_at >= pause_s

    def _save(self, number: int) -> SavedState:
        """Save everything that a resume needs; the record names it afterwards."""
        began = time.monotonic()
        uploads: dict[str, str] = {}
        for device, name in self._state.uploads.items():
            uploads[device] = name
            if name in self._unsaved:
                uploads[device] = self._blobs.put(pack(self._uploads[name])).digest
                self._uploads[uploads[device]] = self._uploads.pop(name)
        self._unsaved.clear()
        self._state = replace(self._state, uploads=uploads)
        atomic_write(self._own_file(number), pack(self._devices.kept()))
        saved = save_state(self._state, self._plan.groups, self._blobs)
        self._checkpoint_s = time.monotonic() - began
        return msgspec.structs.replace(saved, references=self._sent)

    def _own_file(self, number: int) -> Path:
        return self._home / "state" / f"devices-{number}.safetensors"

    def _write_round(
        self,
        number: int,
        times: tuple[str, str],  # when it was opened and closed
        trained: Sequence[tuple[DeviceResult, int]],  # with the bytes of what each results
        figures: dict[str, float],
        evaluations: Sequence[DeviceEvaluation] | None,
        saved: SavedState | None,
    ) -> None:
        store, run, chosen = self._store, self._run, [one.device for one, _ in trained]
        store.rounds.open(run, number, chosen, len(chosen), times[0])
        store.tasks.add(run, [TaskRecord(number, name, PROGRAM, {}) for name in chosen])
        failed = {one.device: one.failure for one, _ in trained if one.failure}
        for name, reason in failed.items():
            store.devices.add_refusal(run, number, name, "train", reason)
        store.tasks.end(run, [(number, name) for name in failed], "failed")
        results: list[tuple[str, Result, None]] = []
        for one, sent_bytes in trained:
            if one.device not in failed:
                use = ResourceUse(
                    flops=one.flops, upload_bytes=sent_bytes, sent_bytes=sent_bytes, received_bytes=one.received_bytes
                )
                metrics = {} if one.loss is None else {"loss": one.loss}
                results.append((one.device, self._result(number, "train", one.samples, metrics, use), None))
        accepted = store.tasks.add_results(results)
        store.rounds.close(run, number, saved, figures, chosen, times[1], accepted)
        if evaluations is not None:
            answers = store.tasks.add_results([self._answers(number, one) for one in evaluations])
            store.rounds.close_evaluation(run, number, answers)

    def _answers(self, number: int, one: DeviceEvaluation) -> tuple[str, Result, None]:
        use, metrics = ResourceUse(flops=one.flops), {"correct": one.correct}
        return one.device, self._result(number, "evaluate", one.images, metrics, use), None

    def _result(self, number: int, kind: TaskKind, samples: int, metrics: dict[str, float], use: ResourceUse) -> Result:
        return Result(run=self._run, round=number, kind=kind, samples=samples, metrics=metrics, use=use)

    def _write_rows(self) -> None:
        with self._store.database.together():
            for write in self._rows:
                write()
        self._rows = []

    def _checkpoint(self, number: int, saved: SavedState) -> None:
        self._write_rows()
        self._saved_at = time.monotonic()
        self._display.line(round_line(self._store, self._run, number, self._config.rounds))
        needed = {*saved.groups.values(), *saved.uploads.values(), *([saved.memory] if saved.memory else [])}
        needed |= {digest for reference in saved.references.values() for digest in reference.blobs()}
        self._blobs.prune(needed)
        for file in self._own_file(number).parent.glob("devices-*.safetensors"):
            if file != self._own_file(number):
                file.unlink()

    def _resume(self) -> int:
        """Load the newest checkpoint; the number of its round, 0 when there is none."""
        newest = self._store.rounds.read_newest_closed(self._run)
        if newest is None or newest.state is None:
            return 0
        self._state = load_state(newest.state, self._blobs, self._plan.values)
        self._uploads = {digest: unpack(self._blobs.get(digest)) for digest in newest.state.uploads.values()}
        self._sent = newest.state.references
        self._selected = self._store.devices.read_asked(self._run)
        self._devices.restore(unpack(self._own_file(newest.round).read_bytes()))
        self._devices.get(self._state, self._sent)
        return newest.round

    def _doing(self, text: str) -> None:
        if self._display.due():
            self._display.show(View(text))


def kept_by(home: Path, device: str) -> Tensors:
    """The tensors that a device kept for itself in the run in the folder `home`: as its vault would hold them."""
    kept: Tensors = {}
    for file in (home / "state").glob("devices-*.safetensors"):  # of the newest checkpoint
        for name, value in map_tensors(file).items():
            kind, of, *tensor = name.split("/", 2)
            if (kind, of) == ("kept", device):
                kept[tensor[0]] = value
    return kept


def _packed_bytes(tensors: Tensors) -> int:
    return (
        compute_packed_bytes({name: (value.shape, str(value.dtype)) for name, value in tensors.items()})
        if tensors
        else 0
    )
