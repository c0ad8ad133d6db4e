"""Programs of methods on models so small that every pixel's influence can be measured, with their graphs."""

from pathlib import Path
from typing import Any

from fedvit.blobs import BlobStore, digest_of
from fedvit.program import GraphSpec, Program

SMALLEST = {"image_size": 2, "patch_size": 1, "width": 8, "depth": 2, "heads": 2, "mlp_ratio": 2.0}
OPTIONS: dict[str, Any] = {"batch_size": 4, "micro_batch": 2, "lr": 1.0}
NEEDED: dict[str, dict[str, Any]] = {
    "analytic": {"batch_size": 6},  # two images of each class: the sum of a class with one image tells its features
    "eftvit": {"local_blocks": 1, "mask": 0.5},
    "fedbfpt": {"local_blocks": 2},
    "per_fedavg": {"batch_size": 2},
}
"""Options without which a method does not fit a model of two blocks, or its sums are of single images."""
WIDER = {"eftvit": {**SMALLEST, "image_size": 4, "patch_size": 2}}
"""Methods that send features of tokens: each follows from the pixels of its patch, which must be several."""


def make_program(
    name: str,
    folder: Path,
    options: dict[str, Any] | None = None,
    *,
    model: str | None = None,
    model_options: dict[str, Any] | None = None,
    classes: int = 3,
    task: str = "classification",
) -> tuple[Program, dict[str, bytes]]:
    """Make a Program and its graphs, which are not verified, as a coordinator would for round 1."""
    from coordinator.compute.planning import planner
    from coordinator.config import make_config
    from export.graphs import export_unverified

    chosen = {**OPTIONS, **NEEDED.get(name, {}), **(options or {})}
    values: dict[str, Any] = {
        "method": name,
        "options": chosen,
        "model_options": model_options or WIDER.get(name, SMALLEST),
        "task": task,
    }
    if task == "regression":
        values["number_range"], classes = [0.0, 10.0], 1
    if model:
        values["model"] = model
    config = make_config({**values, "rounds": 3}, "test").run
    plan = planner.make_plan(config, tuple(map(str, range(classes))), BlobStore(folder))
    method = plan.method_for("", 1)
    batch = plan.batch_of(method)
    graphs = export_unverified(method, plan.vit, batch)
    specs = {graph: GraphSpec(digest_of(content), 1) for graph, content in graphs.items()}
    return plan._program(method, batch, specs, lambda members: digest_of(b"")), graphs
