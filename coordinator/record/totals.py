"""Totals of rounds and devices, computed from results when a round is closed and evaluated, and kept for good."""

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import msgspec

from coordinator.record.tables import ANNOUNCED, SUM, DeviceTotals, ResultRecord, RoundTotals
from fedvit.answer_scores import EvaluationCounts, score_answers
from fedvit.resources import BudgetKind


class Evaluation(NamedTuple):
    """The totals of an evaluated round, and each device's accuracy."""

    totals: RoundTotals
    accuracy: dict[str, float]


def add_training(totals: RoundTotals, results: Sequence[ResultRecord]) -> RoundTotals:
    """Add the training results of the round's server step."""
    losses = [result.metrics["loss"] for result in results if "loss" in result.metrics]
    return msgspec.structs.replace(
        _with_costs(totals, results),
        accepted=sum(result.device != SUM for result in results),
        train_loss=fmean(losses) if losses else None,
        flops=sum(result.use.flops or 0 for result in results),
        train_s=max((result.use.train_s for result in results if result.use.train_s is not None), default=None),
    )


def add_evaluation(totals: RoundTotals, results: Sequence[ResultRecord]) -> Evaluation:
    """Add the results of the evaluation. Of a secure sum only the accuracy over all images is known."""
    tested = [result for result in results if result.samples]
    accuracy = {result.device: result.metrics["correct"] / result.samples for result in tested}
    totals = _with_costs(totals, results)
    if not tested:
        return Evaluation(totals, accuracy)
    images = sum(result.samples for result in tested)
    if SUM in accuracy:
        return Evaluation(
            msgspec.structs.replace(totals, accuracy_mean=accuracy[SUM], accuracy_weighted=accuracy.pop(SUM)), accuracy
        )
    totals = msgspec.structs.replace(
        totals,
        accuracy_mean=fmean(accuracy.values()),
        accuracy_std=pstdev(accuracy.values()),
        accuracy_weighted=sum(result.metrics["correct"] for result in tested) / images,
        accuracy_lowest=min(accuracy.values()),
        accuracy_highest=max(accuracy.values()),
        scores=score_answers([EvaluationCounts(one.samples, one.metrics, one.by_class) for one in tested]),
    )
    return Evaluation(totals, accuracy)


def _with_costs(totals: RoundTotals, results: Sequence[ResultRecord]) -> RoundTotals:
    energies = [result.use.energy_j for result in results if result.use.energy_j is not None]
    return msgspec.structs.replace(
        totals,
        energy_j=sum(energies, totals.energy_j or 0.0) if energies else totals.energy_j,
        bytes_down=totals.bytes_down + sum(result.use.received_bytes or 0 for result in results),
        bytes_up=totals.bytes_up + sum(result.use.sent_bytes or 0 for result in results),
    )


def with_result(totals: DeviceTotals, result: ResultRecord) -> DeviceTotals:
    """Totals of a device with one more result."""
    use, training = result.use, result.kind == "train"
    images = int(result.metrics.get(ANNOUNCED, result.samples))
    changed: dict[str, Any] = {
        "results": totals.results + 1,
        "bytes_down": totals.bytes_down + (use.received_bytes or 0),
        "bytes_up": totals.bytes_up + (use.sent_bytes or 0),
        "peak_rss_bytes": max(filter(None, (totals.peak_rss_bytes, use.peak_rss_bytes)), default=None),
        "budget_kept": totals.budget_kept + (not use.broke),
        "battery_percent": use.battery_percent,
        "charging": use.charging,
    }
    if use.energy_j is not None:
        changed["energy_j"] = (totals.energy_j or 0.0) + use.energy_j
    if training:
        changed |= {"temperature_c": use.temperature_c, "throttled": use.throttled}
        changed |= {"rounds": totals.rounds + 1, "train_samples": max(totals.train_samples, images)}
        if use.step_s is not None:
            changed |= {"step_s": totals.step_s + use.step_s, "step_rounds": totals.step_rounds + 1}
        if use.flops is not None:
            changed |= {"flops": totals.flops + use.flops, "flops_rounds": totals.flops_rounds + 1}
    else:
        changed["test_samples"] = max(totals.test_samples, images)
        if result.samples:
            changed["accuracy"] = result.metrics["correct"] / result.samples
    totals = msgspec.structs.replace(totals, **changed)
    return with_broken(totals, use.broke) if use.broke else totals


def with_broken(totals: DeviceTotals, kinds: Iterable[BudgetKind]) -> DeviceTotals:
    """Totals of a device with one more task that exceeded these budgets."""
    broke = dict(totals.broke)
    for kind in kinds:
        broke[kind] = broke.get(kind, 0) + 1
    return msgspec.structs.replace(totals, budget_broken=totals.budget_broken + 1, broke=dict(sorted(broke.items())))
