"""The programs that `edge-client certify` runs on boards, which have no torch to make them (`make methods`)."""

import tempfile
from pathlib import Path

import msgspec

from coordinator.compute.planning.planner import make_plan
from coordinator.config import RunConfig
from fedvit.blobs import BlobStore
from fedvit.files import atomic_write
from fedvit.models import SMALL
from fedvit.program import Evaluate, encode_program
from profiles.probes.speed import TRIALS, find_trial_graph

COMPUTE = {"float": "fp32", "int8": "int8"}
"""The programs by name, with their method's precision of products."""
CLASSES = tuple(map(str, range(10)))
CONFIG = RunConfig(
    method="fedavg",
    options={"batch_size": 16, "epochs": 1, "optimizer": "sgd", "lr": 0.1},
    model=SMALL,
    # wide enough for products of integers; a Raspberry Pi 4 makes some steps of it a second
    model_options={"image_size": 32, "patch_size": 4, "width": 128, "depth": 4, "heads": 4},
    rounds=1,
)


def store_trials(folder: Path = TRIALS, cache: Path | None = None) -> None:
    """Write NAME.program of each program, and one file for each graph that its training runs."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, compute in COMPUTE.items():
        with tempfile.TemporaryDirectory() as home:
            blobs = BlobStore(Path(home))
            config = msgspec.structs.replace(CONFIG, options={**CONFIG.options, "compute": compute})
            program = make_plan(config, CLASSES, blobs, cache=cache).first.program
            [phase] = program.train
            graphs = {each: program.graphs[each] for each in (phase.graph, phase.update) if each}
            for graph in graphs.values():
                atomic_write(find_trial_graph(graph.digest, folder), blobs.get(graph.digest))
        shown = msgspec.structs.replace(program, graphs=graphs, evaluate=Evaluate(graph=phase.graph))
        atomic_write(folder / f"{name}.program", encode_program(shown))
