"""The digests of graphs that come with fedvit, so that devices know them without a publisher: `make own-graphs`."""

from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import click
import torch

from coordinator.compute.planning.batch import choose_batch
from coordinator.config import ImageConfig
from export.graphs import export_unverified
from fedvit.blobs import digest_of
from fedvit.files import atomic_write
from fedvit.known_graphs import OWN_GRAPHS, read_own_graphs
from fedvit.methods import METHODS, build_model, make_method
from fedvit.models import SMALL
from profiles.probes.host import usable_cores

MODELS = (SMALL, "vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")
CLASSES = (2, 10, 100)
"""Numbers of classes of all methods' graphs."""
COMMON = ("eftvit", "fedperfix", "fedtp", "pfedpg", "fedavg", "fedper")
COMMON_CLASSES = (3, 4, 5, 6, 7, 8, 9, 20)
"""More numbers of classes, of these methods."""
ROUNDS = 10
"""Rounds of a run whose graphs are made: some methods train other blocks in later rounds."""

Case = tuple[str, str, int]
"""A method, a model and a number of classes."""


def list_cases() -> Iterator[Case]:
    """List what the graphs of a release are made for, with the default options of every method."""
    for model in MODELS:
        yield from ((method, model, classes) for method in METHODS for classes in CLASSES)
        yield from ((method, model, classes) for method in COMMON for classes in COMMON_CLASSES)


def make_digests(case: Case) -> list[str]:
    """Export the graphs of a case from source, and return their digests."""
    name, model, classes = case
    method = make_method(name, {})
    vit = build_model(method, model, classes, seed=0, options={})
    digests = set[str]()
    for each in dict.fromkeys(method.in_round(number, ROUNDS) for number in range(1, ROUNDS + 1)):
        graphs = export_unverified(each, vit, choose_batch(each, vit, ImageConfig()))
        digests |= {digest_of(content) for content in graphs.values()}
    return sorted(digests)


def store_digests(methods: Collection[str] = ()) -> None:
    """Write the digests of all cases to OWN_GRAPHS; this takes about half an hour on two cores.

    With `methods`, the digests of these are added to the list.
    """
    cases = [case for case in list_cases() if not methods or case[0] in methods]
    found = set(read_own_graphs()) if methods else set[str]()
    start = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(usable_cores(), get_context("spawn"), initializer=start) as pool:
        for number, (case, digests) in enumerate(zip(cases, pool.map(make_digests, cases), strict=True), start=1):
            found.update(digests)
            click.echo(f"{number}/{len(cases)} {' '.join(map(str, case))}")
    lines = ["# graphs of fedvit's own methods on standard models, made by: make own-graphs", *sorted(found)]
    atomic_write(OWN_GRAPHS, "".join(f"{line}\n" for line in lines).encode())
