"""What the server trains on: one torch device, or several with a process for each."""

import os
import re

import torch

from fedvit.errors import ConfigError

MOST_PROCESSES = max(2, os.cpu_count() or 1)
"""Of one machine's processor."""


def choose_accelerator(wanted: str) -> str:
    """What `accelerator` of a configuration comes to on this machine. Raises ConfigError when it is not there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = wanted.partition(":")[0]
    if kind == "cuda":
        _check_gpus(wanted)
    elif kind == "cpu":
        _check_processes(wanted)
    if len(places(wanted)) == 1:
        try:
            torch.zeros(1, device=places(wanted)[0])
        except (RuntimeError, AssertionError) as error:
            raise _refused(wanted, str(error).splitlines()[0]) from error
    return wanted


def places(accelerator: str) -> tuple[str, ...]:
    """The torch device of each process of the server's training.

    >>> places("cuda:0,1"), places("cpu:2"), places("cuda:1"), places("cpu")
    (('cuda:0', 'cuda:1'), ('cpu', 'cpu'), ('cuda:1',), ('cpu',))
    """
    kind, colon, which = accelerator.partition(":")
    if kind == "cpu" and colon:
        return ("cpu",) * int(which)
    if kind == "cuda" and colon:
        return tuple(f"cuda:{number}" for number in which.split(","))
    return (accelerator,)


def _check_gpus(wanted: str) -> None:
    if not re.fullmatch(r"cuda(:\d+(,\d+)*)?", wanted):
        raise _refused(wanted, "GPUs are written 'cuda', 'cuda:1' or 'cuda:0,1'")
    chosen = places(wanted)
    if twice := sorted({place for place in chosen if chosen.count(place) > 1}):
        raise _refused(wanted, f"{twice[0]} is in it more than once")
    if not torch.cuda.is_available():
        raise _refused(wanted, "torch finds no GPU with CUDA on this machine. Use 'cpu', or see what nvidia-smi says")
    there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if missing := [place for place in chosen if place not in ("cuda", *there)]:
        raise _refused(wanted, f"there is no {missing[0]}; torch finds {', '.join(there)}")


def _check_processes(wanted: str) -> None:
    if not re.fullmatch(r"cpu(:\d+)?", wanted):
        raise _refused(wanted, "processors are written 'cpu', or 'cpu:2' for two processes")
    if not 1 <= len(places(wanted)) <= MOST_PROCESSES:
        raise _refused(wanted, f"this machine takes 1 to {MOST_PROCESSES} processes")


def _refused(wanted: str, why: str) -> ConfigError:
    return ConfigError(f"accelerator = {wanted!r} cannot be used: {why}")
