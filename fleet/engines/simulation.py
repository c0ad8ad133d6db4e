"""A federation without devices: rounds of cohorts whose work torch does side by side, on a processor or a GPU.

No message, no broker and no file for what would travel; the Programs' phases, the methods' steps and server rules, the
cohorts, the draws and the record are those of a run on devices. What is on disk is the newest checkpoint: after
`kill -9` the run is resumed from there, with the same numbers.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import psutil
import torch

from coordinator.compute.checkpoint import load_state, save_state, start_state, write_models
from coordinator.compute.screening import Screen
from coordinator.compute.server_step import aggregator_of
from coordinator.config import RunConfig
from coordinator.planning.planner import activation_bytes, make_plan
from coordinator.record.privacy import cohort_seed, round_figures
from coordinator.record.references import references, snapshot
from coordinator.record.store import Store, now
from coordinator.record.tables import Asked, Reference, SavedState, TaskRecord
from coordinator.run.cohort import cohort_size, select_fair, select_uniform
from coordinator.run.display import Display, View
from coordinator.run.quarantine import Quarantine
from coordinator.run.round_line import round_line
from coordinator.run.selector import EVALUATION_DRAW
from edge_client.private import clipped, noisy_rows
from edge_client.runtime import Seeds
from edge_client.uplink import coded_upload
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, EmptyCohort, FedvitError
from fedvit.files import atomic_write
from fedvit.methods.base import Method, RoundContext, Upload
from fedvit.methods.packed import unpacked
from fedvit.precision import SCALE
from fedvit.program import LABELS, Program, Role
from fedvit.resources import ResourceUse
from fedvit.tensors import Array, Tensors, pack, packed_size, unpack
from fedvit.updates import NONE, Decoded
from fedvit.wire.messages import Result, TaskKind
from fleet.engines.cohort import Cohort, Values, answering_flops
from fleet.engines.pictures import Images, Pictures
from fleet.engines.steps import Named, Precision, on_processor
from profiles.program_cost import PricedProgram

T = TypeVar("T")

CHECKPOINT_EVERY_S = 5.0
CHECKPOINT_SHARE = 0.05
"""Of the time, at most, that checkpoints take: large states are written less often."""


@dataclass
class Device:
    """A device that is simulated: its images, and what its vault would hold."""

    name: str
    train: Images
    test: Images
    kept: Named = field(default_factory=dict)  # its own tensors as it last trained them
    kept_round: int = 0
    residual: Tensors = field(default_factory=dict)  # what coding left out of earlier deltas


FUSED_FROM_ROUNDS = 50
"""To compile a method's step takes a minute: as long as a few dozen rounds without."""
MOST_AT_ONCE = 32
"""Devices side by side: more are no faster, and take memory."""
PROGRAM = "torch"
"""What the record calls the Program of a run of this engine, so that no other engine resumes it."""


def check_engine_config(config: RunConfig) -> None:
    """Raises ConfigError for what only happens between real devices: nobody is late, lost or over budget here."""
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


