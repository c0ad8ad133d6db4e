"""The flags of commands that predict costs: a method on a model, boards, and budgets."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from coordinator.commands.flags import key_value
from coordinator.compute.planning.prediction_request import BoardMode, PredictionRequest
from coordinator.config import RunConfig, make_config
from fedvit.command_line import amount
from fedvit.known_values import check_settings
from fedvit.quantities import parse_bytes, parse_flops, parse_seconds
from fedvit.resources import Budget


def _budget_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Budgets with units, as for devices and runs."""
    for flag, parse, text in (
        (
            "--memory-budget",
            parse_bytes,
            "Memory of every device's process, in addition to its board's limit; e.g. 512MB.",
        ),
        ("--flops-budget", parse_flops, "FLOPs of a round's training, e.g. 2TFLOP."),
        ("--round-deadline", parse_seconds, "Time of a round's training, e.g. 10m."),
        ("--upload-budget", parse_bytes, "Bytes of one round's result, e.g. 5MB."),
    ):
        command = click.option(flag, callback=amount(parse), metavar="AMOUNT", help=text)(command)
    return command


def request_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A method, a model, boards, and their data and budgets."""
    options = (
        click.option("--method", default="eftvit", help="Federated method."),
        click.option(
            "--model",
            default="vit_small_images",
            help="Name of a timm Vision Transformer or ResNet, or of a small model.",
        ),
        click.option(
            "--option", "-o", "pairs", multiple=True, metavar="KEY=VALUE", help="Option of the method. Repeatable."
        ),
        click.option("--model-option", "model_pairs", multiple=True, metavar="KEY=VALUE", help="Repeatable."),
        click.option(
            "--device",
            "devices",
            multiple=True,
            required=True,
            metavar="ID[@MODE]",
            help="A board, in a power mode: see `coordinator boards`. Repeatable.",
        ),
        click.option("--classes", default=10, type=click.IntRange(min=2), help="Number of classes."),
        click.option("--images", default=500, type=click.IntRange(min=1), help="Training images of one device."),
        click.option("--test-images", default=100, type=click.IntRange(min=0), help="Test images of one device."),
        _budget_flags,
    )
    for option in reversed(options):
        command = option(command)
    return command


def request_of(
    given: dict[str, Any],
    *,
    config: RunConfig | None = None,
    masks: Sequence[float] = (),
    splits: Sequence[int] = (),
) -> PredictionRequest:
    """Return the request in the values of `request_flags`; `config` stands for method and model.

    Raises ConfigError for unknown names.
    """
    if config is None:
        values = {
            "method": given["method"],
            "options": dict(map(key_value, given["pairs"])),
            "model": given["model"],
            "model_options": dict(map(key_value, given["model_pairs"])),
            "rounds": 1,
        }
        check_settings(values["method"], values["options"], values["model"], values["model_options"])
        config = make_config(values, "flags").run
    return PredictionRequest(
        config=config,
        classes=given["classes"],
        targets=[BoardMode.parse(text) for text in given["devices"]],
        masks=masks,
        splits=splits,
        images=given["images"],
        test_images=given["test_images"],
        budget=Budget(
            memory_bytes=given["memory_budget"],
            flops_per_round=given["flops_budget"],
            round_deadline_s=given["round_deadline"],
            upload_bytes=given["upload_budget"],
        ),
    )
