"""GPFL: a step beside the paper's valve and losses, what stays on the device, and the effect of the guide."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, layer_norm, linear

from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images
from fedvit.methods.gpfl import CLASS_SHARES, EMBEDDINGS, VALVE
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.method_steps import assert_descent, make_inputs, make_leaves, read, run_step
from tests.support.quadratic import Inputs
from tests.support.quadratic import after as put_back

LR, LAM, MU = 0.05, 0.4, 0.2
MODEL = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 2}


def make_vit() -> PatchViT:
    return build_model(make_method("gpfl"), SMALL, 3, seed=0, options=MODEL).double()


def turn(tensors: Inputs, features: Tensor, condition: Tensor) -> Tensor:
    def layer(name: str) -> Tensor:
        hidden = torch.relu(linear(condition, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        return layer_norm(hidden, hidden.shape, tensors[f"{name}_norm.weight"], tensors[f"{name}_norm.bias"])

    return torch.relu(features * (layer(VALVE[0]) + 1) + layer(VALVE[1]))


def test_a_step_minimises_the_papers_loss() -> None:
    method, vit = make_method("gpfl", {"lam": LAM, "mu": MU}), make_vit()
    inputs = make_inputs(method, vit, LR)
    leaves = make_leaves(inputs, [n for n in method.tensors(vit) if n != CLASS_SHARES])
    labels, first, counts = inputs["batch/labels"], inputs[f"anchor/{EMBEDDINGS}"], inputs["fact/class_counts"]
    features, _ = read(vit, leaves, inputs)
    still = {name: value.detach() for name, value in leaves.items()}
    personal = turn(still, features, sum(counts[c] / counts.sum() * first[c] for c in range(3)))
    generic = turn(leaves, features, sum(first[c] / 3 for c in range(3)))
    logits = linear(personal, leaves["head.weight"], leaves["head.bias"])
    cosines = torch.stack([cosine_similarity(generic, row.expand_as(generic)) for row in leaves[EMBEDDINGS]], dim=1)
    apart = (generic - first[labels]).norm(dim=1)
    weight = inputs["batch/weight"]
    entropy = cross_entropy(logits, labels, reduction="none")
    per_image = entropy + cross_entropy(cosines, labels, reduction="none") + LAM * apart
    decay = sum(v.square().sum() for n, v in leaves.items() if n == EMBEDDINGS or n.startswith("valve_"))
    ((per_image * weight).sum() / weight.sum() + 0.5 * MU * decay).backward()
    after = run_step(method, vit, inputs)
    assert_descent(after, inputs, leaves, LR)
    torch.testing.assert_close(after["metric/loss"], (entropy * weight).sum().detach() / weight.sum())
    torch.testing.assert_close(after[f"new/tensor/{CLASS_SHARES}"], counts / counts.sum())


def test_head_and_class_shares_stay_and_answer_with_the_newest_embeddings() -> None:
    method, vit = make_method("gpfl"), make_vit()
    assert set(method.names_with(vit, Role.LOCAL)) == {CLASS_SHARES, "head.weight", "head.bias"}
    tensors = {n: v + 0.1 * torch.rand(v.shape).double() for n, v in method.tensors(vit).items()}
    images = torch.randn(2, 4, 192, dtype=torch.float64)
    features, _ = read(vit, tensors, {"batch/patches": images})
    turned = turn(tensors, features, tensors[CLASS_SHARES] @ tensors[EMBEDDINGS])
    want = linear(turned, tensors["head.weight"], tensors["head.bias"])
    torch.testing.assert_close(method.predict(vit, tensors, Images(images, None), None), want)


def test_the_guide_turns_features_to_their_classes_embeddings() -> None:
    """The generic features of the batch become nearer to the embedding of their class than to others."""
    method, vit = make_method("gpfl", {"lam": 0.0, "mu": 0.0}), make_vit()
    inputs = make_inputs(method, vit, 0.2)
    ahead = []
    for _ in range(30):
        tensors = {n: inputs[f"tensor/{n}"] for n in method.tensors(vit)}
        features, _ = read(vit, tensors, inputs)
        generic = turn(tensors, features, inputs[f"anchor/{EMBEDDINGS}"].mean(dim=0))
        cosines = torch.stack(
            [cosine_similarity(generic, row.expand_as(generic)) for row in tensors[EMBEDDINGS]], dim=1
        )
        own = cosines.gather(1, inputs["batch/labels"].unsqueeze(1)).squeeze(1)
        ahead.append(float((own - cosines.mean(dim=1))[inputs["batch/weight"] > 0].mean()))
        inputs = put_back(inputs, run_step(method, vit, inputs))
    assert ahead[-1] > ahead[0] + 0.2
