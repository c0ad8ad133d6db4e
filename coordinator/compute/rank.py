"""A process of the server's training, one of several: closes rounds together with the others until its input ends."""

import logging
import os
import pickle
from datetime import timedelta
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING

import msgspec
import psutil

from coordinator.compute.pipes import open_pipes, write_frame
from coordinator.compute.process import Answered, Doing, raised_of
from fedvit.files import private_files

if TYPE_CHECKING:
    from coordinator.compute.closing import Closing, Joining

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(days=30)
"""That a process has with the others: the worker process watches over all of them."""


def main() -> None:
    """Ends with the worker process, in the midst of whatever it does."""
    waiting, replies = open_pipes()
    with private_files():
        _serve(waiting, replies)


def _serve(waiting: "SimpleQueue[bytes]", replies: IO[bytes]) -> None:
    from coordinator.record.integrity import SoundBlobs  # with torch: seconds in which the end of the input is seen

    joining: Joining = pickle.loads(waiting.get())  # noqa: S301 - from the worker process alone
    place = joining.place

    def say(text: str) -> None:
        if place.rank == 0:
            write_frame(replies, Doing(text))

    blobs = SoundBlobs(joining.blobs)
    joined = False
    while True:
        closing: Closing = pickle.loads(waiting.get())  # noqa: S301 - as above
        try:
            if not joined:
                _join(joining)
                joined = True
            value = closing.done(joining.rule, joining.vit, blobs, place, say)
        except Exception as error:
            raised = raised_of(error, blobs.found())
            if not raised.kind:
                log.exception("server training failed", extra={"rank": place.rank})
            write_frame(replies, raised)
        else:
            write_frame(replies, Answered(value=msgspec.Raw(msgspec.msgpack.encode(value)), damaged=blobs.found()))


def _join(joining: "Joining") -> None:
    """Meet the other processes, over the loopback interface alone."""
    import torch
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    interface = next(
        name for name, ways in psutil.net_if_addrs().items() if any(way.address == LOOPBACK for way in ways)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    place = torch.device(joining.place.device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // joining.place.world_size))
    store = TCPStore(LOOPBACK, joining.port, is_master=False, timeout=PATIENCE)
    distributed.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        store=store,
        rank=joining.place.rank,
        world_size=joining.place.world_size,
        timeout=PATIENCE,
    )


if __name__ == "__main__":
    main()
