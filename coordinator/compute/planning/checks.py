"""Checks that a configuration fits its method and its model."""

from typing import Any

import torch

from coordinator.compute.planning.batch import method_batch
from coordinator.compute.planning.secure_runs import check_secure
from coordinator.compute.planning.server_data import check_server_data
from coordinator.config import RunConfig, StartConfig, load_selector, make_config, why_no_regions
from fedvit.errors import ConfigError
from fedvit.known_names import find_packaged_model
from fedvit.methods import build_model, make_method, set_task
from fedvit.methods.aggregators import make_aggregator
from fedvit.methods.base import Method, ServerRule, check_fits, list_patches
from fedvit.methods.novel import phases_of, server_rule_of
from fedvit.model_options import OWN_MODELS
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from fedvit.wire.messages import MAX_SCORED_CLASSES


def checked_config(values: dict[str, Any], where: str) -> StartConfig:
    """The configuration of file and flags, checked as a whole. Raises ConfigError, which names `where`."""
    config = make_config(values, where)
    check_run(config.run, where)
    return config


def check_run(config: RunConfig, where: str) -> None:
    """Raise ConfigError, which names `where`, when options of method or model are wrong, or do not fit other keys."""
    try:
        _check(config)
    except ConfigError as error:
        raise ConfigError(error.code, f"{where}: {error}") from None


def check_region(config: RunConfig, where: str) -> None:
    """Raise ConfigError, which names `where`, if the mean of a region's updates cannot stand for them."""
    if not config.asks_cohorts():
        raise ConfigError(
            "FV2202", f"{where}: mode = {config.mode!r}: a region answers in rounds, which the centre opens"
        )
    if config.variants:
        raise ConfigError(
            "FV2202", f"{where}: variants: a region's devices train the tensors that the centre's task names"
        )
    if config.task != "classification":
        raise ConfigError("FV2490", f"{where}: task = {config.task!r}: a region adds up right answers of one class")
    if why := why_no_regions(config):
        raise ConfigError("FV1104", f"{where}: {why}")
    method = make_method(config.method, config.options)
    with torch.device("meta"):
        vit = build_model(
            method, config.model, max(2, len(config.classes)), seed=0, options=config.model_options, pretrained=False
        )
        if why := method.server_rule(vit).why_no_regions:
            raise ConfigError("FV2202", f"{where}: method {config.method!r} cannot be used in regions: {why}")
        if method.sent_precision != "fp32" and method.names_with(vit, Role.GLOBAL):
            raise ConfigError(
                "FV2202",
                f"{where}: method {config.method!r} with weights sent as {method.sent_precision} cannot be used in "
                "regions: they have no other weights to send to their devices",
            )


def _check(config: RunConfig) -> None:
    """Checked before devices join: on torch's device "meta" a model needs no time and memory."""
    load_selector(config.selection)
    make_aggregator(config.robust.aggregator, config.robust.malicious_share)
    method = make_method(config.method, config.options)
    # they have none, and say so
    pretrained = (config.model in OWN_MODELS or find_packaged_model(config.model) is not None) and config.pretrained
    with torch.device("meta"):
        vit = build_model(
            method,
            config.model,
            max(config.least_classes, len(config.classes)),
            seed=0,
            options=config.model_options,
            pretrained=pretrained,
        )
        set_task(method, vit, config.label_form)
        method_batch(method, vit, config.images)
        groups = method.groups(vit)
        rule = server_rule_of(method, vit)
        _check_late_results(config, rule)
        roles = {role for role, names in groups.values() if names}
        averaged = roles if rule.averages else roles - {Role.SHARED}
        config.robust.check(config.method, averaged, rule.why_not_measured)
        collects = any(phase.collect for phase in phases_of(method, vit))
        config.privacy.check(config.method, averaged, collects, config.robust)
        check_secure(config, roles, collects=collects, why_no_mean=rule.why_no_regions)
        config.check_privacy_of_modes()
        for pattern, options in config.variants.items():
            try:
                other = make_method(config.method, {**config.options, **options})
                check_fits(other, vit)
                other.groups(vit)
                if list_patches(other) != list_patches(method):
                    raise ConfigError("FV1112", f"{options} adds other tensors to the model than the run does")
            except ConfigError as error:
                raise ConfigError("FV1002", f"variants: {pattern!r}: {error}") from None
        config.updates.check(config.method, method.groups(vit), collects)
        check_server_data(config, rule)
        if config.promote and vit.reads_text:
            raise ConfigError("FV1110", f"[promote] compares models of images, and {config.model!r} reads text")
        if config.auc and (why := _find_why_no_auc(config, method, vit)):
            raise ConfigError("FV2490", f"auc = true needs scores of answers by class: {why}")


def _find_why_no_auc(config: RunConfig, method: Method, vit: PatchViT) -> str | None:
    """Return the reason why devices do not count scores by class; None if they do."""
    if not method.evaluate(vit).counts_classes:
        return f"{config.method} keeps on devices what they answered for each class"
    if vit.reads_text or config.task in ("regression", "segmentation"):
        return f"a {'text' if vit.reads_text else config.task} has no classes of images"
    if config.secure:
        return "secure = true adds up right answers alone"
    if len(config.classes) > MAX_SCORED_CLASSES:
        return (
            f"{len(config.classes)} classes are more than the {MAX_SCORED_CLASSES} of which scores fit into a message"
        )
    return None


def _check_late_results(config: RunConfig, rule: ServerRule) -> None:
    """Check that this method's server can use uploads for an older state."""
    if not config.asks_cohorts() and config.evaluation == "pre_aggregation":
        raise ConfigError(
            "FV1015", "evaluation = 'pre_aggregation' tests devices of one round: it needs mode = 'rounds'"
        )
    if not config.uses_late_results():
        return
    setting = config.late_setting()
    if why := rule.why_never_late:
        raise ConfigError("FV1015", f"{setting} cannot be used with method {config.method!r}: {why}")
    if config.late == "discount" and not rule.discounts:
        raise ConfigError(
            "FV1015", f"{setting} cannot be used with method {config.method!r}: its uploads have no weight"
        )
