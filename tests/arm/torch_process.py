"""Training steps of a case in torch: python -m tests.arm.torch_process CASE STEPS, with a mark after each step."""

import sys

import torch

from bench.cases import decode_case
from bench.torch_models import MODELS, make_optimizer
from tests.arm.counting import mark


def main() -> None:
    case, steps = decode_case(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[case.torch](case)
    model.train()
    optimizer = make_optimizer(case, model)
    loss_of = torch.nn.CrossEntropyLoss()
    size = case.model_options["image_size"]
    for _ in range(steps):
        images = torch.randn(case.batch_size, 3, size, size)
        labels = torch.randint(case.classes, (case.batch_size,))
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        mark()


if __name__ == "__main__":
    main()
