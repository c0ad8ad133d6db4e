"""Pull the devices' updates back through the generator that made their tensors."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload, clip_grads
from fedvit.methods.generators.base import Generator, drawing
from fedvit.methods.optimizers import Optimizer
from fedvit.methods.products import products_in
from fedvit.methods.rules.memory import tensor_of, with_tensors
from fedvit.methods.rules.optimizer_state import restore, save_state
from fedvit.methods.rules.weighted_mean import cohort_weights
from fedvit.roles import Novel
from fedvit.tensors import Tensors

AT_ONCE_BYTES = 64 << 20
"""Size of generated tensors that are processed at a time, for several devices together."""
SHARED, PERSONAL = "generator/", "device/"
"""Beginnings of names in the memory: of the generator's weights, and, with the device's name, of its embedding."""


@dataclass(frozen=True, kw_only=True)
class GeneratorUpdate(ServerRule):
    """One descent step on the generator and on the embeddings of the devices that answered.

    A device got W_i = G(phi, z_i) and returned delta_i = after - start. The optimizer is given
    g = sum_i w_i J_i^T (-delta_i), J_i = dG/d(phi, z_i): with one step of SGD on the device that is its
    rate times the gradient of the cohort's loss by (phi, z). Several papers write the opposite sign
    (FedTP eq. 7-10, pFedPG eq. 4-5), which would be ascent.

    The optimizer's state is kept across rounds; its rate is constant, since the deltas have the schedule in
    them. Embeddings of devices that did not answer stay as they are, unless `all_embeddings` asks for what
    code with one dense table does: weight decay and momentum move every embedding, here of every device
    that has answered once.
    """

    generator: Generator
    optimizer: Optimizer
    lr: float
    weights: Literal["samples", "equal", "sum"] = "samples"
    clip_norm: float | None = None
    trains: Literal["all", "embeddings"] = "all"  # embeddings: phi stands still (novel devices)
    all_embeddings: bool = False

    why_never_late = "an update is pulled back through the generator as it was when it made the device's tensors"
    averages = False

    @property
    def is_divided(self) -> bool:
        """Each process takes some devices' updates."""
        return True

    def for_novel(self, learns: Novel) -> "GeneratorUpdate":
        return replace(self, trains="embeddings" if learns == "own" else "all")

    def begin(self, seed: int) -> Tensors:
        first = self.generator.shared(drawing(seed, "shared"))
        return {f"{SHARED}{name}": value.numpy() for name, value in first.items()}

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        with torch.no_grad():
            values = self.generator.generate(self._shared(state), self._personal(state, device, seed))
        return {name: np.ascontiguousarray(value.cpu().numpy()) for name, value in values.items()}

    def generate_for(
        self, state: ServerState, devices: Sequence[str], seed: int, place: torch.device
    ) -> dict[str, Tensor]:
        shared = {name: value.to(place) for name, value in self._shared(state).items()}
        own = [self._personal(state, device, seed) for device in devices]
        stacked = {name: torch.stack([values[name].to(place) for values in own]) for name in own[0]}
        with torch.no_grad():
            return self._generate(shared, stacked, len(devices))

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Devices are processed in groups of AT_ONCE_BYTES. Raises EmptyCohort when no upload holds a sample."""
        uploads = [upload for upload in uploads if upload.samples > 0]
        if not uploads:
            raise EmptyCohort("FV1502", f"round {context.round}: no accepted result holds a training image")
        place = torch.device(context.accelerator)
        parameters: dict[str, Tensor] = {}

        def leaves(prefix: str, values: dict[str, Tensor], *, move: bool = True) -> dict[str, Tensor]:
            made = {name: value.to(place, copy=True).requires_grad_(move) for name, value in values.items()}
            if move:
                parameters.update({f"{prefix}{name}": value for name, value in made.items()})
            return made

        shared = leaves(SHARED, self._shared(state), move=self.trains == "all")
        known = {upload.device for upload in uploads}
        if self.all_embeddings:
            known |= {key.split("/")[1] for key in state.memory if key.startswith(PERSONAL)}
        personal = {
            device: leaves(f"{PERSONAL}{device}/", self._personal(state, device, context.seed))
            for device in sorted(known)
        }
        for value in parameters.values():
            value.grad = torch.zeros_like(value)
        weights = self._weights(uploads, context.round)
        figures = self._describe(shared, [personal[upload.device] for upload in uploads])
        spread = Spread()
        number, mine = 0, uploads[context.rank :: context.world_size]
        while number < len(mine):
            context.progress(f"generator: device {number + 1} of {len(mine)}")
            deltas = mine[number].load()
            at_once = max(1, AT_ONCE_BYTES // sum(delta.nbytes for delta in deltas.values()))
            part = mine[number : number + at_once]
            spread.add(self._pull_back(part, shared, personal, weights, context))
            number += len(part)
        if context.world_size > 1:
            self._add_up(list(parameters.values()))
            with torch.no_grad():
                spread.add_up(self.generator.generate(shared, personal[uploads[0].device]))
        if (difference := spread.difference()) is not None:
            figures["generated_difference"] = difference
        grads = {name: value.grad for name, value in parameters.items() if value.grad is not None}
        norm = float(torch.sqrt(sum((grad.square().sum() for grad in grads.values()), torch.zeros((), device=place))))
        if self.clip_norm is not None:
            for name, grad in clip_grads(grads, self.clip_norm).items():
                parameters[name].grad = grad
        optimizer = self._optimizer(parameters)
        restore(optimizer, parameters, state.memory)
        optimizer.step()
        memory = with_tensors(state.memory, {**parameters, **save_state(optimizer, parameters)})
        return replace(state, memory=memory), {"generator_gradient_norm": norm, **figures}

    def _optimizer(self, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        factors = {f"{SHARED}{name}": factor for name, factor in self.generator.relative_rates.items()}
        by_rate: dict[float, list[Tensor]] = defaultdict(list)
        for name, value in parameters.items():
            by_rate[self.lr * factors.get(name, 1.0)].append(value)
        return self.optimizer.in_torch([{"params": values, "lr": lr} for lr, values in by_rate.items()], self.lr)

    def _describe(self, shared: dict[str, Tensor], personal: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Mean, lowest and highest over devices of the generator's own figures."""
        figures: dict[str, float] = {}
        with torch.no_grad():
            stacked = {name: torch.stack([values[name] for values in personal]) for name in personal[0]}
            if not stacked:
                return figures
            described = torch.vmap(self.generator.describe, in_dims=(None, 0))(shared, stacked)
        for name, values in described.items():
            figures |= {name: float(values.mean())}
            figures |= {f"{name}_lowest": float(values.min()), f"{name}_highest": float(values.max())}
        return figures

    def _pull_back(
        self,
        uploads: Sequence[Upload],
        shared: dict[str, Tensor],
        personal: dict[str, dict[str, Tensor]],
        weights: dict[str, float],
        context: RoundContext,
    ) -> dict[str, Tensor]:
        """Add w_i J_i^T (-delta_i) of some devices to the gradients of phi and z_i; return their generated values."""
        own = [personal[upload.device] for upload in uploads]
        stacked = {name: torch.stack([values[name] for values in own]) for name in own[0]}
        place = torch.device(context.accelerator)
        with products_in(context.precision, place):
            made = self._generate(shared, stacked, len(uploads))
        downhill: dict[str, list[Tensor]] = {name: [] for name in made}
        for upload in uploads:
            delta = upload.load()
            for name, values in downhill.items():
                values.append(torch.tensor(delta[name], device=place) * -weights[upload.device])
        gradients = {name: torch.stack(values) for name, values in downhill.items()}
        # made in bfloat16 where products are
        wanted = [value.to(gradients[name].dtype) for name, value in made.items()]
        torch.autograd.backward(wanted, list(gradients.values()))
        return {name: value.detach() for name, value in made.items()}

    def _add_up(self, parameters: Sequence[Tensor]) -> None:
        """Gradients become their sum over all processes."""
        grads = [value.grad for value in parameters if value.grad is not None]
        flat = torch.nn.utils.parameters_to_vector(grads)
        torch.distributed.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, grads)

    def _generate(self, shared: dict[str, Tensor], personal: dict[str, Tensor], devices: int) -> dict[str, Tensor]:
        """(D, ...) of what the generator makes of `personal` (D, ...)."""
        if personal:
            made: dict[str, Tensor] = torch.vmap(self.generator.generate, in_dims=(None, 0))(shared, personal)
            return made
        same = self.generator.generate(shared, {})  # all get the same
        return {name: value.expand(devices, *value.shape) for name, value in same.items()}

    def _weights(self, uploads: Sequence[Upload], round_number: int) -> dict[str, float]:
        match self.weights:
            case "samples":
                return cohort_weights(uploads, round_number)
            case "equal":
                return {upload.device: 1 / len(uploads) for upload in uploads}
            case "sum":
                return {upload.device: 1.0 for upload in uploads}

    def _shared(self, state: ServerState) -> dict[str, Tensor]:
        return _under(state, SHARED)

    def _personal(self, state: ServerState, device: str, seed: int) -> dict[str, Tensor]:
        kept = _under(state, f"{PERSONAL}{device}/")
        return kept or self.generator.personal(drawing(seed, "device", device))


