"""A data set of several domains, each with the same class folders: Office-Home, PACS, Office-Caltech, DomainNet."""

from pathlib import Path
from typing import Any

import numpy as np

from fedvit.data.layout import TEST, TRAIN, Tree
from fedvit.errors import DataError
from fleet.datasets.imagefiles import keep_readable, open_tree
from fleet.datasets.samples import Samples


def is_domainfolder(path: Path) -> bool:
    """Return True if all images are in `<domain>/<class>/`, in two or more domains; train and test are not domains."""
    try:
        tree = open_tree(path)
    except DataError:
        return False  # the reader that is tried last reports the reason
    domains = tree.folders.values()
    return (
        len(domains) > 1
        and not tree.folders.keys() & {TRAIN, TEST}
        and not tree.images
        and all(domain.folders and not domain.images for domain in domains)
        and any(_has_images(domain) for domain in domains)
    )


def read_domainfolder(path: Path, size: int = 32) -> Samples:
    """Open `<domain>/<class>/*`, a folder or a .zip; all inside one top folder is fine too.

    Domains and classes are sorted by name; the classes are those of all domains together. Images are decoded
    when asked for; those without a good header are left out and listed in `unreadable`.

    Raises DataError, naming `path`, when it cannot be opened or holds no readable image.
    """
    tree = open_tree(path)
    domains = tuple(sorted(tree.folders))
    classes = tuple(sorted({name for domain in tree.folders.values() for name in domain.folders}))
    entries = [
        (file, domain, label)
        for domain, domain_name in enumerate(domains)
        for label, name in enumerate(classes)
        if name in tree.folders[domain_name].folders
        for _, file in sorted(tree.folders[domain_name].folders[name].images.items())
    ]
    none = f"{path}: no readable image in the {len(classes)} class folders of {len(domains)} domains"
    images, good, unreadable = keep_readable([file for file, _, _ in entries], size, none)
    return Samples(
        dataset=path.resolve().name,
        size=size,
        images=images,
        labels=np.array([label for _, _, label in entries], dtype=np.int64)[good],
        classes=classes,
        domains=np.array([domain for _, domain, _ in entries], dtype=np.int64)[good],
        domain_names=domains,
        unreadable=unreadable,
    )


def _has_images(domain: Tree[Any]) -> bool:
    return any(folder.images for folder in domain.folders.values())
