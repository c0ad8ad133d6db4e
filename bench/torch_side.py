"""One measured process: a case's training step in torch. Prints one JSON object."""

import json
import sys
import time
from statistics import median

_BEGAN = time.perf_counter()
import timm  # noqa: F401 - what a user's program imports
import torch

IMPORT_S = time.perf_counter() - _BEGAN
from bench.cases import decode_case
from bench.product import measure_gflops
from bench.torch_models import MODELS, make_optimizer


def main() -> None:
    """Arguments: the case, the precision of products (fp32; bf16: autocast), steps, threads, side of the product."""
    text, precision, (steps, threads, side) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    case = decode_case(text)
    model = MODELS[case.torch](case)
    model.train()
    optimizer = make_optimizer(case, model)
    loss_of = torch.nn.CrossEntropyLoss()
    size, context = case.model_options.get("image_size", 224), case.model_options.get("context")
    times: list[float] = []
    for _ in range(steps):
        if context:
            samples = torch.randint(case.classes, (case.batch_size, context))
            labels = torch.randint(case.classes, (case.batch_size, context))
        else:
            samples = torch.randn(case.batch_size, 3, size, size)
            labels = torch.randint(case.classes, (case.batch_size,))
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(model(samples), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - began)

    from profiles.probes.host import peak_rss_bytes  # imported last, since a user's program does not have it

    measured: dict[str, object] = {"step_s": median(times), "import_s": IMPORT_S, "peak_rss_bytes": peak_rss_bytes()}
    measured["product_gflops"] = {precision: measure_torch_gflops(side, precision)}
    sys.stdout.write(json.dumps(measured) + "\n")


def measure_torch_gflops(side: int, precision: str) -> float:
    """fp32 or bf16, with the threads that torch was set to."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    a, b = torch.randn(side, side).to(kind), torch.randn(side, side).to(kind)
    return measure_gflops(lambda: torch.mm(a, b), side)


if __name__ == "__main__":
    main()
