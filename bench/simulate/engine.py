"""One measured process: a job by `fleet.simulate`, with one of its engines. Prints one JSON object."""

import sys
import tempfile
from datetime import datetime
from pathlib import Path

import msgspec

from bench.simulate.jobs import Job, Measured, Start, decode_job
from coordinator.record.record import open_record
from fleet.request import Engine, RunRequest
from fleet.simulate import simulate
from profiles.probes.host import peak_rss_bytes

RUN = "bench"


def run(job: Job, folders: list[Path], start: Start, engine: Engine) -> tuple[list[float], float | None]:
    """Simulate: (end of each round, mean accuracy over devices after the last).

    A round ends when its state is saved, before the evaluation. Raises FedvitError when the run fails.
    """
    accelerator = start.accelerator
    values = {**job.config(start.rounds, start.seed), "accelerator": accelerator if engine == "torch" else "cpu"}
    with tempfile.TemporaryDirectory(prefix="bench-simulate-") as made:
        is_fused, precision = accelerator != "cpu", start.precision
        outcome = simulate(
            RunRequest(folders, values, out=Path(made), run=RUN, engine=engine, precision=precision, fused=is_fused)
        )
        with open_record(Path(made)) as store:
            ended = [datetime.fromisoformat(str(entry.closed_at)).timestamp() for entry in store.rounds.read_all(RUN)]
    return ended, outcome.summary.mean_accuracy


def main() -> None:
    """Arguments: the job, rounds, seed, engine, accelerator, precision, device folders."""
    text, rounds, seed, engine, accelerator, precision, *folders = sys.argv[1:]
    start = Start.parse(rounds, seed, accelerator, precision)
    ended, accuracy = run(
        decode_job(text), [Path(folder) for folder in folders], start, msgspec.convert(engine, Engine)
    )
    measured = Measured(ended=ended, accuracy=accuracy, peak_rss_bytes=peak_rss_bytes())
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")


if __name__ == "__main__":
    main()
