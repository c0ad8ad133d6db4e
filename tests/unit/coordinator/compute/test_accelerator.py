"""What the server trains on: what is taken, and what is refused."""

import pytest
import torch

from coordinator.compute.accelerator import MOST_PROCESSES, choose_accelerator, torch_devices
from fedvit.errors import ConfigError


def refusal(wanted: str) -> str:
    with pytest.raises(ConfigError) as refused:
        choose_accelerator(wanted)
    start = f"accelerator = {wanted!r} cannot be used: "
    assert str(refused.value).startswith(start)
    return str(refused.value).removeprefix(start)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_processors_are_one_process_or_several() -> None:
    assert torch_devices(choose_accelerator("cpu")) == ("cpu",)
    assert torch_devices(choose_accelerator("cpu:1")) == ("cpu",)
    assert torch_devices(choose_accelerator("cpu:2")) == ("cpu", "cpu")


PROCESSES = f"this machine supports 1 to {MOST_PROCESSES} processes"
CPU_FORM = "the processor is written 'cpu', or 'cpu:2' for two processes"
CUDA_FORM = "GPUs are written 'cuda', 'cuda:1' or 'cuda:0,1'"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("cpu:0", PROCESSES), (f"cpu:{MOST_PROCESSES + 1}", PROCESSES), ("cpu:99999999999", PROCESSES),
        ("cpu:", CPU_FORM), ("cpu:two", CPU_FORM), ("cpu:-1", CPU_FORM), ("cpu:0,1", CPU_FORM),
        ("cuda:", CUDA_FORM), ("cuda:0,", CUDA_FORM), ("cuda:0;1", CUDA_FORM), ("cuda:first", CUDA_FORM),
        ("cuda:0,1,0", "cuda:0 is listed more than once"),
    ],
)  # fmt: skip
def test_what_no_machine_could_use(wanted: str, reason: str) -> None:
    assert refusal(wanted) == reason


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:0,1"])
def test_gpus_on_a_machine_without(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    gpus(monkeypatch, 0)
    assert refusal(wanted) == ("torch finds no GPU with CUDA on this machine. Use 'cpu', or see what nvidia-smi says")


def test_gpus_of_which_one_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    assert refusal("cuda:0,3") == "there is no cuda:3; torch finds cuda:0, cuda:1"
    assert torch_devices(choose_accelerator("cuda:1,0")) == ("cuda:1", "cuda:0")
