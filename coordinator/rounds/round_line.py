"""The line that the coordinator prints for a finished round."""

from coordinator.record.record import Record
from coordinator.run_view import read_round
from fedvit.answer_scores import SCORE_NAMES


def round_line(store: Record, run: str, number: int, rounds: int) -> str:
    """Describe a finished round in one line."""
    summary = read_round(store, run, number)
    parts = [f"round {number:>3}/{rounds}", f"{summary.accepted}/{summary.cohort} devices"]
    parts += [f"{count} {what}" for what in ("late", "declined") if (count := getattr(summary, what))]
    if summary.accuracy_mean is not None and summary.accuracy_std is not None:
        parts.append(f"accuracy {summary.accuracy_mean:.3f} ± {summary.accuracy_std:.3f}")
    parts += [f"{SCORE_NAMES[name]} {value:.3g}" for name, value in summary.scores.items() if name in SCORE_NAMES]
    if summary.train_loss is not None:
        parts.append(f"loss {summary.train_loss:.3f}")
    if summary.devices_s is not None and summary.server_s is not None:
        parts.append(f"devices {summary.devices_s:.1f} s, server {summary.server_s:.1f} s")
    if summary.epsilon is not None:
        parts.append(f"epsilon {summary.epsilon:.3g}")
    if summary.upload_epsilon is not None:
        parts.append(f"epsilon {summary.row_epsilon:.3g} per row, {summary.upload_epsilon:.3g} per upload")
    parts.append(f"down {summary.bytes_down / 1e6:.1f} MB, up {summary.bytes_up / 1e6:.1f} MB")
    return "   ".join(parts)
