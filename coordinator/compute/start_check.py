"""Checks that a run can begin, before any device is waited for: with the real weights and the real earlier run."""

from pathlib import Path

import torch

from coordinator.compute.accelerator import choose_accelerator
from coordinator.compute.checkpoint import start_state
from coordinator.compute.messages import Check, Checked
from coordinator.compute.planning.checks import check_region, check_run
from coordinator.compute.planning.planner import check_start_fits
from coordinator.compute.planning.server_data import read_server_images
from coordinator.config import RunConfig
from coordinator.record.privacy import check_first_round
from coordinator.record.record import open_record
from fedvit.errors import ConfigError
from fedvit.methods import build_model, make_method
from fedvit.methods.base import Method
from fedvit.models import checkpoint_notes
from fedvit.models.vit import PatchViT
from fedvit.program import Role

MOSTLY = 0.5
"""Share of the model's parameters above which random, untrained ones cause a warning."""


def check_start(request: Check) -> Checked:
    """Raise ConfigError, beginning with `where` of the request, and Damaged if an earlier run's state is damaged."""
    config = request.config
    check_run(config, request.where)
    if request.is_region:
        check_region(config, request.where)
    accelerator = choose_accelerator(config.accelerator)
    try:
        parameters, notes = _built(config, Path(request.runs))
    except ConfigError as error:
        raise ConfigError(error.code, f"{request.where}: {error}") from None
    return Checked(accelerator=accelerator, parameters=parameters, notes=notes)


def _built(config: RunConfig, runs: Path) -> tuple[int, list[str]]:
    """Build the model as the run would; returns its number of parameters and warnings for the operator."""
    start, classes = None, config.classes
    if config.start_from is not None:
        with open_record(runs, check=False) as store:
            start = start_state(config.start_from, store, runs, config.start_round)
            classes = classes or store.runs.read(config.start_from).classes
            check_first_round(config, store)
    else:
        check_first_round(config, None)
    method = make_method(config.method, config.options)
    # without weights to load, the model needs neither time nor memory
    with torch.device("cpu" if config.pretrained else "meta"):
        vit = build_model(
            method,
            config.model,
            max(2, len(classes)),
            seed=0,
            options=config.model_options,
            pretrained=config.pretrained,
        )
    read_server_images(config, method, vit)
    tensors = method.tensors(vit)
    if start is not None:
        check_start_fits({name: tuple(value.shape) for name, value in tensors.items()}, start)
    notes = checkpoint_notes(vit, config.pretrained) if isinstance(config.pretrained, str) else []
    return sum(value.numel() for value in tensors.values()), notes + _random_backbone(config, method, vit)


def _random_backbone(config: RunConfig, method: Method, vit: PatchViT) -> list[str]:
    """A warning if most of the model is neither trained nor loaded, and so stays random."""
    if config.pretrained or config.start_from is not None:
        return []
    tensors = method.tensors(vit)
    fixed = [name for role, names in method.groups(vit).values() if role is Role.FROZEN for name in names]
    share = sum(tensors[name].numel() for name in fixed) / sum(value.numel() for value in tensors.values())
    if share < MOSTLY:
        return []
    return [f"{share:.0%} of the model is random and never trained: give it weights with --pretrained or --start-from"]
