"""The adapter of a LoRA run as PEFT's files, for the frozen backbone that the run began with.

Here queries and values have factors of their own; PEFT has one pair for the whole projection of queries, keys and
values. Both together are its pair of twice the rank: A = [A_q; A_v], and B with B_q above, B_v below, zeros elsewhere.
"""

import json
from pathlib import Path

import numpy as np

from export.bundle.write import TrainedModel, new_folder
from export.formats.timm_folder import find_lora, list_tensors, lora_scale, merge_lora
from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.tensors import Tensors, pack

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ROOT = "base_model.model."


def write(out: Path, trained: TrainedModel) -> list[str]:
    """Write the folder. Raises ConfigError if the run trained no LoRA adapter."""
    tensors = list_tensors(trained)
    pairs = dict.fromkeys(projection for projection, _ in find_lora(tensors))
    if not pairs:
        raise ConfigError("FV1909", f"method {trained.origin.method!r} trains no LoRA adapter: choose another format")
    merge_lora(tensors, trained)  # refuses what PEFT has no place for, too
    adapter: Tensors = {f"{_ROOT}head.{part}": tensors[f"head.{part}"] for part in ("weight", "bias")}
    rank = 0
    for projection in pairs:
        (a_q, b_q), (a_v, b_v) = (
            (tensors[f"{projection}.lora_{part}.a"], tensors[f"{projection}.lora_{part}.b"]) for part in "qv"
        )
        rank, rows = len(a_q), len(b_q)
        b = np.zeros((3 * rows, 2 * rank), np.float32)
        b[:rows, :rank], b[2 * rows :, rank:] = b_q, b_v
        adapter[f"{_ROOT}{projection}.lora_A.weight"] = np.concatenate([a_q, a_v])
        adapter[f"{_ROOT}{projection}.lora_B.weight"] = b
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": f"timm/{trained.origin.model}",
        "inference_mode": True,
        "r": 2 * rank,
        "lora_alpha": 2 * rank * lora_scale(trained, rank),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": ["attn.qkv"],
        "modules_to_save": ["head"],
    }
    with new_folder(out) as folder:
        atomic_write(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
        atomic_write(folder / WEIGHTS, pack(adapter))
    return [f"PEFT adapter: {out}", f'  PeftModel.from_pretrained(model, "{out}")']
