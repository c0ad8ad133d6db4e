"""One of several processes of the server's training: closes rounds together with the others until its input ends."""

from importlib import import_module

from coordinator.compute.pipes import open_pipes
from fedvit.files import private_files


def main() -> None:
    """Entry point; the process ends at once when the worker process ends."""
    waiting, replies = open_pipes()
    with private_files():
        loop = import_module("coordinator.compute.rank_loop")  # late: torch takes seconds; the pipes work already
        loop.close_rounds(waiting, replies)


if __name__ == "__main__":
    main()
