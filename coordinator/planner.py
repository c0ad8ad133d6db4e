"""From a run's configuration to what devices get: the Program, its graphs, and the first values."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from coordinator.config import RunConfig
from export.graphs import PREDICT, export_graphs
from fedvit.blobs import BlobStore
from fedvit.methods import make_method
from fedvit.methods.base import Method, ServerState
from fedvit.models import build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Evaluate, GraphSpec, Group, Program, Role, TensorSpec, encode_program
from fedvit.tensors import Tensors, pack
from profiles.cost import count_flops


class Plan(NamedTuple):
    """A Program in the blob store, and the server's side of it."""

    digest: str
    program: Program
    method: Method
    vit: PatchViT
    state: ServerState


def make_vit(config: RunConfig, classes: tuple[str, ...]) -> PatchViT:
    return build_vit(
        config.model, len(classes), seed=config.seed, options=config.model_options, pretrained=config.pretrained
    )


def make_plan(
    config: RunConfig,
    classes: tuple[str, ...],
    blobs: BlobStore,
    *,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Build model and graphs and put everything that a device may fetch into `blobs`.

    The same configuration and classes always give the same Program, byte for byte.
    """
    method = make_method(config.method, config.options)
    progress(f"building {config.model}")
    vit = make_vit(config, classes)
    mean, std = vit.mean_std
    batch = Batch(
        image_size=vit.image_size,
        patch_size=vit.patch_size,
        batch_size=method.batch_size,
        mean=mean,
        std=std,
        mask_ratio=method.mask_ratio,
        crop_padding=config.images.crop_padding,
        flip=config.images.flip,
        brightness=config.images.brightness,
    )
    graphs = {
        name: GraphSpec(blobs.put(exported.content).digest, count_flops(exported.content))
        for name, exported in export_graphs(method, vit, batch, cache=cache, progress=progress).items()
    }
    values: Tensors = {name: value.numpy() for name, value in vit.tensors().items()}
    groups: dict[str, Group] = {}
    tensors: dict[str, TensorSpec] = {}
    state: Tensors = {}
    for group, (role, names) in method.groups(vit).items():
        members = {name: values[name] for name in names}
        if role.from_server_each_round:
            state |= members
            groups[group] = Group(role)
        else:
            groups[group] = Group(role, blobs.put(pack(members)).digest)
        tensors |= {name: TensorSpec(value.shape, str(value.dtype), group) for name, value in members.items()}
    program = Program(
        method=config.method,
        model=config.model,
        classes=classes,
        groups=groups,
        tensors={name: tensors[name] for name in values},
        graphs=graphs,
        train=method.phases(vit),
        evaluate=Evaluate(graph=PREDICT),
        batch=batch,
    )
    return Plan(blobs.put(encode_program(program)).digest, program, method, vit, ServerState(state))


def initial_blobs(program: Program) -> list[str]:
    """Digests of what a device fetches once: graphs, and first values of local and frozen groups."""
    first = [group.initial for group in program.groups.values() if group.initial]
    return [graph.digest for graph in program.graphs.values()] + first


def groups_from_server(program: Program) -> list[str]:
    return program.with_role(*(role for role in Role if role.from_server_each_round))