class Brought(NamedTuple):
    """What one device brings back."""

    device: str
    samples: int
    loss: float
    flops: int
    received_bytes: int  # of what the server would send in a round
    upload: Tensors


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
        store: Store,
        home: Path,
        folders: Mapping[str, Path],
        accelerator: str,
        display: Display,
        precision: Precision = "fp32",
        fused: bool | None = None,
    ) -> None:
        self._run, self._config, self._store, self._home = run, config, store, home
        self._display = display
        self._place = torch.device(accelerator)
        self._blobs = BlobStore(home / "blobs")
        opened = {folder: DeviceData.open(folder) for folder in dict.fromkeys(folders.values())}
        classes = config.classes or tuple(sorted({name for data in opened.values() for name in data.classes}))
        if len(classes) < 2:
            raise ConfigError(f"a run needs at least two classes, the devices have {list(classes)}")
        start = start_state(config.start_from, store, home.parent) if config.start_from is not None else None
        plan = make_plan(config, classes, self._blobs, start=start, progress=self._say)
        self._plan = plan
        pictures = Pictures(plan.vit.image_size, self._place)
        images: dict[Path, tuple[Images, Images]] = {}
        for number, (folder, data) in enumerate(opened.items(), start=1):
            known = data.relabelled(classes)
            images[folder] = pictures.add(known.train), pictures.add(known.test)
            self._doing(f"reading images: folder {number} of {len(opened)}")
        pictures.finish()
        self._devices = {name: Device(name, *images[folder]) for name, folder in sorted(folders.items())}
        self._cohort = Cohort(
            plan.vit,
            pictures,
            self._place,
            precision=precision,
            fused=self._place.type == "cuda" and config.rounds >= FUSED_FROM_ROUNDS if fused is None else fused,
            say=display.line,
        )
        self._quarantine = Quarantine(run, store, config.protection)
        self._screen = Screen.of(config.protection)
        self._priced: dict[Method, PricedProgram] = {}
        self._at_once: dict[Method, int] = {}  # devices side by side
        self._state = plan.state
        self._sent: dict[str, Reference] = {}
        self._uploads: dict[str, Tensors] = {}  # those that the server's rule keeps for later rounds, by digest
        self._unsaved: set[str] = set()  # names of those that no checkpoint holds, in place of digests
        self._rows: list[Callable[[], None]] = []  # what the record gets with the next checkpoint
        self._turns: dict[str, Asked] = {}
        self._here: dict[tuple[Method, str], Named] = {}  # what all devices get in this round, on the accelerator
        self._checkpoint_s, self._saved_at = 0.0, time.monotonic()
        store.update_run(run, classes=list(classes), status="running", program=PROGRAM, protocol=plan.protocol)

    # --- the course of a run --------------------------------------------------------------------------

    def run_rounds(self) -> None:
        """All rounds that are not done yet. Raises FedvitError when the run cannot go on."""
        rounds = self._config.rounds
        try:
            for number in range(self._resume() + 1, rounds + 1):
                self._round(number)
            write_models(self._home, self._state, self._plan.rule, sorted(self._turns), self._config.seed)
            self._store.update_run(self._run, status="finished")
        except KeyboardInterrupt:
            self._store.update_run(self._run, status="interrupted")
            raise
        except (FedvitError, OSError) as error:
            with suppress(FedvitError):
                self._store.update_run(self._run, status="failed", reason=str(error))
            raise

    def _round(self, number: int) -> None:
        config, began, opened_at = self._config, time.monotonic(), now()
        here = self._quarantine.admitted(self._devices, number)
        chosen = self._chosen(here, number)
        self._doing(f"round {number}/{config.rounds}: {len(chosen)} devices train")
        brought = list(self._train(number, [self._devices[name] for name in chosen]))
        trained_s = time.monotonic() - began
        self._doing(f"round {number}/{config.rounds}: server step")
        figures = self._server_step(number, brought, (len(here), len(chosen)))
        figures |= {
            "cohort": float(len(chosen)), "accepted": float(len(brought)), "devices_s": trained_s,
            "server_s": time.monotonic() - began - trained_s, "declined": 0.0, "late": 0.0,
        }  # fmt: skip
        for name in chosen:
            self._turns[name] = Asked(number, self._turns[name].times + 1 if name in self._turns else 1)
        closed_at = now()
        due = number % config.evaluate_every == 0 or number == config.rounds
        tested = self._evaluate(number) if due else None
        saved = self._save(number) if self._is_checkpoint(number) else None
        self._rows.append(
            partial(self._write_round, number, (opened_at, closed_at), chosen, brought, figures, tested, saved)
        )
        if saved:
            self._checkpoint(number, saved)

    def _chosen(self, here: list[str], number: int) -> list[str]:
        config, wanted = self._config, cohort_size(self._config.cohort, len(here))
        if config.selection == "fair":
            return select_fair(here, wanted, config.seed, number, self._turns)
        return select_uniform(here, wanted, cohort_seed(config), number)

    # --- devices --------------------------------------------------------------------------------------

    def _train(self, number: int, devices: Sequence[Device]) -> Iterator[Brought]:
        for method, group in self._groups(devices, number).items():
            program = self._program(method)
            lr_scale = method.lr_scale(number, self._config.rounds)
            train = partial(self._train_together, number, method, program, lr_scale)
            for brought in self._in_parts(method, group, train):
                yield from brought

    def _train_together(
        self, number: int, method: Method, program: Program, lr_scale: float, devices: Sequence[Device]
    ) -> list[Brought]:
        values = self._values(method, program, devices, number, "train")
        seeds = [Seeds(self._config.seed, number, device.name) for device in devices]
        trained = self._cohort.train(
            program, method, program.train, values, [device.train for device in devices],
            [seed.generators(5) for seed in seeds], lr_scale,
        )  # fmt: skip
        finite = torch.stack([value.flatten(1).isfinite().all(1) for value in trained.tensors.values()]).all(0).tolist()
        sent_back = program.with_role(*(role for role in Role if role.sent_back))
        back = [name for group in sent_back for name in program.names(group)]
        changed = {
            name: trained.tensors[name] - values.of(name, len(devices)) for name in back if name in trained.tensors
        }
        deltas = on_processor(changed) | {
            name: np.zeros((len(devices), *program.tensors[name].shape), np.float32)
            for name in back
            if name not in changed
        }
        received_bytes = self._priced[method].cost(images=1, test_images=1).bytes_down
        keep = [
            name
            for group in dict.fromkeys([*program.with_role(Role.LOCAL), *program.evaluate.kept])
            for name in program.names(group)
        ]
        kept = {name: trained.tensors.get(name, values.of(name, len(devices))) for name in keep}
        brought: list[Brought] = []
        for place, (device, seed) in enumerate(zip(devices, seeds, strict=True)):
            if not finite[place]:
                reason = f"training diverged in round {number}, nothing of it is kept"
                self._rows.append(partial(self._store.add_refusal, self._run, number, device.name, "train", reason))
                continue
            own_deltas = {name: delta[place] for name, delta in deltas.items()}
            upload = self._upload(program, device, own_deltas, trained.collected[place], seed)
            device.kept = {name: value[place].clone() for name, value in kept.items()}
            device.kept_round = number
            figures = trained.samples[place], trained.losses[place], trained.flops[place]
            brought.append(Brought(device.name, *figures, received_bytes, upload))

        return brought

    def _upload(self, program: Program, device: Device, deltas: Tensors, collected: Tensors, seeds: Seeds) -> Tensors:
        """The result's tensors, as the device would code them."""
        if program.clip_delta is not None:
            deltas = clipped(deltas, program.clip_delta)
        for phase in program.train:
            if phase.collect:
                output = phase.collect.output
                collected[output] = noisy_rows(collected[output], phase.collect, seeds)
        upload, device.residual = coded_upload(program, deltas, collected, device.residual)
        return upload

    def _evaluate(self, number: int) -> list[tuple[str, Result, None]]:
        """Results of the devices that test in this round."""
        config = self._config
        here = self._quarantine.admitted(self._devices, number)
        wanted = cohort_size(config.evaluation_cohort, len(here))
        chosen = select_uniform(here, wanted, config.seed, number, EVALUATION_DRAW)
        self._doing(f"round {number}/{config.rounds}: {len(chosen)} devices test")
        results: list[tuple[str, Result, None]] = []
        for method, group in self._groups([self._devices[name] for name in chosen], number).items():
            program = self._program(method)
            for some in self._in_parts(method, group, partial(self._test_together, number, method, program)):
                results += some
        return sorted(results, key=lambda result: result[0])

    def _test_together(
        self, number: int, method: Method, program: Program, devices: Sequence[Device]
    ) -> list[tuple[str, Result, None]]:
        values = self._values(method, program, devices, number, "evaluate")
        drawn = [Seeds(self._config.seed, number, device.name).generators(6) for device in devices]
        train, test = [device.train for device in devices], [device.test for device in devices]
        flops = [answering_flops(program, device.train, device.test) for device in devices]
        if program.evaluate.adapt:
            adapted = self._cohort.train(
                program, method, program.evaluate.adapt, values, train, [draws[:5] for draws in drawn], 1.0
            )
            values = values.with_own(adapted.tensors)
            flops = [sum(both) for both in zip(flops, adapted.flops, strict=True)]
        answers = self._cohort.answer(program, method, values, train, test, [draws[5] for draws in drawn])
        return [
            (
                device.name,
                self._result(number, "evaluate", images, {"correct": float(correct)}, ResourceUse(flops=flops[place])),
                None,
            )
            for place, (device, (correct, images)) in enumerate(zip(devices, answers, strict=True))
        ]

    def _groups(self, devices: Sequence[Device], number: int) -> dict[Method, list[Device]]:
        """Devices of one Program, those with the most images first: they can be trained side by side."""
        groups: dict[Method, list[Device]] = {}
        for device in sorted(devices, key=lambda device: -len(device.train)):
            groups.setdefault(self._plan.method_for(device.name, number), []).append(device)
        return groups

    def _in_parts(
        self, method: Method, devices: Sequence[Device], work: Callable[[Sequence[Device]], T]
    ) -> Iterator[T]:
        """Work on as many devices at a time as memory is likely to hold, and on fewer where it turns out too small.

        Raises FedvitError when it does not hold the work of a single one.
        """
        left = list(devices)
        while left:
            some = left[: self._at_once.setdefault(method, self._likely_at_once(method))]
            try:
                made = work(some)
            except torch.OutOfMemoryError as error:
                if len(some) == 1:
                    raise FedvitError(
                        f"{self._place}: its memory is too small for the work of one device ({some[0].name}): "
                        f"{str(error).splitlines()[0]} Choose a smaller batch_size or model, or accelerator = 'cpu'"
                    ) from error
                self._at_once[method] = len(some) // 2
                self._display.line(f"{self._place}: memory is short, now {len(some) // 2} devices are side by side")
                self._cohort.forget()
                continue
            left = left[len(some) :]
            yield made

    def _likely_at_once(self, method: Method) -> int:
        program, vit = self._program(method), self._plan.vit
        batch = program.batch
        numbers = sum(int(np.prod(spec.shape)) for spec in program.tensors.values())
        slots = max((len(phase.slots) for phase in program.train), default=0)
        tokens = batch.kept_patches + vit.prefix_tokens
        device_bytes = 2 * batch.batch_size * activation_bytes(vit, tokens) + 4 * numbers * (4 + 2 * slots)
        if self._place.type == "cuda":
            free_bytes = torch.cuda.mem_get_info(self._place)[0]
        else:
            free_bytes = psutil.virtual_memory().available // 2
        return max(1, min(MOST_AT_ONCE, int(0.8 * free_bytes) // device_bytes))

    def _program(self, method: Method) -> Program:
        if method not in self._priced:
            self._priced[method] = self._plan.priced(method)
        return self._priced[method].program

    # --- values ---------------------------------------------------------------------------------------

    def _values(
        self, method: Method, program: Program, devices: Sequence[Device], number: int, kind: TaskKind
    ) -> Values:
        """Every tensor of the Program at the start of a task, as these devices would have it."""
        common: Named = {}
        own: Named = {}
        kept = set(program.with_role(Role.LOCAL)) | (set(program.evaluate.kept) if kind == "evaluate" else set())
        for group, spec in program.groups.items():
            names = [name for name in program.names(group) if not name.endswith(SCALE)]
            if spec.role is Role.GENERATED:
                first = self._generated([device.name for device in devices], names)
            else:
                first = self._given(method, group, names)
            if group not in kept:
                (own if spec.role is Role.GENERATED else common).update(first)
                continue
            counts = spec.role is Role.LOCAL or not program.evaluate.kept_of_this_round
            for name in names:
                rows = []
                for place, device in enumerate(devices):
                    has = name in device.kept and (counts or device.kept_round == number)
                    initial = first[name][place] if spec.role is Role.GENERATED else first[name]
                    rows.append(device.kept[name] if has else initial)
                own[name] = torch.stack(rows)
        return Values(common, own)

    def _given(self, method: Method, group: str, names: list[str]) -> Named:
        """What all devices of a method get of a group in this round."""
        if (method, group) not in self._here:
            spec = self._program(method).groups[group]
            if not spec.role.from_server_each_round:
                tensors = {name: self._plan.values[name] for name in names}
            elif group in self._sent:
                tensors = unpack(self._blobs.get(self._sent[group].digest))
            else:
                tensors = {name: self._state.tensors[name] for name in names}
            packed = {name: torch.from_numpy(value) for name, value in method.packed(self._plan.vit, tensors).items()}
            self._here[method, group] = self._on_place(unpacked(packed))
        return self._here[method, group]

    def _generated(self, devices: Sequence[str], names: list[str]) -> Named:
        """(D, ...) of what the server makes for each of some devices."""
        made = self._plan.rule.generate_for(self._state, devices, self._config.seed, self._place)
        if self._config.updates.down_whole == NONE:
            return {name: made[name] for name in names}
        coded = []
        for place in range(len(devices)):
            tensors = {name: made[name][place].cpu().numpy() for name in names}
            coded.append(unpack(self._blobs.get(snapshot(tensors, self._config.updates, self._blobs).digest)))
        return self._on_place({name: torch.from_numpy(np.stack([one[name] for one in coded])) for name in names})

    def _on_place(self, tensors: Named) -> Named:
        return {name: value.to(self._place) for name, value in tensors.items()}

    # --- the server -----------------------------------------------------------------------------------

    def _server_step(self, number: int, brought: Sequence[Brought], drawn: tuple[int, int]) -> dict[str, float]:
        """Moves the state; the round's figures. Raises EmptyCohort when there is nothing to make it of."""
        config, plan = self._config, self._plan
        if not brought:
            raise EmptyCohort(f"round {number}: training diverged on all devices that were asked")
        uploads = []
        for one in sorted(brought):
            if one.upload:
                name = f"{one.device}/{number}"
                self._uploads[name] = one.upload
                self._unsaved.add(name)
                uploads.append(Upload(one.device, one.samples, name, partial(self._load, name)))
        screened = self._screen.apply(uploads)
        for device, reason in screened.outliers:
            self._write_rows()  # a strike is counted by the record
            self._store.add_refusal(self._run, number, device, "train", f"left out: {reason}")
            if self._quarantine.strike(device, number, reason):
                self._display.line(f"{device} is in quarantine: {reason}")
        kept_out = self._store.quarantined(self._run, number) if screened.outliers else {}
        older = {device: kept for device, kept in self._state.uploads.items() if device not in kept_out}
        context = RoundContext(
            round=number,
            seed=config.seed,
            lr_scale=plan.method.lr_scale(number, config.rounds),
            vit=plan.vit,
            accelerator=str(self._place),
            load=self._load,
            progress=self._doing,
            aggregator=aggregator_of(config, number),
        )
        self._state, figures = plan.rule.close(replace(self._state, uploads=older), screened.uploads, context)
        self._uploads = {name: self._uploads[name] for name in self._state.uploads.values()}
        self._here = {}
        if config.updates.codes_down:
            members = {
                group: {name: self._state.tensors[name] for name in names} for group, names in plan.groups.items()
            }
            self._sent = references(members, self._sent, config.updates, self._blobs)
        rows = [len(one.upload[LABELS]) for one in brought if LABELS in one.upload]
        population, cohort = drawn
        private = round_figures(self._store, self._run, config, population=population, cohort=cohort, feature_rows=rows)
        return figures | screened.figures | private

    def _load(self, name: str) -> Mapping[str, Array]:
        return Decoded(self._uploads[name], {name: value.shape for name, value in self._plan.values.items()})

    # --- the record -----------------------------------------------------------------------------------

    def _is_checkpoint(self, number: int) -> bool:
        privacy = self._config.privacy
        if number == self._config.rounds or privacy.noise_multiplier or privacy.feature_noise:
            return True  # what privacy cost is read from the record in the next round
        pause_s = max(CHECKPOINT_EVERY_S, self._checkpoint_s / CHECKPOINT_SHARE)
        return time.monotonic() - self._saved_at >= pause_s

    def _save(self, number: int) -> SavedState:
        """Everything that the run is resumed from; the record names it afterwards."""
        began = time.monotonic()
        uploads: dict[str, str] = {}
        for device, name in self._state.uploads.items():
            uploads[device] = name
            if name in self._unsaved:
                uploads[device] = self._blobs.put(pack(self._uploads[name])).digest
                self._uploads[uploads[device]] = self._uploads.pop(name)
        self._unsaved.clear()
        self._state = replace(self._state, uploads=uploads)
        own: Tensors = {}
        for name, one in self._devices.items():
            own |= {f"kept/{name}/{tensor}": value.cpu().numpy() for tensor, value in one.kept.items()}
            own |= {f"residual/{name}/{tensor}": value for tensor, value in one.residual.items()}
            own[f"round/{name}"] = np.array([one.kept_round])
        atomic_write(self._own_file(number), pack(own))
        saved = save_state(self._state, self._plan.groups, self._blobs)
        self._checkpoint_s = time.monotonic() - began
        return msgspec.structs.replace(saved, references=self._sent)

    def _own_file(self, number: int) -> Path:
        return self._home / "state" / f"devices-{number}.safetensors"

    def _write_round(
        self,
        number: int,
        times: tuple[str, str],  # when it was opened and closed
        chosen: list[str],
        brought: Sequence[Brought],
        figures: dict[str, float],
        tested: list[tuple[str, Result, None]] | None,
        saved: SavedState | None,
    ) -> None:
        store, run = self._store, self._run
        store.open_round(run, number, chosen, len(chosen), times[0])
        store.add_tasks(run, [TaskRecord(number, name, PROGRAM, {}) for name in chosen])
        results = []
        for one in sorted(brought):
            sent_bytes = _packed_bytes(one.upload)
            use = ResourceUse(
                flops=one.flops, upload_bytes=sent_bytes, sent_bytes=sent_bytes, received_bytes=one.received_bytes
            )
            results.append((one.device, self._result(number, "train", one.samples, {"loss": one.loss}, use), None))
        store.add_results(results)
        missing = sorted(set(chosen) - {one.device for one in brought})
        store.end_tasks(run, [(number, name) for name in missing], "failed")
        store.close_round(run, number, saved, figures, chosen, times[1])
        if tested is not None:
            store.add_results(tested)
            store.round_evaluated(run, number)

    def _result(self, number: int, kind: TaskKind, samples: int, metrics: dict[str, float], use: ResourceUse) -> Result:
        return Result(run=self._run, round=number, kind=kind, samples=samples, metrics=metrics, use=use)

    def _write_rows(self) -> None:
        with self._store.together():
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
        """Take up the newest checkpoint; the number of its round, 0 when there is none."""
        newest = self._store.newest_closed(self._run)
        if newest is None or newest.state is None:
            return 0
        self._state = load_state(newest.state, self._blobs, self._plan.values)
        self._uploads = {digest: unpack(self._blobs.get(digest)) for digest in newest.state.uploads.values()}
        self._sent = newest.state.references
        self._turns = self._store.asked(self._run)
        for name, value in unpack(self._own_file(newest.round).read_bytes()).items():
            kind, device, *tensor = name.split("/", 2)
            if kind == "round":
                self._devices[device].kept_round = int(value[0])
            elif kind == "kept":
                self._devices[device].kept[tensor[0]] = torch.from_numpy(value).to(self._place)
            else:
                self._devices[device].residual[tensor[0]] = value
        return newest.round

    # --- talking --------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._doing(text)

    def _doing(self, text: str) -> None:
        if self._display.due():
            self._display.show(View(text))


def _packed_bytes(tensors: Tensors) -> int:
    return packed_size({name: (value.shape, str(value.dtype)) for name, value in tensors.items()}) if tensors else 0
