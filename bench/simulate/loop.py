"""The plain PyTorch loop over clients, as it is written in PFLlib and FL-bench. As a program: one measured process.

One module and one client at a time: copy the weights in, `loss.backward(); optimizer.step()`, copy them out,
average the state dicts on the device. Images are tensors in memory, on the accelerator where there is one. FedTP's
hypernetwork is a module with its own optimizer. fedvit's engines are not used, only its image readers and its model
builder, so that all sides train the same model on the same images.
"""

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import numpy as np
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.nn import functional

from bench.simulate.jobs import Job, Measured, Start, cohorts, decode_job
from fedvit.data.folder import DeviceData, Split
from fedvit.models import SMALL, build_vit

State = dict[str, Tensor]

TEST_BATCH = 256
GENERATED = ".attn.qkv.weight"
"""Suffix of the names of the tensors that FedTP generates."""
EMBEDDING, HIDDEN, SERVER_LR = 32, 150, 0.01
"""FedTP's hypernetwork: width of an embedding, width of a hidden layer, rate of its SGD."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client's images, (N, 3, S, S) float32 between -1 and 1, and labels, in memory."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def open(cls, folder: Path, size: int, accelerator: torch.device) -> "Client":
        data = DeviceData.open(folder)
        (images, labels), (test_images, test_labels) = (
            (_pixels(split, size).to(accelerator), torch.from_numpy(split.labels).to(accelerator))
            for split in (data.train, data.test)
        )
        return cls(images=images, labels=labels, test_images=test_images, test_labels=test_labels)


def _pixels(split: Split, size: int) -> Tensor:
    pixels, _ = split.load(np.arange(len(split)), size)
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


def make_model(job: Job, classes: int, seed: int) -> nn.Module:
    """The job's ViT as a timm module from images to logits, with timm's default fused attention."""
    vit = build_vit(SMALL, classes, seed=seed, options=job.model_options).vit
    for module in vit.modules():
        if isinstance(module, Attention):
            module.fused_attn = True  # type: ignore[misc]  # final for TorchScript alone
    return vit


def train(model: nn.Module, client: Client, job: Job, draw: torch.Generator, *, bf16: bool = False) -> None:
    """A client's part of a round: each epoch has a new order of its images; the last batch may be smaller."""
    options = job.options
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=options["lr"], momentum=options["momentum"])
    for _ in range(options["epochs"]):
        order = torch.randperm(len(client.labels), generator=draw).to(client.labels.device)
        for rows in torch.split(order, options["batch_size"]):
            optimizer.zero_grad()
            with torch.autocast(order.device.type, torch.bfloat16, enabled=bf16):
                loss: Any = functional.cross_entropy(model(client.images[rows]), client.labels[rows])
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, client: Client) -> float:
    """Share of a client's test images that are classified correctly."""
    model.eval()
    batches = zip(torch.split(client.test_images, TEST_BATCH), torch.split(client.test_labels, TEST_BATCH), strict=True)
    correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches)
    return correct / len(client.test_labels)


def copy_state(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def average(states: Sequence[State], samples: Sequence[int]) -> State:
    """The mean of clients' tensors, each weighted by its number of training images."""
    total = sum(samples)
    return {
        name: torch.stack([state[name] * (count / total) for state, count in zip(states, samples, strict=True)]).sum(0)
        for name in states[0]
    }


class HyperNetwork(nn.Module):
    """FedTP's hypernetwork: four linear layers on a client's embedding, and one more for each generated tensor."""

    def __init__(self, clients: int, shapes: Mapping[str, torch.Size], embedding: int, hidden: int) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.embedding = nn.Embedding(clients, embedding)
        layers: list[nn.Module] = [nn.Linear(embedding, hidden)]
        for _ in range(3):
            layers += [nn.ReLU(), nn.Linear(hidden, hidden)]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(hidden, shape.numel()) for shape in self.shapes.values())

    def forward(self, clients: Tensor) -> State:
        """Numbers of clients (K,) -> each generated tensor, (K, ...)."""
        hidden = self.trunk(self.embedding(clients))
        return {
            name: head(hidden).reshape(-1, *shape)
            for (name, shape), head in zip(self.shapes.items(), self.heads, strict=True)
        }


def learn_from(
    optimizer: torch.optim.Optimizer, generated: State, trained: Sequence[State], samples: Sequence[int]
) -> None:
    """One step of the hypernetwork towards clients' trained versions of their generated tensors.

    The gradient of a generated tensor is minus its client's delta, weighted by the client's images.
    """
    total = sum(samples)
    downhill = [
        torch.stack(
            [
                (before - state[name]) * (count / total)
                for before, state, count in zip(generated[name].detach(), trained, samples, strict=True)
            ]
        )
        for name in generated
    ]
    optimizer.zero_grad()
    torch.autograd.backward(list(generated.values()), downhill)
    optimizer.step()


