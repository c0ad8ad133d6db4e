"""The simulated devices of a run: their results of a round, and the accuracy of each device's model.

The contents of vaults are kept here by device's name; uploads are coded as the Program says, as on a fleet.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import psutil
import torch

from coordinator.compute.messages import PlannedTask
from coordinator.compute.planning.planner import Plan
from coordinator.compute.references import snapshot
from coordinator.config import RunConfig
from coordinator.record.tables import Reference
from coordinator.rounds.tasks import Work
from edge_client.work.private import clip_update, noisy_rows
from edge_client.work.runtime import Seeds
from edge_client.work.uplink import encode_upload
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload, FedvitError
from fedvit.methods.base import Method, ServerState
from fedvit.methods.packed import as_sent, unpack_tensors
from fedvit.precision import SCALE
from fedvit.program import Program, Role
from fedvit.tensors import Tensors, unpack
from fedvit.updates import NONE
from fedvit.wire.messages import ClassCount, TaskKind
from fleet.engines.cohort import Cohort, Values, evaluation_flops
from fleet.engines.pictures import DeviceImages, Pictures
from fleet.engines.settings import TorchSettings
from fleet.engines.steps import Named, to_numpy
from profiles.program_cost import count_download_bytes

T = TypeVar("T")

FUSED_FROM_ROUNDS = 50
"""Compiling a method's step takes a minute: as long as a few dozen rounds without."""
MOST_AT_ONCE = 32
"""Most devices in one batch: more are no faster, and take memory."""


@dataclass
class SimulatedDevice:
    """A simulated device: its images, and the contents of its vault."""

    name: str
    train: DeviceImages
    test: DeviceImages
    kept: Named = field(default_factory=dict)  # its own tensors as it last trained them
    kept_round: int = 0
    residual: Tensors = field(default_factory=dict)  # error feedback: what coding left out of earlier deltas

    @property
    def can_train(self) -> bool:
        """Tell if one of its images for training can be decoded."""
        return bool(self.train.readable.any())


class DeviceResult(NamedTuple):
    """One device's result of a round, or why it has none."""

    device: str
    samples: int
    loss: float | None  # None: nothing was trained
    flops: int
    received_bytes: int  # that a server would send in a round
    upload: Tensors
    failure: str | None = None
    images: int = 0  # that it has for training
    steps: int = 0


class DeviceEvaluation(NamedTuple):
    """A device's evaluation on its own test images."""

    device: str
    metrics: dict[str, float]  # as in its result
    images: int
    by_class: tuple[ClassCount, ...]  # empty: not counted
    flops: int


