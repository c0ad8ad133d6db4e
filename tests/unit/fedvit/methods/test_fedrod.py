"""FedRoD: two heads, two losses, and no way from one to the other."""

import math

import pytest
import torch
from torch import Tensor

from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, Method, StepInputs, cross_entropy
from fedvit.methods.fedrod import TwoHeads, two_head_loss, two_heads
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role

CLASSES = 4
HEAD = {"personal_head.weight", "personal_head.bias"}


@pytest.fixture(scope="module")
def pair() -> tuple[Method, PatchViT]:
    method = make_method("fedrod")
    model = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2}
    vit = build_model(method, SMALL, CLASSES, seed=0, options=model).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in vit.parameters():
            value += 0.1 * torch.randn(value.shape, generator=draw, dtype=value.dtype)
    return method, vit


def inputs(counts: list[float], labels: list[int], weight: list[float] | None = None) -> StepInputs:
    draw = torch.Generator().manual_seed(2)
    return StepInputs(
        images=Images(torch.randn(len(labels), 4, 192, generator=draw, dtype=torch.float64), None),
        labels=torch.tensor(labels),
        weight=torch.tensor(weight or [1.0] * len(labels), dtype=torch.float64),
        anchors={},
        facts={"class_counts": torch.tensor(counts, dtype=torch.float64)},
        draws={},
        lr=torch.tensor(0.1),
        last=None,
    )


def heads(generic: list[list[float]], personal: list[list[float]]) -> TwoHeads:
    made = [torch.tensor(values, dtype=torch.float64) for values in (generic, personal)]
    return TwoHeads(*made, torch.zeros(len(generic), 1))


def test_only_the_personal_head_stays(pair: tuple[Method, PatchViT]) -> None:
    method, vit = pair
    assert set(method.names_with(vit, Role.LOCAL)) == HEAD
    assert set(method.names_with(vit, Role.SHARED)) == set(vit.tensors()) - HEAD


def test_balanced_softmax_by_hand() -> None:
    # balanced softmax by hand: Two classes with 3 and 1 images, logits 0 and 0, label 1: 3 e^0 and 1 e^0 compete,
    # so the loss is log 4; the personal head says 0 and log 3 on top of the generic 0: - log(3 / 4)
    loss = two_head_loss(heads([[0.0, 0.0]], [[0.0, math.log(3)]]), inputs([3, 1], [1]))
    assert float(loss) == pytest.approx(math.log(4) - math.log(3 / 4))
    # with equal classes it is plain cross entropy: The prior adds log 7 to every logit. A personal head that says
    # nothing adds the cross-entropy once more
    given = inputs([7] * CLASSES, [0, 3, 2])
    generic = torch.randn(3, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = given.mean(cross_entropy(generic, given.labels))
    loss = two_head_loss(TwoHeads(generic, torch.zeros_like(generic), generic), given)
    torch.testing.assert_close(loss, 2 * plain, rtol=0, atol=1e-13)


def test_a_class_that_the_device_does_not_have() -> None:
    """It is out of the competition: class 1 of 2 alone has the loss 0, and no gradient is a NaN. Nor is one where the
    label of padding is that class."""
    generic = torch.tensor([[5.0, 0.0], [1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    personal = torch.zeros(2, 2, dtype=torch.float64)
    loss = two_head_loss(TwoHeads(generic, personal, generic), inputs([0, 4], [1, 0], [1.0, 0.0]))
    own = math.log(math.exp(5) + 1)
    assert float(loss.detach()) == pytest.approx(own)
    (grad,) = torch.autograd.grad(loss, generic)
    assert torch.equal(grad, torch.zeros_like(grad))


def gradients(method: Method, vit: PatchViT, given: StepInputs, *, which: str) -> dict[str, Tensor]:
    """Of one of the two losses, by every tensor; None is zero."""
    leaves = {name: value.clone().requires_grad_() for name, value in method.tensors(vit).items()}
    found = two_heads(vit, leaves, given.images)
    if which == "whole":
        loss = method.objective(vit, method.phases(vit)[0], leaves, given).loss
    elif which == "generic":
        prior = torch.log(given.facts["class_counts"])
        loss = given.mean(cross_entropy(found.generic + prior, given.labels))
    else:
        loss = given.mean(cross_entropy(found.generic.detach() + found.personal, given.labels))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), grads, strict=True)
    }


def test_neither_loss_reaches_the_others_tensors(pair: tuple[Method, PatchViT]) -> None:
    """The personal head's loss gives the extractor and the generic head nothing, and theirs gives it nothing; the
    step's gradient is one of them on each side. Both reach every tensor of their own."""
    method, vit = pair
    given = inputs([3, 1, 2, 5], [0, 1, 2, 3, 0])
    generic, personal, whole = (gradients(method, vit, given, which=w) for w in ("generic", "personal", "whole"))
    for name in method.tensors(vit):
        mine, other = (personal, generic) if name in HEAD else (generic, personal)
        assert not other[name].any(), name
        assert mine[name].any(), name
        torch.testing.assert_close(whole[name], mine[name], rtol=0, atol=1e-12)


def test_both_heads_answer(pair: tuple[Method, PatchViT]) -> None:
    method, vit = pair
    given = inputs([1] * CLASSES, [0, 1])
    found = two_heads(vit, vit.tensors(), given.images)
    torch.testing.assert_close(
        method.predict(vit, vit.tensors(), given.images, None), found.generic + found.personal, rtol=0, atol=1e-13
    )


def test_the_personal_head_reads_what_the_last_norm_reads(pair: tuple[Method, PatchViT]) -> None:
    _, vit = pair
    given, tensors = inputs([1] * CLASSES, [0, 1]), vit.tensors()
    found = two_heads(vit, tensors, given.images)
    linear = found.features @ tensors["personal_head.weight"].T + tensors["personal_head.bias"]
    torch.testing.assert_close(found.personal, linear, rtol=0, atol=1e-12)
    normed = torch.nn.functional.layer_norm(found.features, (8,), tensors["norm.weight"], tensors["norm.bias"], 1e-6)
    generic = normed @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(found.generic, generic, rtol=0, atol=1e-12)


def test_both_heads_may_read_the_same_features(pair: tuple[Method, PatchViT]) -> None:
    """`personal_reads` = "normed": then the features are those that the generic head reads."""
    _, vit = pair
    given, tensors = inputs([1] * CLASSES, [0, 1]), vit.tensors()
    method = make_method("fedrod", {"personal_reads": "normed"})
    found = two_heads(vit, tensors, given.images, normed=True)
    generic = found.features @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(found.generic, generic, rtol=0, atol=1e-12)
    logits = method.predict(vit, tensors, given.images, None)
    torch.testing.assert_close(logits, found.generic + found.personal, rtol=0, atol=1e-13)
    loss = method.objective(vit, method.phases(vit)[0], tensors, given).loss
    assert not torch.equal(loss, two_head_loss(two_heads(vit, tensors, given.images), given))


def test_the_generic_head_is_tested_alone(pair: tuple[Method, PatchViT]) -> None:
    """What is trained stays the same."""
    both, vit = pair
    alone = make_method("fedrod", {"evaluate_with": "generic"})
    given = inputs([3, 1, 2, 5], [0, 1, 2, 3, 0])
    found = two_heads(vit, vit.tensors(), given.images)
    torch.testing.assert_close(alone.predict(vit, vit.tensors(), given.images, None), found.generic, rtol=0, atol=0)
    expected = gradients(both, vit, given, which="whole")
    for name, grad in gradients(alone, vit, given, which="whole").items():
        assert torch.equal(grad, expected[name])
