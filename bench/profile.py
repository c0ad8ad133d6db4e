"""`python -m bench profile`: the predicted cost of Programs, compared with their measured cost."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec import Struct
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch.utils.flop_counter import FlopCounterMode

from bench.cases import Case
from bench.edge import noise_folder
from bench.machine import Machine, this_machine
from bench.one_round import RUN, OneRound, one_round
from coordinator.record.tables import ResultRecord
from export.verify import reference_step
from fedvit.blobs import BlobStore
from fedvit.errors import FedvitError
from fedvit.methods import build_model, make_method
from fedvit.methods.step import example_inputs
from fedvit.program import Batch, Program, decode_program
from profiles.cost import graph_cost
from profiles.predict import predict
from profiles.prediction import Prediction, ProgramCost
from profiles.probes.speed import measure_speed
from profiles.program_cost import PricedProgram

MEGA = 1e6
STEPS = 4
"""Of a case's round. A device's first step also allocates; the median of four is not affected."""
TEST_IMAGES = 8
PATIENCE_S = 900.0

Progress = Callable[[str], None]


class Compared(Struct, frozen=True, kw_only=True):
    """One figure, predicted and measured."""

    predicted: float
    measured: float
    error: float  # (predicted - measured) / measured


class CaseProfile(Struct, frozen=True, kw_only=True):
    name: str
    flops_step: int  # counted on the graph that ran
    flops_torch: int  # torch's FlopCounterMode on the same step, run eagerly
    bytes_down: Compared  # blobs that the device fetched for its first round
    bytes_up: Compared  # of its result
    peak_memory: Compared  # bytes, of the device's process over the round and an evaluation
    step_time: Compared  # seconds, median


class ProfileReport(Struct, frozen=True, kw_only=True):
    machine: Machine
    cases: list[CaseProfile]
    flops_exact: bool
    bytes_exact: bool
    peak_memory_error: float  # the largest over the cases, without sign
    step_time_error: float


def run_profile_bench(cases: Sequence[Case], progress: Progress = lambda line: None) -> ProfileReport:
    """Predict the cost of each case from its Program and this machine's speed, and let a real device train a round.

    The speed is measured before and after each round, so that prediction and round see the same load. Raises
    FedvitError when a case cannot be run.
    """
    done = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made:
            done.append(_profile(case, Path(made), progress))
    return ProfileReport(
        machine=this_machine(),
        cases=done,
        flops_exact=all(each.flops_step == each.flops_torch for each in done),
        bytes_exact=all(each.error == 0 for case in done for each in (case.bytes_down, case.bytes_up)),
        peak_memory_error=max(abs(case.peak_memory.error) for case in done),
        step_time_error=max(abs(case.step_time.error) for case in done),
    )


def _profile(case: Case, home: Path, progress: Progress) -> CaseProfile:
    progress(f"{case.name}: making images, counting the step in torch")
    size = image_size(case)
    images = STEPS * case.batch_size + TEST_IMAGES
    data = noise_folder(home / "parts", images=images, size=size, test_share=TEST_IMAGES / images)
    speeds = [measure_speed(this_machine().cores)]
    with one_round(home, run_of(case), data) as session:
        progress(f"{case.name}: a round on a real device")
        reason = session.wait(PATIENCE_S, report=progress)
        if reason:
            raise FedvitError(f"{case.name}: {reason}")
        results = session.results
        program, cost = _cost(case, session, results)
    speeds.append(measure_speed(this_machine().cores))
    predictions = [predict(cost, speed, device="this machine", source="measured") for speed in speeds]
    compared = _compare(case, program, cost, predictions, results)
    progress(
        f"{case.name}: predicted and measured: step {compared.step_time.predicted:.2f} and "
        f"{compared.step_time.measured:.2f} s, memory {compared.peak_memory.predicted / MEGA:.0f} and "
        f"{compared.peak_memory.measured / MEGA:.0f} MB"
    )
    return compared


def run_of(case: Case, rounds: int = 1) -> dict[str, Any]:
    """The configuration of a run of a case on one device."""
    return {
        "method": case.method, "options": case.options, "model": case.model, "model_options": case.model_options,
        "rounds": rounds, "devices": 1, "deadline_s": PATIENCE_S, "rejoin_grace_s": 5.0,
    }  # fmt: skip


def image_size(case: Case) -> int:
    return int(case.model_options.get("image_size", 224))


def _cost(case: Case, session: OneRound, results: dict[str, ResultRecord]) -> tuple[Program, ProgramCost]:
    digest = session.store.runs.read(RUN).program
    blobs = BlobStore(session.home / "runs" / RUN / "blobs")
    assert digest is not None  # a run that finished has one
    program = decode_program(blobs.get(digest))
    graphs = {name: graph_cost(blobs.get(spec.digest)) for name, spec in program.graphs.items()}
    cost = PricedProgram(program, case.options, graphs).cost(
        images=results["train"].samples, test_images=results["evaluate"].samples
    )
    return program, cost


def _compare(
    case: Case,
    program: Program,
    cost: ProgramCost,
    predictions: Sequence[Prediction],
    results: dict[str, ResultRecord],
) -> CaseProfile:
    trained = results["train"].use
    assert trained.step_s
    assert trained.peak_rss_bytes
    assert trained.fetched_bytes
    assert trained.upload_bytes
    peak = max(trained.peak_rss_bytes, results["evaluate"].use.peak_rss_bytes or 0)
    return CaseProfile(
        name=case.name,
        flops_step=cost.flops_step,
        flops_torch=torch_flops(case, program.batch, len(program.classes)),
        bytes_down=_compared(cost.bytes_once + cost.bytes_down, trained.fetched_bytes),
        bytes_up=_compared(cost.bytes_up, trained.upload_bytes),
        peak_memory=_compared(predictions[0].peak_rss_bytes, peak),
        step_time=_compared(median(each.step_s or 0.0 for each in predictions), trained.step_s),
    )


def _compared(predicted: float, measured: float) -> Compared:
    return Compared(predicted=predicted, measured=measured, error=(predicted - measured) / measured)


def torch_flops(case: Case, batch: Batch, classes: int) -> int:
    """FlopCounterMode's count of one optimizer step in torch with autograd, on the meta device."""
    method = make_method(case.method, case.options)
    vit = build_model(method, case.model, classes, seed=0, options=case.model_options)
    total = 0
    for phase in method.phases(vit):
        inputs = {name: value.to("meta") for name, value in example_inputs(method, vit, batch, phase).items()}
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            reference_step(method, vit, phase)(inputs)
        runs = -(-batch.batch_size // batch.run_size) if phase.update else 1
        total += runs * counter.get_total_flops()
    return total


# --- for a terminal -----------------------------------------------------------------------------------


def profile_table(report: ProfileReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("case", "GFLOP a step", "down MB", "up MB", "step s", "", "memory MB", ""):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for case in report.cases:
        time, memory = case.step_time, case.peak_memory
        table.add_row(
            case.name,
            f"{case.flops_step / 1e9:.1f}",
            f"{case.bytes_down.measured / MEGA:.1f}",
            f"{case.bytes_up.measured / MEGA:.1f}",
            f"{time.predicted:.3f} / {time.measured:.3f}",
            f"{time.error:+.0%}",
            f"{memory.predicted / MEGA:.0f} / {memory.measured / MEGA:.0f}",
            f"{memory.error:+.0%}",
        )
    notes = (
        "predicted / measured",
        f"FLOPs as torch counts them: {_exact(report.flops_exact)}; bytes each way: {_exact(report.bytes_exact)}",
        f"largest error: step {report.step_time_error:.0%}, memory {report.peak_memory_error:.0%}",
        f"{report.machine.cpu}, {report.machine.cores} cores",
    )
    return Group(table, *(Text(note, style="dim") for note in notes))


def _exact(yes: bool) -> str:
    return "exact" if yes else "NOT exact"
