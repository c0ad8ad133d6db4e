"""The torch device that the server trains on, or several of them with one process each."""

import os
import re

import torch

from fedvit.errors import ConfigError

MOST_PROCESSES = max(2, os.cpu_count() or 1)
"""Most processes on the processor of one machine."""


def choose_accelerator(wanted: str) -> str:
    """Resolve `accelerator` of a configuration on this machine. Raises ConfigError if it is not available."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = wanted.partition(":")[0]
    if kind == "cuda":
        _check_gpus(wanted)
    elif kind == "cpu":
        _check_processes(wanted)
    if len(torch_devices(wanted)) == 1:
        try:
            torch.zeros(1, device=torch_devices(wanted)[0])
        except (RuntimeError, AssertionError) as error:
            raise _make_refusal(wanted, str(error).splitlines()[0]) from error
    return wanted


def torch_devices(accelerator: str) -> tuple[str, ...]:
    """The torch device of each process of the server's training.

    >>> torch_devices("cuda:0,1"), torch_devices("cpu:2"), torch_devices("cuda:1"), torch_devices("cpu")
    (('cuda:0', 'cuda:1'), ('cpu', 'cpu'), ('cuda:1',), ('cpu',))
    """
    kind, colon, selected = accelerator.partition(":")
    if kind == "cpu" and colon:
        return ("cpu",) * int(selected)
    if kind == "cuda" and colon:
        return tuple(f"cuda:{number}" for number in selected.split(","))
    return (accelerator,)


def _check_gpus(wanted: str) -> None:
    if not re.fullmatch(r"cuda(:\d+(,\d+)*)?", wanted):
        raise _make_refusal(wanted, "GPUs are written 'cuda', 'cuda:1' or 'cuda:0,1'")
    chosen = torch_devices(wanted)
    if twice := sorted({device for device in chosen if chosen.count(device) > 1}):
        raise _make_refusal(wanted, f"{twice[0]} is listed more than once")
    if not torch.cuda.is_available():
        raise _make_refusal(
            wanted, "torch finds no GPU with CUDA on this machine. Use 'cpu', or see what nvidia-smi says"
        )
    available = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if missing := [device for device in chosen if device not in ("cuda", *available)]:
        raise _make_refusal(wanted, f"there is no {missing[0]}; torch finds {', '.join(available)}")


def _check_processes(wanted: str) -> None:
    if not re.fullmatch(r"cpu(:\d{1,18})?", wanted):
        raise _make_refusal(wanted, "the processor is written 'cpu', or 'cpu:2' for two processes")
    if not 1 <= int(wanted.removeprefix("cpu").lstrip(":") or 1) <= MOST_PROCESSES:
        raise _make_refusal(wanted, f"this machine supports 1 to {MOST_PROCESSES} processes")


def _make_refusal(wanted: str, reason: str) -> ConfigError:
    return ConfigError("FV1022", f"accelerator = {wanted!r} cannot be used: {reason}")
