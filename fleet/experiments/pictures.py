"""Pictures of a finished run for the report: the server's embeddings on a plane, and the attention of models."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from coordinator.compute.planning.batch import method_batch
from fedvit.data.folder import DeviceData
from fedvit.data.images import normalise, read_image, unfold
from fedvit.data.layout import PARTITION_FILE
from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, Method
from fedvit.methods.calculus import Named
from fedvit.methods.packed import as_sent, unpack_tensors
from fedvit.models.prompts import Prompts
from fedvit.models.vit import PatchViT
from fedvit.tensors import Array, Tensors
from fleet.finished import FinishedRun
from fleet.partition import PartitionSummary
from profiles.report.experiment import AttentionPicture, EmbeddedDevice, HeadFusion

LEAST_DEVICES = 4
"""A plane of fewer embeddings shows nothing."""
DISCARDED = 0.3
"""Share of an image's weights, the lowest, that FedTP's attention leaves out."""
PERPLEXITY = 30.0
"""Perplexity of t-SNE, scikit-learn's default; with few devices it is a third of the others."""


def restore_model(run: Mapping[str, Any], classes: int, seed: int, tensors: Tensors) -> tuple[Method, PatchViT, Named]:
    """Restore the method and model of a configuration after its last round, and the values of all tensors.

    Tensors that are not in `tensors` have their first values.
    """
    rounds = int(run["rounds"])
    method = make_method(run["method"], run["options"]).in_round(rounds, rounds)
    vit = build_model(
        method, run["model"], classes, seed=seed, options=run["model_options"], pretrained=run["pretrained"]
    )
    first = {name: value.numpy() for name, value in method.tensors(vit).items()}
    sent = as_sent(method, vit, {**first, **tensors})
    return method, vit, unpack_tensors({name: torch.tensor(value) for name, value in sent.items()})


# --- embeddings ---------------------------------------------------------------------------------------


def embed_devices(run: FinishedRun, parts: Path, seed: int, novel: FinishedRun | None = None) -> list[EmbeddedDevice]:
    """Devices with an embedding on the server, novel ones among them; empty if there are few, or no embeddings.

    The plane is that of t-SNE (van der Maaten and Hinton, 2008), as scikit-learn computes it.
    """
    trained = run.embeddings()
    vectors = {**trained, **(novel.embeddings() if novel else {})}
    if len(vectors) < LEAST_DEVICES:
        return []
    from sklearn.manifold import TSNE  # seconds, and memory that counts in the result of a cell without pictures

    perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
    plane = TSNE(perplexity=perplexity, init="random", random_state=seed).fit_transform(np.stack([*vectors.values()]))
    kinds = device_kinds(msgspec.json.decode((parts / PARTITION_FILE).read_bytes(), type=PartitionSummary))
    return [
        EmbeddedDevice(device=device, kind=kinds[device], x=float(x), y=float(y), novel=device not in trained)
        for device, (x, y) in zip(vectors, plane, strict=True)
    ]


def device_kinds(summary: PartitionSummary) -> dict[str, str]:
    """Return each device's domain or, without domains, the class of which it has most training images.

    A device of one coarse label is of the first class of that label.
    """
    if summary.partition == "coarse_iid":
        return {
            entry.name: f"{min(name for name, count in entry.train.items() if count)}, ..." for entry in summary.devices
        }
    if summary.domains and "per_domain" in summary.options:
        each = int(summary.options["per_domain"])
        return {entry.name: summary.domains[number // each] for number, entry in enumerate(summary.devices)}
    return {entry.name: max(entry.train, key=entry.train.__getitem__) for entry in summary.devices}


# --- attention ----------------------------------------------------------------------------------------


def attention_pictures(
    run: FinishedRun, config: Mapping[str, Any], folders: Sequence[Path], seed: int, heads: HeadFusion = "mean"
) -> list[AttentionPicture]:
    """The first test image of each device in `folders`, and the attention of that device's own model to its patches.

    Empty for models of text or without attention, and for prompts that change from block to block, whose attention has
    no rollout. Methods that tune a copy before a test are shown without the tuning.
    """
    pictures, classes = [], run.summary.classes
    for folder in folders:
        own = {**run.tensors(), **run.tensors(folder.name)}
        method, vit, tensors = restore_model(config, len(classes), seed, own)
        if not {"attention", "patches"} <= vit.has or _changes_tokens(method):
            return []
        test = DeviceData.open(folder).relabel(classes).test
        if not len(test):
            continue
        batch = method_batch(method, vit)
        pixels = read_image(test.paths[0], batch.image_size)
        patches = torch.from_numpy(unfold(normalise(pixels[None], batch), batch.patch_size))
        shares = attention_rollout(method, vit, tensors, Images(patches, None), heads)[0]
        side = vit.image_size // vit.patch_size
        pictures.append(
            AttentionPicture(
                device=folder.name,
                label=classes[int(test.labels[0])],
                png=_png(pixels),
                attention=shares.reshape(side, side).tolist(),
            )
        )
    return pictures


def attention_rollout(
    method: Method, vit: PatchViT, tensors: Named, images: Images, heads: HeadFusion = "mean"
) -> Tensor:
    """(B, patches) share of each patch in the tokens that the head reads.

    In each block the heads' attention is averaged and, for the path around it, mixed half and half with the identity;
    the product over blocks says what flows from every token to the class token, or to the mean of all tokens where
    the head reads these. Source: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", arXiv:2005.00928.
    FedTP takes the largest of the heads instead, without the lowest weights of an image (`heads` "max").
    Attention to prefixes, which come from no token, is left out. Letters: B images, Q query tokens, N tokens.
    """
    weights_by_block: list[Tensor] = []
    blocks = [cast(Any, block).attn.attn_drop for block in vit.vit.blocks]
    hooks = [drop.register_forward_hook(lambda _, __, weights: weights_by_block.append(weights)) for drop in blocks]
    try:
        with torch.no_grad():
            if method.evaluate(vit).gather:
                method.forward(vit, tensors, images)
            else:
                method.predict(vit, tensors, images, None)
    finally:
        for hook in hooks:
            hook.remove()
    flow_BNN = torch.eye(weights_by_block[0].shape[2]).expand(len(images.patches), -1, -1)
    for weights in weights_by_block:
        queries, tokens = weights.shape[2], flow_BNN.shape[2]
        fused_BQN = fuse_heads(weights, heads)[..., -tokens:]
        fused_BQN = fused_BQN / fused_BQN.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(fused_BQN.dtype).tiny)
        flow_BNN = (0.5 * fused_BQN + 0.5 * torch.eye(tokens)[:queries]) @ flow_BNN
    read_BN = flow_BNN[:, 0] if vit.pools_class_token else flow_BNN.mean(dim=1)
    shares = read_BN[:, -vit.patches :]
    return shares / shares.sum(dim=-1, keepdim=True)


def fuse_heads(weights_BHQN: Tensor, heads: HeadFusion) -> Tensor:
    """(B, Q, N) one attention of all heads."""
    if heads == "mean":
        return weights_BHQN.mean(dim=1)
    largest_BQN = weights_BHQN.amax(dim=1)
    least_B = largest_BQN.flatten(1).quantile(DISCARDED, dim=1)
    return largest_BQN.where(largest_BQN > least_B[:, None, None], 0.0)


def _changes_tokens(method: Method) -> bool:
    return any(isinstance(patch, Prompts) and patch.placement != "shallow" for patch in method.model_patches())


def _png(pixels: Array) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()
