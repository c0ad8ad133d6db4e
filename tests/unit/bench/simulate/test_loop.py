"""The plain loop: it learns, and averages and moves its hypernetwork as fedvit's rules do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.simulate.jobs import Job, Start
from bench.simulate.loop import (
    EMBEDDING,
    HIDDEN,
    SERVER_LR,
    Client,
    FedTPLoop,
    HyperNetwork,
    State,
    average,
    copy_state,
    learn_from,
    make_model,
    run,
)
from fedvit.methods.base import RoundContext, ServerState
from fedvit.methods.fedtp import FedTP as OurFedTP
from fedvit.methods.generators.hypernetwork import EMBEDDING as OUR_EMBEDDING
from fedvit.methods.generators.hypernetwork import Hypernetwork
from fedvit.methods.optimizers import MomentumSgd
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models import SMALL, build_vit
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from tests.support.method_steps import make_context
from tests.support.uploads import upload

MODEL = {"image_size": 16, "patch_size": 8, "width": 32, "depth": 1, "heads": 2}
OPTIONS = {"epochs": 2, "batch_size": 16, "optimizer": "sgd", "lr": 0.05, "momentum": 0.9}
SHAPES = {"blocks.0.attn.qkv.weight": torch.Size((6, 2)), "blocks.1.attn.qkv.weight": torch.Size((6, 2))}
SAMPLES = (3, 1, 4)
"""Training images of the clients 2, 0 and 3."""
ASKED = (2, 0, 3)


def job(method: str) -> Job:
    return Job(name="digits", method=method, options=OPTIONS, model_options=MODEL, cohort=3)


def context() -> RoundContext:
    return make_context(build_vit(SMALL, 4, seed=0, options=MODEL))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("dealt") / "parts"
    deal("digits", "iid", 4, out, DealSettings(test_share=0.3, size=16))
    return device_folders(out, None)


@pytest.mark.parametrize("method", ["fedavg", "fedtp"])
def test_loop_learns_digits(folders: list[Path], method: str) -> None:
    """Ten classes: by chance a tenth is right."""
    ended, accuracy = run(job(method), folders, Start(4, 0, "cpu", "fp32"), threads=1)
    assert len(ended) == 4
    assert ended == sorted(ended)
    assert accuracy > 0.4


def test_model_is_ours() -> None:
    """Patches or images in, one attention fused and the other not: the same weights give the same logits."""
    vit = build_vit(SMALL, 10, seed=3, options=MODEL)
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(5, 4, -1)
    model = make_model(job("fedavg"), 10, seed=3)
    torch.testing.assert_close(model(images), vit.classify(vit.run_to_class(vit.embed(patches), 0)))


def test_average_is_that_of_weighted_mean() -> None:
    draw = torch.Generator().manual_seed(0)
    start, *states = ({name: torch.randn(*shape, generator=draw) for name, shape in SHAPES.items()} for _ in range(4))
    uploads = [
        upload(str(number), samples, {name: state[name] - start[name] for name in start})
        for number, (samples, state) in enumerate(zip(SAMPLES, states, strict=True))
    ]
    before = ServerState({name: value.numpy() for name, value in start.items()})
    after, _ = WeightedMean().close(before, uploads, context())
    for name, value in average(states, SAMPLES).items():
        np.testing.assert_allclose(value.numpy(), after.tensors[name], rtol=1e-5, atol=1e-6)


def test_fedtp_has_the_hypernetwork_of_ours() -> None:
    ours = OurFedTP()
    assert (ours.embedding_dim, ours.hidden, ours.server_lr) == (EMBEDDING, HIDDEN, SERVER_LR)
    assert (ours.server_momentum, ours.server_weight_decay, ours.all_embeddings) == (0.0, 0.0, False)


def _memory(network: HyperNetwork) -> dict[str, np.ndarray[Any, Any]]:
    """The hypernetwork's weights under the names that our rule remembers them by."""
    layers = {f"trunk.{place // 2}": layer for place, layer in enumerate(network.trunk) if place % 2 == 0}
    layers |= {f"head.{name}": head for name, head in zip(network.shapes, network.heads, strict=True)}
    named: State = {f"generator/{name}.weight": layer.weight for name, layer in layers.items()}
    named |= {f"generator/{name}.bias": layer.bias for name, layer in layers.items()}
    named |= {f"device/{number}/{OUR_EMBEDDING}": row for number, row in enumerate(network.embedding.weight)}
    return {name: value.detach().numpy().copy() for name, value in named.items()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_hypernetwork_is_updated_as_by_the_method_rule(momentum: float) -> None:
    """The same weights and the same deltas in two rounds: the same weights after each, also of a client that was not
    asked."""
    torch.manual_seed(0)
    network = HyperNetwork(4, SHAPES, embedding=3, hidden=5)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=momentum)
    rule = GeneratorUpdate(
        generator=Hypernetwork(
            targets={name: tuple(shape) for name, shape in SHAPES.items()}, embedding_dim=3, hidden=5
        ),
        optimizer=MomentumSgd(momentum=momentum),
        lr=0.5,
        all_embeddings=True,
    )
    state = ServerState({}, _memory(network))
    for _ in range(2):
        generated = network(torch.tensor(ASKED))
        for place, number in enumerate(ASKED):
            for name, value in rule.generate(state, str(number), 0).items():
                np.testing.assert_allclose(generated[name][place].detach().numpy(), value, rtol=0, atol=1e-5)
        deltas = [{name: torch.randn(*shape) for name, shape in SHAPES.items()} for _ in ASKED]
        trained = [
            {name: generated[name][place].detach() + value for name, value in delta.items()}
            for place, delta in enumerate(deltas)
        ]
        uploads = [
            upload(str(number), samples, delta) for number, samples, delta in zip(ASKED, SAMPLES, deltas, strict=True)
        ]
        before = _memory(network)
        learn_from(optimizer, generated, trained, SAMPLES)
        state, _ = rule.close(state, uploads, context())
        after = _memory(network)
        assert any(np.abs(after[name] - before[name]).max() > 1e-3 for name in after)
        for name, value in after.items():
            np.testing.assert_allclose(value, state.memory[name], rtol=0, atol=1e-5, err_msg=name)


def test_fedtp_client_gets_its_own_attention() -> None:
    """What is generated differs between clients, the rest does not, and after a round both have moved."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    client = Client(images=images, labels=labels, test_images=images, test_labels=labels)
    loop = FedTPLoop(make_model(job("fedtp"), 4, seed=0), [client] * 2)

    def load_state_of(number: int) -> State:
        loop.load(number)
        return copy_state(loop.model)

    def nudge(client: Client) -> None:
        with torch.no_grad():
            for value in loop.model.parameters():
                value += 0.1

    first, second = load_state_of(0), load_state_of(1)
    apart = {name for name in first if not torch.equal(first[name], second[name])}
    assert apart == {"blocks.0.attn.qkv.weight"}
    loop.round([0, 1], nudge)
    after = load_state_of(0)
    assert all(not torch.equal(after[name], first[name]) for name in first)
