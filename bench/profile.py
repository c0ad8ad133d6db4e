"""`python -m bench profile`: predicted costs of Programs, compared with measured costs."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.cases import Case
from bench.edge import make_noise_folder
from bench.machine import describe_machine
from bench.one_round import RUN, OneRound, start_round
from bench.reporting import MEGA, Progress, Report
from coordinator.record.tables import ResultRecord
from export.verify import reference_step
from fedvit.blobs import BlobStore
from fedvit.errors import FedvitError
from fedvit.methods import build_model, make_method
from fedvit.methods.step import example_inputs
from fedvit.program import Batch, Program, decode_program
from profiles.cost import graph_cost
from profiles.predict import Target, predict
from profiles.prediction import Prediction, ProgramCost
from profiles.probes.speed import measure_speed
from profiles.program_cost import PricedProgram

STEPS = 4
"""Steps of a case's round. A device's first step also allocates; the median of four is not affected."""
TEST_IMAGES = 8
PATIENCE_S = 900.0


def run_profile_bench(cases: Sequence[Case], progress: Progress = lambda line: None) -> Report:
    """Predict the cost of each case from its Program and this machine's speed, and let a real device train a round.

    The speed is measured before and after each round, so that prediction and round see the same load. Raises
    FedvitError when a case cannot be run.
    """
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
            results.append(_profile(case, Path(folder), progress))
    return {
        "machine": describe_machine(),
        "cases": results,
        "flops_exact": all(case["flops_step"] == case["flops_torch"] for case in results),
        "bytes_exact": all(case[way]["error"] == 0 for case in results for way in ("bytes_down", "bytes_up")),
        "peak_memory_error": max(abs(case["peak_memory"]["error"]) for case in results),
        "step_time_error": max(abs(case["step_time"]["error"]) for case in results),
    }


def _profile(case: Case, home: Path, progress: Progress) -> Report:
    progress(f"{case.name}: making images, counting the step in torch")
    size = find_image_size(case)
    images = STEPS * case.batch_size + TEST_IMAGES
    data = make_noise_folder(home / "parts", images=images, size=size, test_share=TEST_IMAGES / images)
    speeds = [measure_speed(describe_machine().cores)]
    with start_round(home, make_run(case), data) as session:
        progress(f"{case.name}: a round on a real device")
        reason = session.wait(PATIENCE_S, report=progress)
        if reason:
            raise FedvitError("FV0001", f"{case.name}: {reason}")
        results = session.results
        program, cost = _price(case, session, results, own_kernels=speeds[0].kernels)
    speeds.append(measure_speed(describe_machine().cores))
    predictions = [predict(cost, speed, Target("this machine", "measured")) for speed in speeds]
    figures = _compare_case(case, program, cost, predictions, results)
    step, memory = figures["step_time"], figures["peak_memory"]
    progress(
        f"{case.name}: predicted and measured: step {step['predicted']:.2f} and {step['measured']:.2f} s, "
        f"memory {memory['predicted'] / MEGA:.0f} and {memory['measured'] / MEGA:.0f} MB"
    )
    return figures


def make_run(case: Case) -> dict[str, Any]:
    """Make the configuration of a round of a case on one device."""
    return {
        "method": case.method, "options": case.options, "model": case.model, "model_options": case.model_options,
        "rounds": 1, "devices": 1, "deadline_s": PATIENCE_S, "rejoin_grace_s": 5.0,
    }  # fmt: skip


def find_image_size(case: Case) -> int:
    return int(case.model_options.get("image_size", 224))


def _price(
    case: Case, session: OneRound, results: dict[str, ResultRecord], *, own_kernels: bool
) -> tuple[Program, ProgramCost]:
    digest = session.store.runs.read(RUN).program
    blobs = BlobStore(session.home / "runs" / RUN / "blobs")
    assert digest is not None  # a run that finished has one
    program = decode_program(blobs.get(digest))
    graphs = {name: graph_cost(blobs.get(spec.digest)) for name, spec in program.graphs.items()}
    cost = PricedProgram(program, case.options, graphs, own_kernels=own_kernels).cost(
        images=results["train"].samples, test_images=results["evaluate"].samples
    )
    return program, cost


def _compare_case(
    case: Case, program: Program, cost: ProgramCost, predictions: Sequence[Prediction], results: dict[str, ResultRecord]
) -> Report:
    trained = results["train"].use
    assert trained.step_s
    assert trained.peak_rss_bytes
    assert trained.fetched_bytes
    assert trained.upload_bytes
    peak = max(trained.peak_rss_bytes, results["evaluate"].use.peak_rss_bytes or 0)
    step_s = median(each.step_s or 0.0 for each in predictions)
    return {
        "name": case.name,
        "flops_step": cost.flops_step,
        "flops_torch": count_torch_flops(case, program.batch, len(program.classes)),
        "bytes_down": _compare(cost.bytes_once + cost.bytes_down, trained.fetched_bytes),
        "bytes_up": _compare(cost.bytes_up, trained.upload_bytes),
        "peak_memory": _compare(predictions[0].peak_rss_bytes, peak),
        "step_time": _compare(step_s, trained.step_s),
    }


def _compare(predicted: float, measured: float) -> Report:
    return {"predicted": predicted, "measured": measured, "error": (predicted - measured) / measured}


def count_torch_flops(case: Case, batch: Batch, classes: int) -> int:
    """Count one optimizer step in torch with autograd by FlopCounterMode, on the meta device."""
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
