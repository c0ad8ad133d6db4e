"""Rounds that are killed at any moment: `python -m edge_client.owner.killed_rounds IMAGES VAULT THREADS`.

Each round trains from what the vault holds, and is stored there, as a task's personal tensors are. A process that is
started again goes on after the newest stored round. It prints a line when a round begins.
"""

import sys
from contextlib import closing
from pathlib import Path

from edge_client.owner.trials import TrialTrainer, load_trial
from edge_client.storage.vault import Vault
from edge_client.work.runtime import Seeds
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result

RUN = "certify"
ROUNDS, STEPS = 6, 4


def run_rounds(images: Path, vault: Vault, threads: int) -> None:
    """Train the rounds that the vault does not hold yet."""
    with closing(TrialTrainer(images, threads)) as trainer:
        trial = load_trial("float", STEPS)
        for number in range(vault.round_of(RUN) + 1, ROUNDS + 1):
            sys.stdout.write(f"round {number}\n")
            sys.stdout.flush()
            start = vault.local(RUN) or trial.start
            trained, _ = trainer.train(trial._replace(start=start), seeds=Seeds(0, number, RUN))
            assert trained  # nothing stops it, and no limit
            result = Result(RUN, number, "train", trained.samples, {}, ResourceUse())
            vault.commit(result, trained.tensors)


if __name__ == "__main__":
    run_rounds(Path(sys.argv[1]), Vault(Path(sys.argv[2])), int(sys.argv[3]))
