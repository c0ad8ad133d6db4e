"""The worker process: answers requests on its standard input until that ends."""

import gc
from importlib import import_module

from coordinator.compute.pipes import open_pipes
from fedvit.files import private_files


def main() -> None:
    """Entry point; the process ends at once when its standard input ends."""
    log_fields = dict[str, object]()
    waiting, replies = open_pipes(log_fields)
    with private_files():
        gc.disable()  # half a million objects stay for good: to look through them again and again takes 0.3 s of 2.2
        answering = import_module("coordinator.compute.answering")  # late: torch takes seconds; the pipes work already
        gc.freeze()
        gc.enable()
        answering.Answerer(replies, log_fields).serve(waiting)


if __name__ == "__main__":
    main()