class FedAvgLoop:
    """Every client trains the whole model, the server averages."""

    def __init__(self, model: nn.Module, clients: Sequence[Client]) -> None:
        self.model, self.clients = model, clients
        self.shared = copy_state(model)

    def round(self, cohort: Sequence[int], train: Callable[[Client], None]) -> None:
        """One round with the clients of these numbers; `train` trains the model on a client."""
        states = [self._train(number, train) for number in cohort]
        self.shared = average(states, self._samples(cohort))

    def load(self, number: int) -> None:
        """Load a client's tensors into the model."""
        self.model.load_state_dict(self.shared)

    def _train(self, number: int, train: Callable[[Client], None]) -> State:
        self.load(number)
        train(self.clients[number])
        return copy_state(self.model)

    def _samples(self, cohort: Sequence[int]) -> list[int]:
        return [len(self.clients[number].labels) for number in cohort]


class FedTPLoop(FedAvgLoop):
    """A hypernetwork makes each client's projection to queries, keys and values; the rest is averaged."""

    def __init__(self, model: nn.Module, clients: Sequence[Client]) -> None:
        super().__init__(model, clients)
        shapes = {name: value.shape for name, value in self.shared.items() if name.endswith(GENERATED)}
        self.accelerator = next(model.parameters()).device
        self.hypernetwork = HyperNetwork(len(clients), shapes, EMBEDDING, HIDDEN).to(self.accelerator)
        self.optimizer = torch.optim.SGD(self.hypernetwork.parameters(), lr=SERVER_LR)
        for name in shapes:
            del self.shared[name]

    def round(self, cohort: Sequence[int], train: Callable[[Client], None]) -> None:
        generated = self._generate(cohort)
        states = []
        for index, number in enumerate(cohort):
            self._load(generated, index)
            train(self.clients[number])
            states.append(copy_state(self.model))
        samples = self._samples(cohort)
        self.shared = average([{name: state[name] for name in self.shared} for state in states], samples)
        learn_from(self.optimizer, generated, states, samples)

    def load(self, number: int) -> None:
        self._load(self._generate([number]), 0)

    def _generate(self, numbers: Sequence[int]) -> State:
        return dict(self.hypernetwork(torch.tensor(numbers, device=self.accelerator)))

    def _load(self, generated: State, index: int) -> None:
        own = {name: values[index].detach() for name, values in generated.items()}
        self.model.load_state_dict({**self.shared, **own})


METHODS: Mapping[str, type[FedAvgLoop]] = {"fedavg": FedAvgLoop, "fedtp": FedTPLoop}


def run(job: Job, folders: Sequence[Path], start: Start, threads: int) -> tuple[list[float], float]:
    """Train, then test on each client's own images: (end of each round, mean accuracy over clients).

    `threads` are torch's on the processor. Times are seconds of the monotonic clock.
    Clients without test images have no accuracy.
    """
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest" if start.precision == "fp32" else "high")
    torch.manual_seed(start.seed)
    accelerator = torch.device(start.accelerator)
    draw = torch.Generator().manual_seed(start.seed)
    clients = [Client.open(folder, job.model_options["image_size"], accelerator) for folder in folders]
    classes = len(DeviceData.open(folders[0]).classes)
    method = METHODS[job.method](make_model(job, classes, start.seed).to(accelerator), clients)
    numbers = {folder.name: number for number, folder in enumerate(folders)}
    train_client = partial(_train_client, method.model, job, draw, start.precision == "bf16")
    ended = []
    for cohort in itertools.islice(cohorts(list(numbers), job.cohort, start.seed), start.rounds):
        method.round([numbers[name] for name in cohort], train_client)
        if accelerator.type == "cuda":
            torch.cuda.synchronize()
        ended.append(time.monotonic())
    accuracies = []
    for number, client in enumerate(clients):
        if len(client.test_labels):
            method.load(number)
            accuracies.append(accuracy(method.model, client))
    return ended, mean(accuracies)


def _train_client(model: nn.Module, job: Job, draw: torch.Generator, bf16: bool, client: Client) -> None:
    train(model, client, job, draw, bf16=bf16)


def main() -> None:
    """Arguments: the job, rounds, seed, device, precision, threads, device folders. Prints one JSON object."""
    text, rounds, seed, device, precision, threads, *folders = sys.argv[1:]
    start = Start.parse(rounds, seed, device, precision)
    ended, reached = run(decode_job(text), [Path(folder) for folder in folders], start, int(threads))

    from profiles.probes.host import peak_rss_bytes  # imported last, since a user's program does not have it

    measured = Measured(ended=ended, accuracy=reached, peak_rss_bytes=peak_rss_bytes())
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")


if __name__ == "__main__":
    main()
