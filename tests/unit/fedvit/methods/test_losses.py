"""The losses of the tasks are torch's own; their gradients, too."""

import pytest
import torch
from torch.nn import functional

from fedvit.methods.losses import binary_cross_entropy, cross_entropy, squared_error


def outputs() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(6, 4, generator=draw, dtype=torch.float64)
    logits[0] = 0.0  # a head that begins with zeros
    return logits.requires_grad_()


def labels() -> torch.Tensor:
    return (torch.rand(6, 4, generator=torch.Generator().manual_seed(1)) > 0.5).double()


def test_losses_of_other_tasks() -> None:
    ours, theirs = outputs(), outputs()
    got = binary_cross_entropy(ours, labels())
    want = functional.binary_cross_entropy_with_logits(theirs, labels(), reduction="none").mean(dim=1)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    got, want = (loss(outputs(), labels()) for loss in (squared_error, lambda a, b: (a - b).pow(2).mean(dim=1)))
    torch.testing.assert_close(got, want)
    # labels of another task are no classes: Without this, they would be broadcast, and a method with a loss of its
    # own would train on nonsense
    with pytest.raises(TypeError):
        cross_entropy(outputs(), labels())
