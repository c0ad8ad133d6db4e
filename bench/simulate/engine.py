"""One measured process: a job by `fleet.simulate`, with one of its engines. Prints one JSON object."""

import sys
import tempfile
from datetime import datetime
from pathlib import Path

import msgspec

from bench.simulate.jobs import Job, Measured, decode_job
from coordinator.record.record import open_record
from fedvit.roles import ProductPrecision
from fleet.request import Engine, RunRequest
from fleet.simulate import simulate
from profiles.probes.host import peak_rss_bytes

RUN = "bench"


def run(
    job: Job,
    folders: list[Path],
    *,
    rounds: int,
    seed: int,
    engine: Engine,
    accelerator: str,
    precision: ProductPrecision,
) -> tuple[list[float], float | None]:
    """Simulate: (end of each round, mean accuracy over devices after the last).

    A round ends when its state is saved, before the evaluation. Raises FedvitError when the run fails.
    """
    values = {**job.config(rounds, seed), "accelerator": accelerator if engine == "torch" else "cpu"}
    with tempfile.TemporaryDirectory(prefix="bench-simulate-") as made:
        outcome = simulate(
            RunRequest(
                folders, values, out=Path(made), run=RUN, engine=engine, precision=precision, fused=accelerator != "cpu"
            )
        )
        store = open_record(Path(made))
        try:
            ended = [datetime.fromisoformat(str(entry.closed_at)).timestamp() for entry in store.rounds.read_all(RUN)]
        finally:
            store.close()
    return ended, outcome.summary.mean_accuracy


def main() -> None:
    """Arguments: the job, rounds, seed, engine, accelerator, precision, device folders."""
    text, rounds, seed, engine, accelerator, precision, *folders = sys.argv[1:]
    ended, accuracy = run(
        decode_job(text),
        [Path(folder) for folder in folders],
        rounds=int(rounds),
        seed=int(seed),
        engine=msgspec.convert(engine, Engine),
        accelerator=accelerator,
        precision=msgspec.convert(precision, ProductPrecision),
    )
    measured = Measured(ended=ended, accuracy=accuracy, peak_rss_bytes=peak_rss_bytes())
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")


if __name__ == "__main__":
    main()
