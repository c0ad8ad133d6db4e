"""Instructions of training steps on emulated processors, beside torch's (`make arm-torch`).

The cases are those of `bench step` with fewer blocks, smaller images and smaller batches: an emulated processor
computes about 0.1 GFLOP in a second. EFTViT's have half the width, since the update of two wide blocks would cost as
much as a step on so few patches. All programs have one thread.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.cases import CASES, Case, choose, encode_case
from bench.prepare import prepare
from fedvit.models import SMALL
from tests.arm.counting import read_counts
from tests.arm.emulation import ALIKE, ARM, KERNELS, KERNELS_X86, emulate
from tests.arm.moved import count_moved_bytes

_SQUARE = {"patch_size": 16, "image_size": 64, "mlp_ratio": 4.0, "qkv_bias": True}
_VIT_B = {**_SQUARE, "width": 768, "heads": 12}
_VIT_S = {**_SQUARE, "width": 384, "heads": 6}
SIZES: dict[str, tuple[dict[str, object], int]] = {
    "eftvit-vitb": ({**_VIT_S, "image_size": 128, "depth": 4}, 8),
    "eftvit-vitb-b8-int8": ({**_VIT_S, "image_size": 128, "depth": 4}, 8),
    "fedperfix-vits": ({**_VIT_S, "depth": 2}, 4),
    "pfedpg-vitb": ({**_VIT_B, "depth": 2}, 2),
    "fedtp-tiny": ({"image_size": 32, "patch_size": 4, "width": 128, "heads": 8, "mlp_ratio": 2.0, "depth": 4}, 8),
    "fedavg-vitt": ({**_SQUARE, "width": 192, "heads": 3, "depth": 6}, 8),
}
"""Case -> its model's options and its batch."""
STEPS = 3
PROGRAMS = {
    "cortex-a72": ("torch", "fp32", "fp32 kernels"),
    "cortex-a76": ("torch", "fp32 kernels", "fp16 kernels", "int8 kernels"),
    "haswell": ("torch", "fp32", "fp32 kernels", "int8 kernels"),
}
if platform.machine() != "x86_64":
    del PROGRAMS["haswell"]  # its torch and onnxruntime are this machine's own
"""Processor -> columns of the table: torch in float32, or a precision of products, with or without kernels."""


def make_small(case: Case) -> Case:
    """Give a case its size on an emulated processor."""
    sizes, batch_size = SIZES[case.name]
    options = {**case.model_options, **sizes}
    small = replace(case, model=SMALL, model_options=options).with_options(batch_size=batch_size)
    return small.with_options(micro_batch=batch_size // 2) if "micro_batch" in case.options else small


def count_instructions(case: Case, processor: str, program: str, folder: Path) -> int:
    """Count the instructions of the last of STEPS steps."""
    own = folder / f"{case.name}-{processor}-{program}".replace(" ", "-")
    own.mkdir()
    environment = {"QEMU_PLUGIN": f"{ARM / 'instructions.so'},out={own / 'count'}", "OMP_NUM_THREADS": "1", **ALIKE}
    if program == "torch":
        given = ["tests.arm.torch_process", encode_case(case), STEPS]
        environment |= {} if processor == "haswell" else {"PYTHONPATH": str(ARM / "torch")}
    else:
        compute, _, kernels = program.partition(" ")
        prepare(case.with_options(compute=compute), own, 8, folder / "graphs")
        given = ["tests.arm.step_process", own, STEPS]
        environment |= (KERNELS_X86 if processor == "haswell" else KERNELS) if kernels else {}
    printed = emulate(processor, "-m", *given, **environment)
    if program != "torch" and json.loads(printed)["kernels"] != ("kernels" in program):
        raise SystemExit(
            "the column without kernels needs an environment without them: uv pip uninstall fedvit-kernels"
        )
    counts = read_counts(own / "count")
    return counts[STEPS - 1] - counts[STEPS - 2]


def main() -> None:
    """Arguments: names of cases; all without. Prints a table, and each number on standard error when it is there."""
    cases = [make_small(case) for case in choose(sys.argv[1:], [case for case in CASES if case.name in SIZES])]
    jobs = [(case, processor, program) for case in cases for processor, row in PROGRAMS.items() for program in row]
    with TemporaryDirectory(dir=ARM) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def count(job: tuple[Case, str, str]) -> int:
            instructions = count_instructions(*job, Path(folder))
            print(f"{job[0].name}, {job[1]}, {job[2]}: {instructions / 1e6:,.0f} million", file=sys.stderr, flush=True)
            return instructions

        counts = {(case.name, *rest): found for (case, *rest), found in zip(jobs, pool.map(count, jobs), strict=True)}
        moved = {case.name: count_moved_bytes(Path(folder) / f"{case.name}-cortex-a72-fp32") for case in cases}
    for line in draw_table(moved, counts):
        print(line)


def draw_table(moved_bytes: dict[str, int], counts: dict[tuple[str, ...], int]) -> Iterator[str]:
    """Draw a Markdown table for each processor: millions of instructions, and their ratio to torch's.

    `moved_bytes`: of a step in float32, by case.
    """
    for processor, programs in PROGRAMS.items():
        yield f"| {processor} | {' | '.join(programs)} | moved |"
        yield "|---" * (len(programs) + 2) + "|"
        for name, moved in moved_bytes.items():
            torch, *ours = (counts[name, processor, program] / 1e6 for program in programs)
            cells = " | ".join(f"{one:,.0f} ({one / torch:.2f})" for one in ours)
            yield f"| {name} | {torch:,.0f} | {cells} | {moved / 1e6:,.0f} MB |"
        yield ""


if __name__ == "__main__":
    main()
