"""Ditto and FedProto beside PFLlib's, with the same weights and batches."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedvit.methods import build_model, make_method
from fedvit.methods.base import RoundContext, ServerState
from fedvit.methods.class_sums import KNOWN, PROTOTYPES, SUMS
from fedvit.methods.twins import name_twins, select_twins
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from tests.support.released import (
    as_images,
    assert_equal,
    draw_batches,
    in_double,
    load_modules,
    make_client,
    train_device,
)
from tests.support.uploads import upload

CLASSES, SIDE, RATE, PULL = 5, 16, 0.05, 0.7
MODEL = {"image_size": SIDE, "patch_size": 8, "width": 24, "depth": 2, "heads": 3}
IMAGES = [12, 16, 20]
EXACT = 1e-13

clients, ditto_server, proto_clients, proto_server, models = load_modules(
    "PFLlib/system", "flcore.clients.clientditto", "flcore.servers.serverditto", "flcore.clients.clientproto",
    "flcore.servers.serverproto", "flcore.trainmodel.models", unused=("h5py", "ujson"),
)  # fmt: skip


def timm_model() -> Any:
    return build_vit(SMALL, CLASSES, seed=1, options=MODEL).vit.double()


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def our_model(name: str, options: dict[str, Any]) -> tuple[Any, PatchViT]:
    method = make_method(name, {"lr": RATE, "epochs": 2, **options})
    return method, build_model(method, SMALL, CLASSES, seed=0, options=MODEL)


def in_round(number: int, vit: PatchViT) -> RoundContext:
    return RoundContext(
        round=number, seed=0, lr_scale=1.0, vit=vit, accelerator="cpu",
        load=lambda digest: {}, progress=lambda line: None,
    )  # fmt: skip


def test_three_rounds_of_ditto() -> None:
    """Three devices of which each trains two epochs of its own batches: the shared model and all personal ones."""
    batches = [draw_batches(device, [count // 2] * 2, SIDE, CLASSES) for device, count in enumerate(IMAGES)]
    theirs = [_make_ditto(count, data) for count, data in zip(IMAGES, batches, strict=True)]
    server = object.__new__(ditto_server.Ditto)
    server.clients = server.selected_clients = theirs
    server.current_num_join_clients, server.client_drop_rate, server.time_threthold = len(theirs), 0.0, np.inf
    server.global_model = timm_model()
    method, vit = our_model("ditto", {"lam": PULL})
    first = copy_of(server.global_model)
    state = ServerState({name: value.numpy() for name, value in first.items()})
    twins = [dict(first) for _ in theirs]
    for number in range(1, 4):
        server.send_models()
        for client in theirs:
            client.ptrain()
            client.train()
        server.receive_models()
        server.aggregate_parameters()
        uploads = []
        for device, data in enumerate(batches):
            start = {name: torch.from_numpy(value) for name, value in state.tensors.items()}
            after = train_device(method, vit, {**start, **name_twins(twins[device])}, data)
            twins[device] = select_twins(after)
            deltas = {name: (after[name] - start[name]).numpy() for name in start}
            uploads.append(upload(f"device-{device}", IMAGES[device], deltas))
        state, _ = method.server_rule(vit).close(state, uploads, in_round(number, vit))
        shared = {name: torch.from_numpy(value) for name, value in state.tensors.items()}
        assert_equal(shared, copy_of(server.global_model), EXACT)
        for client, twin in zip(theirs, twins, strict=True):
            assert_equal(twin, copy_of(client.model_per), EXACT)


def _make_ditto(images: int, batches: Any) -> Any:
    model, personal = timm_model(), timm_model()
    return make_client(
        clients.clientDitto, model=model, model_per=personal, local_epochs=2, plocal_epochs=2,
        learning_rate_decay=False, loss=nn.CrossEntropyLoss(), load_train_data=lambda: batches,
        send_time_cost={"num_rounds": 0, "total_cost": 0.0}, train_samples=images, id=images,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        optimizer_per=clients.PerturbedGradientDescent(personal.parameters(), lr=RATE, mu=PULL),
    )  # fmt: skip


def test_a_round_of_fedproto() -> None:
    """A device's training near prototypes of three of five classes, the means of its features, and its answers."""
    batches = draw_batches(0, [12, 12], SIDE, CLASSES)
    model = timm_model()
    head, model.head = model.head, nn.Identity()
    theirs = models.BaseHeadSplit(model, head).double()
    draw = torch.Generator().manual_seed(4)
    prototypes = torch.randn(CLASSES, MODEL["width"], generator=draw, dtype=torch.float64)
    known = torch.tensor([1, 0, 1, 1, 0], dtype=torch.float64)
    client = make_client(
        proto_clients.clientProto, model=theirs, local_epochs=2, learning_rate_decay=False, lamda=PULL,
        loss=nn.CrossEntropyLoss(), loss_mse=nn.MSELoss(), load_train_data=lambda: batches, num_classes=CLASSES,
        global_protos={row: prototypes[row] if known[row] else [] for row in range(CLASSES)},
        optimizer=torch.optim.SGD(theirs.parameters(), lr=RATE), load_test_data=lambda: batches,
    )  # fmt: skip
    method, vit = our_model("fedproto", {"lam": PULL})
    start = {**_as_ours(theirs), **in_double(method.extra_tensors(vit)), PROTOTYPES: prototypes, KNOWN: known}
    after = train_device(method, vit, start, batches)
    client.train()
    assert_equal({name: after[name] for name in vit.tensors()}, _as_ours(theirs), EXACT)

    client.collect_protos()  # training collects those of all its steps; ours are of the trained model
    upload_of_one = upload("device-0", 24, {SUMS: after[SUMS].numpy()})
    before = {name: start[name].numpy() for name in (SUMS, PROTOTYPES, KNOWN)}
    state, _ = method.server_rule(vit).close(ServerState(before), [upload_of_one], in_round(1, vit))
    means = proto_server.proto_aggregation([client.protos])
    for label, mean in means.items():
        np.testing.assert_allclose(state.tensors[PROTOTYPES][label], mean.numpy(), rtol=0, atol=1e-6)

    answers = [method.predict(vit, after, as_images(vit, images), None).argmax(dim=1) for images, _ in batches]
    right = sum(int((answer == labels).sum()) for answer, (_, labels) in zip(answers, batches, strict=True))
    assert client.test_metrics()[:2] == (right, 24)


def _as_ours(theirs: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("base."): value for name, value in copy_of(theirs).items()}
