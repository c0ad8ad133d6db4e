"""The loop of one of several processes of the server's training."""

import logging
import os
import pickle
from datetime import timedelta
from queue import SimpleQueue
from typing import IO

import msgspec
import psutil
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from coordinator.compute.closing import Closing, RankSetup
from coordinator.compute.integrity import VerifiedBlobs
from coordinator.compute.pipes import write_frame
from coordinator.compute.process import Answered, WorkerProgress, encode_error

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(days=30)
"""Timeout between the processes; it is long because the worker process watches all of them."""


def close_rounds(waiting: "SimpleQueue[bytes]", replies: IO[bytes]) -> None:
    """Close rounds together with the other processes, as requests come."""
    setup: RankSetup = pickle.loads(waiting.get())  # noqa: S301 - only the worker process writes to this pipe
    placement = setup.placement

    def progress(text: str) -> None:
        if placement.rank == 0:
            write_frame(replies, WorkerProgress(text))

    blobs = VerifiedBlobs(setup.blobs)
    joined = False
    while True:
        closing: Closing = pickle.loads(waiting.get())  # noqa: S301 - as above
        try:
            if not joined:
                _join(setup)
                joined = True
            value = closing.run(setup.rule, setup.vit, blobs, placement, progress)
        except Exception as error:
            raised = encode_error(error, blobs.found())
            if not raised.kind:
                log.exception("server training failed", extra={"rank": placement.rank})
            write_frame(replies, raised)
        else:
            write_frame(replies, Answered(value=msgspec.Raw(msgspec.msgpack.encode(value)), damaged=blobs.found()))


def _join(setup: RankSetup) -> None:
    """Connect to the other processes, over the loopback interface only."""
    interface = next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == LOOPBACK for address in addresses)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    device = torch.device(setup.placement.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // setup.placement.world_size))
    store = TCPStore(LOOPBACK, setup.port, is_master=False, timeout=PATIENCE)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=setup.placement.rank,
        world_size=setup.placement.world_size,
        timeout=PATIENCE,
    )
