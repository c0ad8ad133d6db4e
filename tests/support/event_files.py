"""What TensorBoard's own reader finds in the folder of a run."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag; nothing where there is no file yet."""
    if not (run / "tensorboard").is_dir():
        return {}
    found = EventAccumulator(str(run / "tensorboard")).Reload()
    return {tag: [(entry.step, entry.value) for entry in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def steps(run: Path, tag: str) -> list[int]:
    return [step for step, _ in scalars(run)[tag]]
