"""FedNTD: the divergence over the other classes beside the paper's, which leaves the label out of the logits."""

import torch
from torch import Tensor

from fedvit.methods import make_method
from fedvit.methods.base import Images
from fedvit.methods.fedntd import diverge_on_others
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models.vit import PatchViT
from tests.support.quadratic import BATCH, Inputs, in_double
from tests.support.steps import whole


def leave_out(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, C - 1) the logits of the other classes."""
    rows = [torch.cat([row[:label], row[label + 1 :]]) for row, label in zip(logits, labels.tolist(), strict=True)]
    return torch.stack(rows)


def reference(teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
    wanted, answer = (torch.log_softmax(leave_out(logits, labels), dim=1) for logits in (teacher, student))
    return torch.nn.functional.kl_div(answer, wanted, log_target=True, reduction="none").sum(dim=1)


def test_divergence_is_that_of_the_other_classes_logits() -> None:
    draw = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(2, 6, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([[0, 4, 2, 2, 1, 3], [1, 1, 0, 4, 3, 2]])
    got = [diverge_on_others(*logits, label) for *logits, label in zip(teacher, student, labels, strict=True)]
    want = [reference(*logits, label) for *logits, label in zip(teacher, student, labels, strict=True)]
    torch.testing.assert_close(got, want)
    text = diverge_on_others(teacher, student, labels)
    torch.testing.assert_close(text, torch.stack(want).mean(dim=1))


def train(name: str, options: dict[str, float], vit: PatchViT, steps: int) -> tuple[Inputs, Inputs]:
    """Some steps on one batch from the round's start; return the inputs of the first, and those of a next one."""
    method = make_method(name, {"lr": 0.1, **options})
    (phase,) = method.phases(vit)
    inputs = in_double(example_inputs(method, vit, BATCH, whole(phase)))
    inputs |= {f"anchor/{name}": inputs[f"tensor/{name}"] for name in vit.tensors()}
    first = inputs = inputs | {"hyper/lr": torch.tensor(0.1, dtype=torch.float64)}
    for _ in range(steps):
        after = whole_step(method, vit, whole(phase))(inputs)
        inputs = inputs | {name.removeprefix("new/"): value for name, value in after.items() if name.startswith("new/")}
    return first, inputs


def find_logits(vit: PatchViT, inputs: Inputs, kind: str = "tensor") -> Tensor:
    tensors = {name: inputs[f"{kind}/{name}"] for name in vit.tensors()}
    forward = make_method("fedavg").forward
    return forward(vit, tensors, Images(inputs["batch/patches"], None)).logits


def test_a_step_minimises_the_loss_and_the_divergence(vit: PatchViT) -> None:
    """The gradient by autograd of the paper's loss, at tensors that have left the round's start."""
    beta, tau = 0.7, 2.0
    _, inputs = train("fedavg", {}, vit, 2)
    method = make_method("fedntd", {"beta": beta, "tau": tau})
    (phase,) = method.phases(vit)
    after = whole_step(method, vit, whole(phase))(inputs)
    leaves = {name: inputs[f"tensor/{name}"].clone().requires_grad_() for name in vit.tensors()}
    logits = find_logits(vit, {**inputs, **{f"tensor/{name}": leaf for name, leaf in leaves.items()}})
    start = find_logits(vit, inputs, "anchor").detach()
    labels, weight = inputs["batch/labels"], inputs["batch/weight"]
    entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    loss = ((entropy + beta * reference(start / tau, logits / tau, labels)) * weight).sum() / weight.sum()
    loss.backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        want = inputs[f"tensor/{name}"] - inputs["hyper/lr"] * leaf.grad
        torch.testing.assert_close(after[f"new/tensor/{name}"], want, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(after["metric/loss"], (entropy * weight).sum().detach() / weight.sum())


def test_answers_on_other_classes_move_less_than_in_fedavg(vit: PatchViT) -> None:
    moved = {}
    for name, options in (("fedavg", {}), ("fedntd", {"beta": 5.0})):
        first, last = train(name, dict(options), vit, 20)
        before, after = find_logits(vit, first), find_logits(vit, last)
        real = first["batch/weight"] > 0
        moved[name] = float(reference(before, after, first["batch/labels"])[real].mean())
        gained = torch.softmax(after, 1) - torch.softmax(before, 1)
        assert gained.gather(1, first["batch/labels"].unsqueeze(1))[real].mean() > 0.05
    assert moved["fedntd"] < 0.6 * moved["fedavg"]
