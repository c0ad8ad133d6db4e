"""FedTP's models, hypernetworks, server rounds and baselines beside the released code's, with the same weights and
batches."""

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, RoundContext, ServerState
from fedvit.methods.calculus import Named
from fedvit.methods.fedrod import PERSONAL_HEAD
from fedvit.methods.generators.hypernetwork import EMBEDDING
from fedvit.methods.rules.generator_update import PERSONAL, SHARED
from fedvit.methods.twins import name_twins, select_twins
from fedvit.models import CNN, SMALL, TEXT
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.released import as_images, assert_equal, draw_batches, load_modules, train_device
from tests.support.uploads import upload

CLASSES, SIDE, PATCH, WIDTH, DEPTH, HEADS, HEAD_WIDTH = 10, 16, 4, 16, 2, 2, 12
MODEL = {
    "image_size": SIDE, "patch_size": PATCH, "width": WIDTH, "depth": DEPTH, "heads": HEADS, "head_width": HEAD_WIDTH,
    "mlp_ratio": 2.0, "qkv_bias": False, "norm_eps": 1e-5,
}  # fmt: skip
EMBEDDING_DIM, HIDDEN = 6, 9
DEVICES, COHORTS, IMAGES = 4, [(0, 1, 2), (1, 2, 3), (0, 2, 3)], [5, 7, 9, 11]
EXACT = 1e-14
RATE = 0.05

vit_module, hyper_module, cnn_module, text_module, trainers = load_modules(
    "FedTP", "models.vit", "models.Hypernetworks", "models.cnn", "models.language_transformer", "methods.method",
    unused=("faiss",),
)  # fmt: skip