class SimulatedDevices:
    """The devices of a run. `data` has the images of each by its name; `log(line)` prints a line."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        blobs: BlobStore,
        data: Mapping[str, DeviceData],
        settings: TorchSettings,
        *,
        log: Callable[[str], None],
    ) -> None:
        self.accelerator = settings.accelerator
        self.program = "eager" if settings.is_eager else "torch"
        """Stands for the Program's digest in the record of a run, so that no other engine resumes it."""
        self._config, self._plan, self._blobs = config, plan, blobs
        self._accelerator = accelerator = torch.device(settings.accelerator)
        self._log = log
        batch = plan.batch_of(plan.method_for("", 1))
        pictures = Pictures(batch, accelerator)
        self._devices: dict[str, SimulatedDevice] = {}
        images: dict[Path, tuple[DeviceImages, DeviceImages]] = {}
        for name, own in sorted(data.items()):
            if own.folder not in images:
                known = own.relabel(plan.classes).fit_to(batch)
                images[own.folder] = pictures.add(known.train), pictures.add(known.test)
            self._devices[name] = SimulatedDevice(name, *images[own.folder])
        pictures.finish()
        if settings.fused is None:
            long = config.rounds >= FUSED_FROM_ROUNDS and not settings.is_eager
            settings = settings._replace(fused=accelerator.type == "cuda" and long)
        self._cohort = Cohort(plan.vit, pictures, settings, log)
        self._programs: dict[Method, Program] = {}
        self._at_once: dict[Method, int] = {}  # devices in one batch
        self.start_from(plan.state, {})

    def start_from(self, state: ServerState, sent: Mapping[str, Reference]) -> None:
        """Set the state that devices start from; `sent` has the coded values of groups that are sent coded."""
        self._state, self._sent = state, sent
        self._here: dict[tuple[Method, str], Named] = {}  # what all devices get, on the accelerator

    def names(self) -> list[str]:
        return list(self._devices)

    # --- vaults ---------------------------------------------------------------------------------------

    def kept(self) -> Tensors:
        """The contents of all vaults, as `restore` takes them."""
        tensors: Tensors = {}
        for name, device in self._devices.items():
            tensors |= {f"kept/{name}/{tensor}": value.cpu().numpy() for tensor, value in device.kept.items()}
            tensors |= {f"residual/{name}/{tensor}": value for tensor, value in device.residual.items()}
            tensors[f"round/{name}"] = np.array([device.kept_round])
        return tensors

    def restore(self, kept: Tensors) -> None:
        for name, value in kept.items():
            kind, device, *tensor = name.split("/", 2)
            if kind == "round":
                self._devices[device].kept_round = int(value[0])
            elif kind == "kept":
                self._devices[device].kept[tensor[0]] = torch.from_numpy(value).to(self._accelerator)
            else:
                self._devices[device].residual[tensor[0]] = value

    # --- work -----------------------------------------------------------------------------------------

    def plan(self, device: str, number: int, digest: str) -> Work:
        """Plan the work of a device in a round. `digest` stands for that of its Program."""
        method = self._plan.method_for(device, number)
        lr_scale = method.lr_scale(number, self._config.rounds)
        return Work(PlannedTask(program=digest, groups={}, lr_scale=lr_scale), self._program(method))

    def train(self, number: int, work: Mapping[str, Work]) -> list[DeviceResult]:
        """The cohort's results of a round, sorted by device. Raises FedvitError when memory is too small for one."""
        return sorted(self._train(number, work), key=lambda one: one.device)

    def test(self, number: int, cohort: Sequence[str]) -> list[DeviceEvaluation]:
        """Return each device's evaluation after a round, sorted by device; none of one that cannot adapt.

        Raises FedvitError as `train` does.
        """
        evaluations: list[DeviceEvaluation] = []
        for method, group in self._groups([self._devices[name] for name in cohort], number).items():
            program = self._program(method)
            able = [device for device in group if device.can_train or not program.evaluate.adapt]
            for some in self._in_parts(method, able, partial(self._test_together, number, method, program)):
                evaluations += some
        return sorted(evaluations, key=lambda one: one.device)

    def _train(self, number: int, work: Mapping[str, Work]) -> Iterator[DeviceResult]:
        for method, group in self._groups([self._devices[name] for name in work], number).items():
            own = work[group[0].name]
            able = [device for device in group if device.can_train or not own.program.train]
            for device in group:
                if device not in able:
                    reason = f"none of the {len(device.train)} training images can be decoded"
                    received_bytes = count_download_bytes(own.program)
                    yield DeviceResult(device.name, 0, 0.0, 0, received_bytes, {}, reason)
            for results in self._in_parts(method, able, partial(self._train_together, number, method, own)):
                yield from results

    def _train_together(
        self, number: int, method: Method, work: Work, devices: Sequence[SimulatedDevice]
    ) -> list[DeviceResult]:
        program = work.program
        values = self._values(method, program, devices, number, "train")
        seeds = [Seeds(self._config.seed, number, device.name) for device in devices]
        trained = self._cohort.train(
            work, method, program.train, values, [device.train for device in devices],
            [seed.generators(5) for seed in seeds],
        )  # fmt: skip
        finite = torch.ones(len(devices), dtype=torch.bool, device=self._accelerator)
        for value in trained.tensors.values():
            finite &= value.flatten(1).isfinite().all(1)
        is_finite = finite.tolist()
        sent_back = program.with_role(*(role for role in Role if role.is_sent_back))
        back = [name for group in sent_back for name in program.names(group)]
        changed = {
            name: trained.tensors[name] - values.of(name, len(devices)) for name in back if name in trained.tensors
        }
        deltas = to_numpy(changed) | {
            name: np.zeros((len(devices), *program.tensors[name].shape), np.float32)
            for name in back
            if name not in changed
        }
        received_bytes = count_download_bytes(program)
        keep = [
            name
            for group in dict.fromkeys([*program.with_role(Role.LOCAL), *program.evaluate.kept])
            for name in program.names(group)
        ]
        kept = {name: trained.tensors.get(name, values.of(name, len(devices))) for name in keep}
        results: list[DeviceResult] = []
        for index, (device, seed) in enumerate(zip(devices, seeds, strict=True)):
            if not is_finite[index]:
                reason = f"training diverged in round {number}, nothing of it is kept"
                results.append(DeviceResult(device.name, 0, 0.0, 0, received_bytes, {}, reason))
                continue
            own_deltas = {name: delta[index] for name, delta in deltas.items()}
            try:
                upload = self._upload(program, device, own_deltas, trained.collected[index], seed)
            except BadPayload as error:  # numbers beyond a codec
                results.append(DeviceResult(device.name, 0, 0.0, 0, received_bytes, {}, str(error)))
                continue
            device.kept = {name: value[index].clone() for name, value in kept.items()}
            device.kept_round = number
            loss = trained.losses[index] if program.train else None
            results.append(
                DeviceResult(
                    device.name,
                    trained.samples[index],
                    loss,
                    trained.flops[index],
                    received_bytes,
                    upload,
                    images=len(device.train),
                    steps=trained.steps[index],
                )
            )
        return results

    def _upload(
        self, program: Program, device: SimulatedDevice, deltas: Tensors, collected: Tensors, seeds: Seeds
    ) -> Tensors:
        """The result's tensors, as the device would code them."""
        if program.clip_delta is not None:
            deltas = clip_update(deltas, program.clip_delta)
        for phase in program.train:
            if phase.collect:
                output = phase.collect.output
                collected[output] = noisy_rows(collected[output], phase.collect, seeds)
        if program.secure:
            return {name: deltas[name] for name in program.list_summed()}
        upload, device.residual = encode_upload(program, deltas, collected, device.residual)
        return upload

    def _test_together(
        self, number: int, method: Method, program: Program, devices: Sequence[SimulatedDevice]
    ) -> list[DeviceEvaluation]:
        values = self._values(method, program, devices, number, "evaluate")
        drawn = [Seeds(self._config.seed, number, device.name).generators(6) for device in devices]
        train, test = [device.train for device in devices], [device.test for device in devices]
        flops = [evaluation_flops(program, device.train, device.test) for device in devices]
        if program.evaluate.adapt:
            adapted = self._cohort.train(
                Work(PlannedTask(program="", groups={}), program), method, program.evaluate.adapt, values, train,
                [draws[:5] for draws in drawn],
            )  # fmt: skip
            values = values.with_own(adapted.tensors)
            flops = [sum(both) for both in zip(flops, adapted.flops, strict=True)]
        answers = self._cohort.answer(program, method, values, train, test, [draws[5] for draws in drawn])
        return [
            DeviceEvaluation(device.name, *answer, spent)
            for device, answer, spent in zip(devices, answers, flops, strict=True)
        ]

    def _groups(self, devices: Sequence[SimulatedDevice], number: int) -> dict[Method, list[SimulatedDevice]]:
        """Devices by Program, those with the most images first: those of one Program can be computed in one batch."""
        groups: dict[Method, list[SimulatedDevice]] = {}
        for device in sorted(devices, key=lambda device: -len(device.train)):
            groups.setdefault(self._plan.method_for(device.name, number), []).append(device)
        return groups

    def _in_parts(
        self, method: Method, devices: Sequence[SimulatedDevice], work: Callable[[Sequence[SimulatedDevice]], T]
    ) -> Iterator[T]:
        """Call `work` with as many devices as should fit into memory, and with fewer when they do not.

        Raises FedvitError when memory is too small for a single device.
        """
        left = list(devices)
        while left:
            some = left[: self._at_once.setdefault(method, self._likely_at_once(method))]
            try:
                made = work(some)
            except torch.OutOfMemoryError as error:
                if len(some) == 1:
                    raise FedvitError(
                        "FV2108",
                        f"{self._accelerator}: its memory is too small for the work of one device ({some[0].name}): "
                        f"{str(error).splitlines()[0]} Choose a smaller batch_size or model, or accelerator = 'cpu'",
                    ) from error
                self._at_once[method] = len(some) // 2
                self._log(f"{self._accelerator}: memory is short; batches have {len(some) // 2} devices from now on")
                self._cohort.forget()
                continue
            left = left[len(some) :]
            yield made

    def _likely_at_once(self, method: Method) -> int:
        program, vit = self._program(method), self._plan.vit
        batch = program.batch
        numbers = sum(int(np.prod(spec.shape)) for spec in program.tensors.values())
        slots = max((len(phase.slots) for phase in program.train), default=0)
        tokens = batch.tokens + vit.prefix_tokens
        device_bytes = 2 * batch.batch_size * vit.activation_bytes(tokens) + 4 * numbers * (4 + 2 * slots)
        if self._accelerator.type == "cuda":
            free_bytes = torch.cuda.mem_get_info(self._accelerator)[0]
        else:
            free_bytes = psutil.virtual_memory().available // 2
        return max(1, min(MOST_AT_ONCE, int(0.8 * free_bytes) // device_bytes))

    def _program(self, method: Method) -> Program:
        if method not in self._programs:
            self._programs[method] = self._plan.describe(method)
        return self._programs[method]

    # --- values ---------------------------------------------------------------------------------------

    def _values(
        self, method: Method, program: Program, devices: Sequence[SimulatedDevice], number: int, kind: TaskKind
    ) -> Values:
        """Every tensor of the Program at the start of a task of these devices."""
        common: Named = {}
        own: Named = {}
        kept = set(program.with_role(Role.LOCAL)) | (set(program.evaluate.kept) if kind == "evaluate" else set())
        for group, spec in program.groups.items():
            names = [name for name in program.names(group) if not name.endswith(SCALE)]
            if spec.role.is_made_for_device:
                first = self._generated([device.name for device in devices], names)
            else:
                first = self._given(method, group, names)
            if group not in kept:
                (own if spec.role.is_made_for_device else common).update(first)
                continue
            counts = spec.role is Role.LOCAL or not program.evaluate.kept_of_this_round
            for name in names:
                rows = []
                for index, device in enumerate(devices):
                    has = name in device.kept and (counts or device.kept_round == number)
                    initial = first[name][index] if spec.role.is_made_for_device else first[name]
                    rows.append(device.kept[name] if has else initial)
                own[name] = torch.stack(rows)
        return Values(common, own)

    def _given(self, method: Method, group: str, names: list[str]) -> Named:
        """The values of a group that all devices of a method get in this round."""
        key = method.as_traced(), group
        if key not in self._here:
            spec = self._program(method).groups[group]
            if not spec.role.from_server_each_round:
                tensors = {name: self._plan.values[name] for name in names}
            elif group in self._sent:
                tensors = unpack(self._blobs.get(self._sent[group].digest))
            else:
                tensors = {name: self._state.tensors[name] for name in names}
            sent = as_sent(method, self._plan.vit, tensors)
            given = {name: torch.from_numpy(value) for name, value in sent.items()}
            self._here[key] = self._to_accelerator(unpack_tensors(given))
        return self._here[key]

    def _generated(self, devices: Sequence[str], names: list[str]) -> Named:
        """(D, ...) tensors that the server generates for these devices."""
        made = self._plan.rule.generate_for(self._state, devices, self._config.seed, self._accelerator)
        if self._config.updates.down_whole == NONE:
            return {name: made[name] for name in names}
        coded = []
        for index in range(len(devices)):
            tensors = {name: made[name][index].cpu().numpy() for name in names}
            coded.append(unpack(self._blobs.get(snapshot(tensors, self._config.updates, self._blobs).digest)))
        return self._to_accelerator({name: torch.from_numpy(np.stack([one[name] for one in coded])) for name in names})

    def _to_accelerator(self, tensors: Named) -> Named:
        return {name: value.to(self._accelerator) for name, value in tensors.items()}