class Spread:
    """Sums that give the difference between devices' generated values; their memory does not grow with the devices."""

    def __init__(self) -> None:
        self._devices = 0
        self._sums: dict[str, Tensor] = {}
        self._squares = 0.0

    def add_up(self, like: Mapping[str, Tensor]) -> None:
        """Sum over the processes that close a round together; `like` has the shapes, for those without a device."""
        sums = [self._sums.get(name, torch.zeros_like(value, dtype=torch.float64)) for name, value in like.items()]
        totals = torch.tensor([self._devices, self._squares], dtype=torch.float64, device=sums[0].device)
        flat = torch.cat([totals, *(value.flatten() for value in sums)])
        torch.distributed.all_reduce(flat)
        self._devices, self._squares = int(flat[0]), float(flat[1])
        torch.nn.utils.vector_to_parameters(flat[2:], sums)
        self._sums = dict(zip(like, sums, strict=True))

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the values of some devices; the first dimension is that of devices."""
        self._devices += len(next(iter(values.values())))
        for name, value in values.items():
            exact = value.double()  # differences of 1e-6 are lost in sums of float32
            self._sums[name] = self._sums.get(name, 0.0) + exact.sum(dim=0)
            self._squares += float(exact.square().sum())

    def difference(self) -> float | None:
        """Root mean square over pairs of ||W_i - W_j||, divided by that of ||W_i||; None for a single device."""
        if self._devices < 2 or not self._squares:
            return None
        common = sum(float(value.square().sum()) for value in self._sums.values()) / self._devices
        apart = max(0.0, self._squares - common) / (self._devices - 1)  # half of the mean square over pairs
        return math.sqrt(2 * apart / (self._squares / self._devices))


def _under(state: ServerState, prefix: str) -> dict[str, Tensor]:
    """Sorted by name, as the order in a file varies and would change sums."""
    names = state.memory_names.get(prefix.removesuffix("/"), ())
    return {name.removeprefix(prefix): tensor_of(state.memory, name) for name in names}