def make_released_vit(seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = vit_module.ViT(
            image_size=SIDE, patch_size=PATCH, num_classes=CLASSES, dim=WIDTH, depth=DEPTH, heads=HEADS,
            dim_head=HEAD_WIDTH, mlp_dim=2 * WIDTH,
        )  # fmt: skip
    return made.double()


def rename(name: str) -> str:
    """Our name of one of their tensors."""
    parts = {"mlp_head.0": "norm", "mlp_head.1": "head", "to_patch_embedding.1": "patch_embed.proj"}
    parts["pos_embedding"] = "pos_embed"
    for block in range(DEPTH):
        theirs, ours = f"transformer.layers.{block}", f"blocks.{block}"
        parts |= {f"{theirs}.0.norm": f"{ours}.norm1", f"{theirs}.1.norm": f"{ours}.norm2"}
        parts |= {f"{theirs}.0.fn.to_qkv": f"{ours}.attn.qkv", f"{theirs}.0.fn.to_out.0": f"{ours}.attn.proj"}
        parts |= {f"{theirs}.1.fn.net.0": f"{ours}.mlp.fc1", f"{theirs}.1.fn.net.3": f"{ours}.mlp.fc2"}
    return next((name.replace(theirs, ours) for theirs, ours in parts.items() if name.startswith(theirs)), name)


def ours(theirs: Named) -> dict[str, Tensor]:
    """Their tensors as ours: a patch's values are ordered by row, column and colour there, by colour first here."""
    tensors = {rename(name): value.detach().clone() for name, value in theirs.items()}
    kernel = tensors["patch_embed.proj.weight"].reshape(WIDTH, PATCH, PATCH, 3)
    return tensors | {"patch_embed.proj.weight": kernel.permute(0, 3, 1, 2).contiguous()}


def our_model(name: str, options: dict[str, Any]) -> tuple[Any, PatchViT]:
    method = make_method(name, {"lr": RATE, **options})
    return method, build_model(method, SMALL, CLASSES, seed=0, options=MODEL)


def test_the_model() -> None:
    """Logits and all gradients."""
    theirs = make_released_vit(1)
    method, vit = our_model("fedavg", {})
    [(images, labels)] = draw_batches(0, [6], SIDE, CLASSES)
    logits = theirs(images)
    nn.functional.cross_entropy(logits, labels).backward()
    leaves = {name: value.requires_grad_() for name, value in ours(dict(theirs.named_parameters())).items()}
    assert leaves.keys() == vit.tensors().keys()
    answers = method.forward(vit, leaves, as_images(vit, images)).logits
    torch.testing.assert_close(answers, logits, rtol=0.0, atol=EXACT)
    nn.functional.cross_entropy(answers, labels).backward()
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert_equal(grads, ours({name: value.grad for name, value in theirs.named_parameters()}), EXACT)


def rename_cnn(name: str) -> str:
    """Our name of one of their convolutional network's tensors."""
    layer, _, kind = name.partition(".")
    blocks = {"conv1": "stem.conv", "conv2": "blocks.0.conv", "fc1": "blocks.1.linear", "fc2": "blocks.2.linear"}
    return f"{blocks.get(layer, 'head')}.{kind}"


def test_the_convolutional_network_and_its_hypernetwork() -> None:
    """Logits, all gradients, and the weights that are made for a device."""
    theirs = cnn_module.CNNTarget(n_kernels=4, out_dim=CLASSES).double()
    method = make_method("pfedhn", {"embedding_dim": EMBEDDING_DIM, "hidden": HIDDEN})
    vit = build_model(method, CNN, CLASSES, seed=0, options={"image_size": 32, "width": 4})
    [(images, labels)] = draw_batches(0, [6], 32, CLASSES)
    logits = theirs(images)
    nn.functional.cross_entropy(logits, labels).backward()
    leaves = {rename_cnn(name): value.detach().clone().requires_grad_() for name, value in theirs.named_parameters()}
    answers = method.forward(vit, leaves, as_images(vit, images)).logits
    torch.testing.assert_close(answers, logits, rtol=0.0, atol=EXACT)
    nn.functional.cross_entropy(answers, labels).backward()
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert_equal(grads, {rename_cnn(name): value.grad for name, value in theirs.named_parameters()}, EXACT)

    made = cnn_module.CNNHyper(2, EMBEDDING_DIM, out_dim=CLASSES, n_kernels=4, hidden_dim=HIDDEN, n_hidden=3).double()
    memory = {}
    heads = {"c1": "conv1", "c2": "conv2", "l1": "fc1", "l2": "fc2", "l3": "fc3"}
    for name, value in made.state_dict().items():
        part, _, kind = name.rpartition(".")
        if part.startswith("mlp"):
            memory[f"{SHARED}trunk.{int(part[4:]) // 2}.{kind}"] = value.numpy()
        elif part != "embeddings":
            layer, what = part.split("_")
            target = rename_cnn(f"{heads[layer]}.{'weight' if what == 'weights' else 'bias'}")
            memory[f"{SHARED}head.{target}.{kind}"] = value.numpy()
    memory[f"{PERSONAL}device-1/{EMBEDDING}"] = made.state_dict()["embeddings.weight"][1].numpy()
    ours_made = method.server_rule(vit).generate(ServerState({}, memory), "device-1", 0)
    want = {rename_cnn(name): value.detach() for name, value in made(torch.tensor([1])).items()}
    assert_equal({name: torch.from_numpy(value) for name, value in ours_made.items()}, want, EXACT)


def test_the_model_of_text() -> None:
    """Logits of the Transformer without a causal mask, in evaluation, as ours has no dropout on text."""
    width, heads, head_width, context = 16, 2, 12, 5
    theirs = text_module.Transformer(
        n_src_vocab=CLASSES, n_trg_vocab=CLASSES, d_k=head_width, d_v=head_width, d_model=width, d_word_vec=width,
        d_inner=2 * width, n_layers=2, n_head=heads,
    ).double().eval()  # fmt: skip
    options = {"context": context, "width": width, "heads": heads, "head_width": head_width, "depth": 2}
    method = make_method("fedavg")
    vit = build_model(method, TEXT, CLASSES, seed=0, options={**options, "form": "fedtp", "causal": False})
    values = dict(theirs.named_parameters())
    parts = {
        "encoder.src_word_emb.weight": "token_embed.weight", "trg_word_prj.weight": "head.weight",
        "encoder.layer_norm": "norm_pre",
    }  # fmt: skip
    for block in range(2):
        layer = f"encoder.layer_stack.{block}"
        qkv = [values.pop(f"{layer}.slf_attn.w_{kind}.weight") for kind in ("qs", "ks", "vs")]
        values[f"blocks.{block}.attn.qkv.weight"] = torch.cat(qkv)
        parts |= {f"{layer}.slf_attn.fc": f"blocks.{block}.attn.proj"}
        parts |= {f"{layer}.slf_attn.layer_norm": f"blocks.{block}.norm1"}
        parts |= {f"{layer}.pos_ffn.w_1": f"blocks.{block}.mlp.fc1", f"{layer}.pos_ffn.w_2": f"blocks.{block}.mlp.fc2"}
        parts |= {f"{layer}.pos_ffn.layer_norm": f"blocks.{block}.norm2"}

    def our_name(name: str) -> str:
        return next((name.replace(part, ours) for part, ours in parts.items() if name.startswith(part)), name)

    tensors = {our_name(name): value.detach() for name, value in values.items()}
    assert tensors.keys() == vit.tensors().keys()
    tokens = torch.randint(0, CLASSES, (6, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, _ = theirs(tokens)
    answers = method.forward(vit, tensors, Images(tokens, None)).logits
    torch.testing.assert_close(answers, logits.transpose(1, 2), rtol=0.0, atol=EXACT)


# --- the server -----------------------------------------------------------------------------------------


def make_released_hypernetwork() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        made = hyper_module.ViTHyper(
            DEVICES, EMBEDDING_DIM, hidden_dim=HIDDEN, dim=WIDTH, client_sample=len(COHORTS[0]), heads=HEADS,
            dim_head=HEAD_WIDTH, n_hidden=3, depth=DEPTH,
        )  # fmt: skip
    return made.double()


def as_memory(hypernetwork: Any) -> dict[str, Any]:
    """Their hypernetwork as our server keeps it: layers by target, embeddings by device."""
    memory: dict[str, Any] = {}
    for name, value in hypernetwork.state_dict().items():
        part, _, rest = name.partition(".")
        number, _, kind = rest.partition(".")
        if part == "mlp":
            memory[f"{SHARED}trunk.{int(number) // 2}.{kind}"] = value.numpy().copy()
        elif part == "to_qkv_value_list":
            memory[f"{SHARED}head.blocks.{number}.attn.qkv.weight.{kind}"] = value.numpy().copy()
        else:
            memory |= {f"{PERSONAL}device-{row}/{EMBEDDING}": value[row].numpy().copy() for row in range(DEVICES)}
    return memory


def test_the_hypernetwork() -> None:
    theirs = make_released_hypernetwork()
    method, vit = our_model("fedtp", {"embedding_dim": EMBEDDING_DIM, "hidden": HIDDEN})
    state = ServerState({}, as_memory(theirs))
    for device in range(DEVICES):
        made = method.server_rule(vit).generate(state, f"device-{device}", 0)
        want = {rename(name): value.detach() for name, value in theirs(torch.tensor([device]), True).items()}
        assert_equal({name: torch.from_numpy(value) for name, value in made.items()}, want, EXACT)


def test_three_rounds() -> None:
    """Three of four devices a round, each with two epochs on two batches of its own: shared weights, hypernetwork and
    all embeddings, those of devices that were not asked, too."""
    model, hypernetwork = make_released_vit(1), make_released_hypernetwork()
    batches = [draw_batches(device, [IMAGES[device]] * 2, SIDE, CLASSES) for device in range(DEVICES)]
    method, vit = our_model(
        "fedtp",
        {
            "epochs": 2, "embedding_dim": EMBEDDING_DIM, "hidden": HIDDEN, "server_lr": 0.01, "server_momentum": 0.9,
            "server_weight_decay": 1e-3, "all_embeddings": True,
        },
    )  # fmt: skip
    shared = method.names_with(vit, Role.SHARED)
    first = ours(model.state_dict())
    state = ServerState({name: first[name].numpy() for name in shared}, as_memory(hypernetwork))
    optimizer = torch.optim.SGD(hypernetwork.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    for number, cohort in enumerate(COHORTS, start=1):
        _run_released_round(model, hypernetwork, optimizer, cohort, batches)
        state = _run_our_round(method, vit, state, number, cohort, batches)
        want = ours(model.state_dict())
        got = {name: torch.from_numpy(value) for name, value in state.tensors.items()}
        assert_equal(got, {name: want[name] for name in shared}, 1e-13)
        memory = as_memory(hypernetwork)
        assert_equal(_as_tensors(state.memory, memory), _as_tensors(memory, memory), 1e-13)


def _as_tensors(memory: Any, names: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(memory[name])) for name in names}


def _run_released_round(
    model: Any, hypernetwork: Any, optimizer: torch.optim.Optimizer, cohort: tuple[int, ...], batches: Any
) -> None:
    """A round of the released main program, whose own loop reads data sets: the means over the cohort, weighted by
    images, of the trained tensors and of the hypernetwork's gradients for (made - trained)."""
    made = hypernetwork(torch.tensor([cohort]), False)
    start, images = model.state_dict(), sum(IMAGES[device] for device in cohort)
    mean = {name: torch.zeros_like(value) for name, value in start.items()}
    gradients = [torch.zeros_like(value) for value in hypernetwork.parameters()]
    for place, device in enumerate(cohort):
        net, share = make_released_vit(0), IMAGES[device] / images
        net.load_state_dict({**start, **{name: value.detach() for name, value in made[place].items()}})
        descent = torch.optim.SGD(net.parameters(), lr=RATE)
        for _ in range(2):
            for pictures, labels in batches[device]:
                descent.zero_grad()
                nn.functional.cross_entropy(net(pictures), labels).backward()
                descent.step()
        trained = net.state_dict()
        mean = {name: value + share * trained[name] for name, value in mean.items()}
        apart = [value.detach() - trained[name] for name, value in made[place].items()]
        pulled = torch.autograd.grad(list(made[place].values()), hypernetwork.parameters(), apart, retain_graph=True)
        gradients = [total + share * one for total, one in zip(gradients, pulled, strict=True)]
    model.load_state_dict(mean)
    for value, gradient in zip(hypernetwork.parameters(), gradients, strict=True):
        value.grad = gradient
    optimizer.step()


def _run_our_round(
    method: Any, vit: PatchViT, state: ServerState, number: int, cohort: tuple[int, ...], batches: Any
) -> ServerState:
    rule, uploads = method.server_rule(vit), []
    for device in cohort:
        made = rule.generate(state, f"device-{device}", 0)
        start = {name: torch.from_numpy(value) for name, value in {**state.tensors, **made}.items()}
        after = train_device(method, vit, start, batches[device])
        deltas = {name: (after[name] - start[name]).numpy() for name in start}
        uploads.append(upload(f"device-{device}", IMAGES[device], deltas))
    context = RoundContext(
        round=number, seed=0, lr_scale=1.0, vit=vit, accelerator="cpu",
        load=lambda digest: {}, progress=lambda line: None,
    )  # fmt: skip
    after, _ = rule.close(state, uploads, context)
    return after


# --- baselines ------------------------------------------------------------------------------------------

ARGUMENTS = Namespace(
    dataset="cifar10", model="vit", rho=0.0, reg=0.0, train_acc_pre=False, balanced_soft_max=True, pfedMe_k=5,
    pfedMe_lambda=15.0, pfedMe_mu=0.0,
)  # fmt: skip


@pytest.fixture
def batches() -> Any:
    return draw_batches(0, [6, 6], SIDE, CLASSES)


def test_pfedme(batches: Any) -> None:
    """Two epochs of two batches with five inner steps each: both models."""
    theirs, begin = make_released_vit(0), make_released_vit(1)
    theirs.load_state_dict(begin.state_dict())
    first = ours(begin.state_dict())
    _, _, shared = trainers.train_net_pfedMe(0, theirs, begin, [batches], [batches], 2, 0.01, "sgd", ARGUMENTS)
    method, vit = our_model("pfedme", {"lr": 0.01, "epochs": 2})
    after = train_device(method, vit, {**first, **name_twins(first)}, batches)
    names = [name for name, _ in begin.named_parameters()]
    want = ours(dict(zip(names, shared, strict=True)))
    assert_equal({name: after[name] for name in want}, want, EXACT)
    assert_equal(select_twins(after), ours(dict(theirs.named_parameters())), EXACT)


def test_fedrod(batches: Any) -> None:
    """Two epochs of two batches: the model and the personal head."""
    theirs, head = make_released_vit(1), nn.Linear(WIDTH, CLASSES).double()
    first = ours(theirs.state_dict()) | {f"{PERSONAL_HEAD}.{name}": v.clone() for name, v in head.state_dict().items()}
    counts = torch.bincount(torch.cat([labels for _, labels in batches]), minlength=CLASSES)
    trainers.train_net_fedRod(0, theirs, head, counts, [batches], [batches], 2, RATE, "sgd", ARGUMENTS)
    method, vit = our_model("fedrod", {"epochs": 2})
    want = ours(theirs.state_dict()) | {f"{PERSONAL_HEAD}.{name}": value for name, value in head.state_dict().items()}
    assert_equal(train_device(method, vit, first, batches), want, 1e-13)
