"""Records of runs made by hand."""

from pathlib import Path
from typing import Any

from coordinator.record.store import Store
from coordinator.record.summary import RunLine, RunSummary
from coordinator.record.tables import SavedState
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result

RUN = "20261121-034500-eftvit-ab12"
PROTOCOL = "tested as the planner said"


def trained(store: Store, number: int, device: str, samples: int = 10, loss: float = 1.0, **use: Any) -> None:
    store.add_result(device, Result(RUN, number, "train", samples, {"loss": loss}, ResourceUse(**use)))


def evaluated(store: Store, number: int, device: str, right: int, samples: int, **use: Any) -> None:
    metrics = {"correct": float(right)}
    store.add_result(device, Result(RUN, number, "evaluate", samples, metrics, ResourceUse(**use)))


def begun_run(folder: Path) -> Store:
    """A run of three planned rounds; two are over, the first was evaluated, the second was not."""
    made = Store.in_folder(folder)
    config = {"method": "eftvit", "model": "vit_small_images", "seed": 7, "rounds": 3}
    made.create_run(RUN, config)
    made.update_run(RUN, status="running", classes=["ant", "bee"], protocol=PROTOCOL)
    made.open_round(RUN, 1, ["a", "b", "c"])
    trained(
        made, 1, "a", 30, 1.0,
        step_s=0.010, steps=4, flops=400, peak_rss_bytes=100_000_000, received_bytes=5_000_000, sent_bytes=1_000_000,
    )  # fmt: skip
    trained(made, 1, "b", 10, 2.0, step_s=0.030, flops=100, received_bytes=5_000_000, sent_bytes=2_000_000)
    evaluated(made, 1, "a", 9, 10, received_bytes=1_000_000, sent_bytes=100_000, peak_rss_bytes=120_000_000)
    evaluated(made, 1, "b", 1, 2)
    evaluated(made, 1, "c", 7, 20)
    evaluated(made, 1, "d", 0, 0)
    made.close_round(RUN, 1, SavedState({}, None, {}), {"devices_s": 2.5, "server_s": 0.5})
    made.round_evaluated(RUN, 1)
    made.open_round(RUN, 2, ["a", "b"])
    trained(made, 2, "a", 30, 0.5, step_s=0.020, flops=600)
    made.add_refusal(RUN, 1, "c", "train", "no result: deadline", lost=True)
    made.add_refusal(RUN, None, "e", "hello", "its class folder [wasp] is unknown [/b]")
    return made


def line(run: RunSummary) -> RunLine:
    """Of a summary, as the list of runs has it."""
    fields = {name: getattr(run, name) for name in RunLine.__struct_fields__ if name not in ("rounds", "bytes")}
    return RunLine(rounds=len(run.rounds), bytes=123_456_789, **fields)
