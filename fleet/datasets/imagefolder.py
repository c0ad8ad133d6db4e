"""A data set that lies as class folders, in a folder or in a .zip, to be dealt out to devices."""

from pathlib import Path

import numpy as np

from fedvit.data.layout import find_layout
from fleet.datasets.cifar100 import coarse_labels
from fleet.datasets.imagefiles import keep_readable, open_tree
from fleet.datasets.samples import Samples, mark_tests


def read_imagefolder(path: Path, size: int = 32) -> Samples:
    """Open `train/<class>/*` with `test/<class>/*`, or `<class>/*`; all inside one top folder is fine too.

    Train and test images are put together: every device gets a test share of its own later. Images are
    decoded when asked for; those without a good header are left out and listed in `unreadable`. Class
    folders named as the classes of CIFAR-100 give coarse labels.

    Raises DataError, naming `path`, when it is neither a folder nor a .zip, holds no class folders or no
    readable image, or when a .zip has members that point outside of it.
    """
    layout = find_layout(open_tree(path), str(path))
    entries = layout.train + (layout.test or [])
    none = f"{path}: no readable image in the {len(layout.classes)} class folders"
    images, good, unreadable = keep_readable([file for file, _ in entries], size, none)
    labels = np.array([label for _, label in entries], dtype=np.int64)[good]
    return Samples(
        dataset=path.resolve().name,
        size=size,
        images=images,
        labels=labels,
        classes=layout.classes,
        coarse_labels=coarse_labels(layout.classes, labels),
        unreadable=unreadable,
        official_test=mark_tests((np.arange(len(entries)) >= len(layout.train))[good].tolist()),
    )
